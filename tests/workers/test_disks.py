"""Folders that travel arrive complete, as they were sent, in their place, or not at all."""

import asyncio
import os
import time
from pathlib import Path

import pytest

from far import far_disk
from offbeat.data import wire
from offbeat.errors import DeadlineError, DeathError, StorageError
from offbeat.workers import disks
from offbeat.workers.disks import (
    DiskFolder,
    DiskService,
    FileInfo,
    FilePiece,
    Listing,
    NearDisk,
    ReadPiece,
    Settle,
    WritePiece,
    below,
    fetch,
    open_scratch,
    place_of,
    send,
)
from offbeat.workers.worker import Nothing

FILES = {"model.safetensors": os.urandom(300), "empty": b"", ".metadata": b"about", "adapter/weights": os.urandom(70)}


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disks, "PIECE_BYTES", 64)


def fill(folder: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_folder_goes_there_and_comes_back_as_it_was(tmp_path: Path) -> None:
    folder, far = fill(tmp_path / "here" / "ranks", FILES), far_disk(tmp_path / "there")
    assert asyncio.run(send(folder, far, timeout_s=60)) == len(FILES)
    assert contents(Path(far.path(place_of(folder)))) == FILES
    fill(folder, {"model.safetensors": b"older", "left over": b"older"})
    assert asyncio.run(fetch(folder, [far], timeout_s=60)) == len(FILES)
    assert contents(folder) == FILES
    assert [path.name for path in folder.parent.iterdir()] == ["ranks"]
    assert asyncio.run(fetch(tmp_path / "here" / "nothing", [far], timeout_s=60)) == 0


def test_parts_of_several_machines_make_one_folder_beside_what_is_here(tmp_path: Path) -> None:
    folder = fill(tmp_path / "here" / "ranks", {"__0_0": b"zero"})
    fars = [far_disk(tmp_path / name, name) for name in ("a", "b")]
    for number, far in enumerate(fars, start=1):
        fill(Path(far.path(place_of(folder))), {f"__{number}_0": b"part"})
    assert asyncio.run(fetch(folder, fars, merge=True, timeout_s=60)) == 2
    assert contents(folder) == {"__0_0": b"zero", "__1_0": b"part", "__2_0": b"part"}
    fill(Path(fars[1].path(place_of(folder))), {"__1_0": b"other"})
    with pytest.raises(StorageError, match="a and b both have __1_0 of ranks"):
        asyncio.run(fetch(folder, fars, merge=True, timeout_s=60))


def test_only_the_files_that_are_wanted_travel(tmp_path: Path) -> None:
    folder, far = fill(tmp_path / "here" / "model", FILES), far_disk(tmp_path / "there")
    assert asyncio.run(send(folder, far, only=("weights", "emp*"), timeout_s=60)) == 2
    assert contents(Path(far.path(place_of(folder)))).keys() == {"empty", "adapter/weights"}


def test_a_file_that_has_changed_on_its_way_is_not_put_in_place(tmp_path: Path) -> None:
    folder = fill(tmp_path / "here" / "ranks", FILES)
    there = tmp_path / "there"

    def flip(method: str, _payload: bytes) -> None:
        if method == "settle":
            (came,) = there.rglob("model.safetensors")
            came.write_bytes(bytes([came.read_bytes()[0] ^ 1]) + came.read_bytes()[1:])

    with pytest.raises(StorageError, match=r"model\.safetensors of .*ranks has come with other bytes than were sent; nothing was put in"):
        asyncio.run(send(folder, far_disk(there, meddle=flip), timeout_s=60))
    assert contents(there) == {}


def test_a_file_that_grows_while_it_is_sent_is_not_put_in_place(tmp_path: Path) -> None:
    folder = fill(tmp_path / "here" / "ranks", FILES)

    def grow(method: str, _payload: bytes) -> None:
        if method == "begin_arrival":
            fill(folder, {"model.safetensors": bytes(400)})

    with pytest.raises(StorageError, match="has come with other bytes"):
        asyncio.run(send(folder, far_disk(tmp_path / "there", meddle=grow), timeout_s=60))


@pytest.mark.parametrize("dies_in", ["begin_arrival", "write", "settle"])
def test_a_machine_that_dies_meanwhile_leaves_what_was_there(dies_in: str, tmp_path: Path) -> None:
    folder, far = fill(tmp_path / "here" / "ranks", FILES), far_disk(tmp_path / "there")
    asyncio.run(send(folder, far, timeout_s=60))
    fill(folder, {"model.safetensors": b"newer"})
    before = contents(Path(far.path(place_of(folder))))

    def die(method: str, payload: bytes) -> None:
        if method == dies_in and not (method == "write" and wire.decode(WritePiece, payload).name == "empty"):
            raise DeathError("rank 1 died with its Ray actor")

    with pytest.raises(DeathError):
        asyncio.run(send(folder, far_disk(tmp_path / "there", meddle=die), timeout_s=60))
    assert contents(tmp_path / "there") == {f"{place_of(folder)}/{name}": data for name, data in before.items()}
    asyncio.run(send(folder, far, timeout_s=60))
    assert contents(Path(far.path(place_of(folder))))["model.safetensors"] == b"newer"


def test_what_comes_from_a_machine_that_dies_leaves_no_half_file_here(tmp_path: Path) -> None:
    folder = tmp_path / "here" / "ranks"
    fill(Path(far_disk(tmp_path / "there").path(place_of(folder))), FILES)

    def die(method: str, payload: bytes) -> None:
        if method == "read" and wire.decode(ReadPiece, payload).offset:
            raise DeathError("rank 1 died with its Ray actor")

    with pytest.raises(DeathError):
        asyncio.run(fetch(folder, [far_disk(tmp_path / "there", meddle=die)], timeout_s=60))
    assert list(folder.parent.iterdir()) == []


def test_a_transfer_has_a_deadline_that_names_it(tmp_path: Path) -> None:
    folder, far = fill(tmp_path / "here" / "ranks", FILES), far_disk(tmp_path / "there", meddle=lambda _method, _payload: time.sleep(0.02))
    with pytest.raises(DeadlineError, match="waiting for ranks to reach node a passed its deadline of 0.01 s"):
        asyncio.run(send(folder, far, timeout_s=0.01))


def test_no_more_than_a_piece_is_read_at_once(tmp_path: Path) -> None:
    service = DiskService(tmp_path, durable=False)
    fill(tmp_path / "a", FILES)
    assert [len(service.read(ReadPiece("a", "model.safetensors", offset)).data) for offset in (0, 64, 256, 300)] == [64, 64, 44, 0]


@pytest.mark.parametrize("name", ["", "/etc/passwd", "..", "../x", "a/../../x", "a//b", "./a", "a/.", "a\0b"])
def test_a_name_that_leads_elsewhere_is_refused(name: str, tmp_path: Path) -> None:
    service, info = DiskService(tmp_path / "root", durable=False), FileInfo(name, 1, "0" * 64)
    service.begin_arrival(DiskFolder("a/b"))
    with pytest.raises(StorageError, match="is not the name of a file in a folder that travels"):
        below(tmp_path, name)
    for request in (ReadPiece("a/b", name, 0), WritePiece("a/b", name, 0, b"x"), Settle("a/b", (info,)), DiskFolder(name)):
        method = {ReadPiece: "read", WritePiece: "write", Settle: "settle", DiskFolder: "remove"}[type(request)]
        with pytest.raises(StorageError, match="is not the name of"):
            service.handle(method, wire.encode(request))
    for method in ("begin_arrival", "list_files", "abandon", "has"):
        with pytest.raises(StorageError, match="is not the name of"):
            service.handle(method, wire.encode(DiskFolder(name)))


def test_a_machine_that_lists_a_name_that_leads_elsewhere_writes_nothing_here(tmp_path: Path) -> None:
    async def main() -> None:
        far = far_disk(tmp_path / "there")
        answers = {"list_files": Listing((FileInfo("../../evil", 1, "0" * 64),)), "read": FilePiece(b"x")}

        async def call(method: str, _payload: bytes, _timeout_s: float) -> bytes:
            return wire.encode(answers[method])

        far._call = call
        await fetch(tmp_path / "here" / "deep" / "ranks", [far], timeout_s=60)

    with pytest.raises(StorageError, match=r"'\.\./\.\./evil' is not the name of"):
        asyncio.run(main())
    assert contents(tmp_path) == {}


def test_a_piece_that_does_not_follow_the_one_before_is_refused(tmp_path: Path) -> None:
    service = DiskService(tmp_path, durable=False)
    service.begin_arrival(DiskFolder("a"))
    service.write(WritePiece("a", "file", 0, b"12345"))
    with pytest.raises(StorageError, match="has 5 bytes where its next piece begins at 3; two senders"):
        service.write(WritePiece("a", "file", 3, b"45678"))


def test_what_is_written_never_follows_a_link(tmp_path: Path) -> None:
    async def main() -> None:
        near = NearDisk(tmp_path / "root")
        await near.ask("begin_arrival", DiskFolder("a"), Nothing, timeout_s=60)
        (tmp_path / "root" / ".a.arriving" / "link").symlink_to(tmp_path / "elsewhere")
        await near.ask("write", WritePiece("a", "link", 0, b"x"), Nothing, timeout_s=60)

    with pytest.raises(StorageError, match="could not be read or written"):
        asyncio.run(main())
    assert not (tmp_path / "elsewhere").exists()


def test_a_disk_that_fails_is_told_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match=r"could not be read or written: .*; free space, or give another folder: run.dir, or clus"):
        DiskService(tmp_path / "file", durable=False).handle("begin_arrival", wire.encode(DiskFolder("a")))


def test_folders_beside_each_other_are_so_there_too_and_others_are_not(tmp_path: Path) -> None:
    first, second, other = (place_of(tmp_path / name).split("/") for name in ("a/v1", "a/v2", "b/v1"))
    assert first[0] == second[0] != other[0] and (first[1], second[1], other[1]) == ("v1", "v2", "v1")


def test_a_scratch_folder_is_private_and_those_of_dead_processes_are_removed(tmp_path: Path) -> None:
    dead, young, strange = tmp_path / "offbeat-files-dead", tmp_path / "offbeat-files-young", tmp_path / "others"
    for folder in (dead, young, strange):
        folder.mkdir()
    os.utime(dead, (0, 0))
    used = open_scratch(tmp_path, "used")
    os.utime(used, (0, 0))
    assert open_scratch(tmp_path, "mine").stat().st_mode & 0o777 == 0o700
    assert {path.name for path in tmp_path.iterdir()} == {"offbeat-files-young", "others", "offbeat-files-used", "offbeat-files-mine"}
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match=r"files cannot travel through .*; set cluster\.scratch_dir to a folder that every machine"):
        open_scratch(tmp_path / "file", "mine")
