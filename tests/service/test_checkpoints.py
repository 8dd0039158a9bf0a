"""Checkpoints are complete or absent, check out, and their files stay exactly as long as something needs them."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from offbeat.errors import StorageError
from offbeat.service.checkpoints import Checkpoints
from offbeat.service.errors import RequestError, UnknownError
from offbeat.service.ids import CheckpointPath
from offbeat.service.limits import Limits, Usage
from offbeat.service.serve import open_store
from offbeat.service.store import Store
from offbeat.service.tables import CheckpointRow
from offbeat.weights.protocol import Manifest
from small_service import ALICE, BOB, LORA
from support.powercut import Disk, PowerCut
from support.saving import weights

CHILD = Path(__file__).parents[1] / "support" / "saving.py"
RUN = "00000000-0000-4000-8000-000000000000:train:0"
PATH = CheckpointPath(RUN, "training", "one")
ADAPTER = Manifest(3, "elsewhere", "fingerprint", (1, 2), (-1.25,), adapter="tenant", num_bytes=10)


class World:
    """Checkpoints with a clock."""

    def __init__(self, folder: Path) -> None:
        self.store = Store.open(f"sqlite:///{folder / 'x.db'}")
        self.usage = Usage(lambda _: Limits(max_disk_bytes=100))
        self.folder = folder / "checkpoints"
        self.now = 1000.0
        self.removed: list[str] = []
        self.checkpoints = self.open()

    def open(self) -> Checkpoints:
        return Checkpoints(
            self.store.load().checkpoints, store=self.store, usage=self.usage, folder=self.folder,
            on_removed=lambda adapter: self.removed.append(adapter.name), clock=lambda: self.now)

    async def make(self, path: CheckpointPath = PATH, *, data: bytes = b"x" * 40, overwrite: bool = False, **changes: object) -> str:
        async with self.checkpoints.making() as folder:
            self.checkpoints.path(folder).mkdir()
            (self.checkpoints.path(folder) / "weights").write_bytes(data)
            size = await self.checkpoints.seal(folder, adapter=ADAPTER if path.kind == "sampler" else None)
            row = CheckpointRow(
                path.run_id, path.kind, path.name, "alice", folder, self.now, None, size, False, {}, LORA, "base", step=1)
            await self.checkpoints.add(replace(row, **changes), overwrite=overwrite)  # pyright: ignore[reportArgumentType]
        return folder

    @property
    def folders(self) -> set[str]:
        return {path.name for path in self.folder.iterdir()}


def run(folder: Path, body: Callable[[World], Awaitable[None]]) -> None:
    async def main() -> None:
        world = World(folder)
        await body(world)
        world.store.close()

    asyncio.run(main())


def test_a_checkpoint_is_its_owners_until_it_is_public_and_there_until_it_is_deleted(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        checkpoints = world.checkpoints
        folder = await world.make()
        row = checkpoints.readable(ALICE, PATH)
        assert row.folder == folder and checkpoints.owned(ALICE, PATH) is row and world.usage.of("alice").disk_bytes == 40
        assert set(checkpoints.files(row)) == {"weights"}
        with pytest.raises(UnknownError, match="or it is not yours"):
            checkpoints.readable(BOB, PATH)
        await checkpoints.set_public(row, public=True)
        assert checkpoints.readable(BOB, PATH).public
        with pytest.raises(UnknownError, match="or it is not yours"):
            checkpoints.owned(BOB, PATH)
        assert [row.name for row in checkpoints.select(run_id=RUN)] == ["one"] and checkpoints.select(owner="bob") == []
        world.checkpoints = world.open()
        assert world.checkpoints.readable(BOB, PATH).folder == folder
        await checkpoints.delete(checkpoints.owned(ALICE, PATH))
        with pytest.raises(UnknownError):
            checkpoints.readable(ALICE, PATH)
        assert world.folders == set() and not world.store.load().checkpoints

    run(tmp_path, body)


def test_damage_is_told_and_an_adapter_comes_back_as_it_was_sealed(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        folder = await world.make(CheckpointPath(RUN, "sampler", "one"))
        path = world.checkpoints.path(folder)
        assert await world.checkpoints.adapter(folder) == replace(ADAPTER, folder=str(path))
        plain = await world.make()
        await world.checkpoints.verify(plain)
        with pytest.raises(StorageError, match="holds no adapter"):
            await world.checkpoints.adapter(plain)
        (path / "weights").write_bytes(b"x" * 39 + b"y")
        with pytest.raises(StorageError, match="damaged: weights is not what was written"):
            await world.checkpoints.adapter(folder)
        (path / "weights").unlink()
        with pytest.raises(StorageError, match="damaged: weights cannot be read"):
            await world.checkpoints.verify(folder)
        (path / "manifest.json").write_bytes(b"{")
        with pytest.raises(StorageError, match="gone or damaged"):
            await world.checkpoints.verify(folder)

    run(tmp_path, body)


def test_files_stay_while_anything_needs_them(tmp_path: Path) -> None:
    needed: set[str] = set()

    async def body(world: World) -> None:
        checkpoints, where = world.checkpoints, CheckpointPath(RUN, "sampler", "one")
        checkpoints.users.append(needed.__contains__)
        folder = await world.make(where)
        row = checkpoints.owned(ALICE, where)
        copy = await checkpoints.copy(row, run_id=RUN.replace("train:0", "train:1"), owner="bob", ttl_s=None)
        async with checkpoints.holding(folder):
            await checkpoints.delete(row)
            needed.add(folder)
            await checkpoints.delete(checkpoints.owned(BOB, CheckpointPath.parse(copy)))
            assert world.folders == {folder}
        assert world.folders == {folder} and world.removed == []
        needed.clear()
        await checkpoints.release_folder(folder)
        assert world.folders == set() and world.removed == ["tenant@3"]

    run(tmp_path, body)


def test_a_name_is_taken_once_unless_it_is_to_be_overwritten(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        first = await world.make()
        with pytest.raises(RequestError, match=r"there is a checkpoint tinker://.*weights/one already"):
            await world.make()
        assert world.folders == {first}
        second = await world.make(overwrite=True)
        assert world.folders == {second} and world.usage.of("alice").disk_bytes == 40

    run(tmp_path, body)


def test_what_exceeds_the_owners_disk_leaves_nothing_behind(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        folder = await world.make()
        with pytest.raises(RequestError, match="your checkpoints, samplers and answers take up 40 bytes"):
            await world.make(replace(PATH, name="large"), data=b"x" * 61)
        assert world.folders == {folder} and world.usage.of("alice").disk_bytes == 40
        await world.make(replace(PATH, name="large"), data=b"x" * 60)

    run(tmp_path, body)


def test_what_expires_is_gone_at_once_and_removed_by_the_sweep(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        checkpoints = world.checkpoints
        await world.make()
        await checkpoints.set_ttl(checkpoints.owned(ALICE, PATH), 50)
        await checkpoints.sweep()
        assert len(world.folders) == 1
        world.now += 50
        with pytest.raises(UnknownError):
            checkpoints.readable(ALICE, PATH)
        await checkpoints.sweep()
        assert world.folders == set() and world.usage.of("alice").disk_bytes == 0

    run(tmp_path, body)


def test_a_name_that_is_taken_again_while_expired_ones_are_removed_stays(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        paths = [PATH, replace(PATH, name="two")]
        for path in paths:
            await world.make(path, expires=world.now + 50)
        world.now += 50
        sweep = asyncio.create_task(world.checkpoints.sweep())
        await asyncio.sleep(0)  # the first is being deleted
        again = await world.make(paths[1], overwrite=True)
        await sweep
        assert world.folders == {again} and world.checkpoints.readable(ALICE, paths[1]).folder == again
        assert world.usage.of("alice").disk_bytes == 40 and len(world.store.load().checkpoints) == 1

    run(tmp_path, body)


def test_saves_of_one_name_that_fail_together_leave_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(world: World) -> None:
        folder = await world.make(data=b"x" * 10)

        async def full(*_rows: object) -> None:
            await asyncio.sleep(0.01)
            raise StorageError("the disk is full")

        with monkeypatch.context() as patch:
            patch.setattr(world.store, "put", full)
            saves = [world.make(data=b"x" * 20, overwrite=True) for _ in range(2)]
            errors = await asyncio.gather(*saves, return_exceptions=True)
        assert [str(error) for error in errors] == ["the disk is full"] * 2
        assert world.folders == {folder} and world.usage.of("alice").disk_bytes == 10
        assert world.checkpoints.readable(ALICE, PATH).folder == folder

    run(tmp_path, body)


def test_what_no_row_names_is_put_aside_at_the_next_start_and_goes_when_it_is_old(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        kept = await world.make()
        (world.folder / "0123").mkdir()
        (world.folder / "0123" / "half").write_bytes(b"x")
        again = world.open()
        await again.clean()
        assert world.folders == {kept, "orphans"}
        (half,) = world.folder.glob("orphans/*/0123/half")
        assert half.read_bytes() == b"x"
        world.now += 7 * 86400 - 1
        await again.sweep()
        assert half.exists()
        world.now += 1
        await again.sweep()
        assert world.folders == {kept, "orphans"} and not list((world.folder / "orphans").iterdir())

    run(tmp_path, body)


def test_what_an_older_database_does_not_name_comes_back_with_the_newer_one(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        await world.make()
        newer = await world.make(replace(PATH, name="newer"))
        needed = {"state"}
        (world.folder / "state").mkdir()
        world.checkpoints.users.append(needed.__contains__)
        rows = world.store.load().checkpoints
        await world.store.delete(*(row for row in rows if row.name == "newer"))
        older = world.open()
        await older.clean()
        assert newer not in world.folders and "state" not in world.folders
        await world.store.put(*rows)
        again = world.open()
        again.users.append(needed.__contains__)
        await again.clean()
        await again.verify(newer)
        assert "state" in world.folders and not list(world.folder.glob("orphans/*/*"))

    run(tmp_path, body)


@pytest.mark.parametrize("act", ["set_public", "set_ttl", "delete"])
def test_a_change_that_the_database_did_not_take_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, act: str) -> None:
    async def body(world: World) -> None:
        folder, checkpoints = await world.make(), world.checkpoints
        row = checkpoints.owned(ALICE, PATH)
        change = {
            "set_public": lambda: checkpoints.set_public(row, public=True), "set_ttl": lambda: checkpoints.set_ttl(row, 50),
            "delete": lambda: checkpoints.delete(row)}[act]

        async def full(*_rows: object) -> None:
            raise StorageError("the disk is full")

        with monkeypatch.context() as patch:
            patch.setattr(world.store, "put", full)
            patch.setattr(world.store, "delete", full)
            with pytest.raises(StorageError):
                await change()
        assert checkpoints.owned(ALICE, PATH) == row == world.open().owned(ALICE, PATH)
        assert world.folders == {folder} and world.usage.of("alice").disk_bytes == 80, "of both that were opened"
        await change()
        known, stored = checkpoints.select(), world.open().select()
        assert known == stored != [row]

    run(tmp_path, body)


def test_changes_of_one_checkpoint_at_once_are_all_there_and_none_is_of_what_replaced_it(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        await world.make()
        row = world.checkpoints.owned(ALICE, PATH)
        await asyncio.gather(world.checkpoints.set_public(row, public=True), world.checkpoints.set_ttl(row, 50))
        both = world.checkpoints.owned(ALICE, PATH)
        assert (both.public, both.expires) == (True, world.now + 50) and world.open().owned(ALICE, PATH) == both
        again, *late = await asyncio.gather(
            world.make(overwrite=True), world.checkpoints.delete(both), world.checkpoints.set_public(both, public=False),
            return_exceptions=True)
        assert [type(error) for error in late] in ([type(None), UnknownError], [type(None), type(None)])
        stored = world.store.load().checkpoints
        assert {row.folder for row in stored} == {row.folder for row in world.checkpoints.select()} <= {again}
        assert world.folders == {again}

    run(tmp_path, body)


@pytest.mark.parametrize("seed", range(4))
def test_a_copy_beside_a_delete_is_whole_or_refused(tmp_path: Path, seed: int) -> None:
    async def body(world: World) -> None:
        folder, checkpoints = await world.make(), world.checkpoints
        row = checkpoints.owned(ALICE, PATH)

        async def copy() -> str:
            for _ in range(seed):
                await asyncio.sleep(0)
            return await checkpoints.copy(
                checkpoints.readable(ALICE, PATH), run_id=RUN.replace("train:0", "train:1"), owner="alice", ttl_s=None)

        copied, _ = await asyncio.gather(copy(), checkpoints.delete(row), return_exceptions=True)
        if isinstance(copied, str):
            await checkpoints.verify(checkpoints.owned(ALICE, CheckpointPath.parse(copied)).folder)
            assert world.folders == {folder}
        else:
            assert isinstance(copied, UnknownError) and world.folders == set()

    run(tmp_path, body)


def test_a_copy_that_waits_for_anothers_saving_keeps_the_files_of_what_is_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(world: World) -> None:
        folder, checkpoints, gate = await world.make(), world.checkpoints, asyncio.Event()
        storing = asyncio.Event()
        row, put = checkpoints.owned(ALICE, PATH), world.store.put

        async def slow(*rows: CheckpointRow) -> None:
            storing.set()
            await gate.wait()
            await put(*rows)

        monkeypatch.setattr(world.store, "put", slow)
        other = asyncio.create_task(world.make(replace(PATH, name="other"), data=b"x"))
        await storing.wait()
        copying = asyncio.create_task(checkpoints.copy(row, run_id=RUN.replace("train:0", "train:1"), owner="bob", ttl_s=None))
        await asyncio.sleep(0)
        deleting = asyncio.create_task(checkpoints.delete(row))
        await asyncio.sleep(0.05)
        gate.set()
        copied, _, _ = await asyncio.gather(copying, deleting, other)
        await checkpoints.verify(folder)
        assert checkpoints.owned(BOB, CheckpointPath.parse(copied)).folder == folder and len(world.folders) == 2

    run(tmp_path, body)


def test_a_power_cut_takes_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    """A process that saves, overwrites and deletes is killed, and its disk keeps only what was synced, or any more of what was written."""
    data = tmp_path / "data"
    data.mkdir()
    power = PowerCut(tmp_path / "power", data)
    said: list[list[str]] = []
    with subprocess.Popen(
            [sys.executable, str(CHILD), str(data)], env=os.environ | power.environment, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        for line in child.stdout:
            said.append(line.split())
            if len(said) == 100:
                child.kill()
        said = [line for line in said if len(line) == 3]
    assert child.returncode == -9
    saved = {name: int(number) for what, name, number in said if what == "saved"}
    gone = {name for what, name, _ in said if what == "deleted"}
    asked = {name for what, name, _ in said if what == "deleting"}
    assert len(saved) > 20 and len(gone) > 5

    async def check(after: Path) -> None:
        store = open_store("", after)
        checkpoints = Checkpoints(
            store.load().checkpoints, store=store, usage=Usage(lambda _: Limits()), folder=after / "checkpoints")
        await checkpoints.clean()
        rows = {row.name: row for row in checkpoints.select()}
        assert saved.keys() - asked <= rows.keys() and not gone & rows.keys()
        for name, row in rows.items():
            assert row.step >= saved.get(name, 0), "not an older one"
            await checkpoints.verify(row.folder)
            assert (checkpoints.path(row.folder) / "weights").read_bytes() == weights(name, row.step)
        store.close()

    for number, disk in enumerate([Disk.STRICT, Disk.NAMES, *[Disk.MIXED] * 4]):
        power.cut(tmp_path / f"after-{number}", disk, seed=number)
        asyncio.run(check(tmp_path / f"after-{number}"))


def test_a_manifest_with_the_mean_of_the_canary_alone_is_still_read(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        folder = await world.make(CheckpointPath(RUN, "sampler", "one"))
        (file,) = world.checkpoints.path(folder).glob("*.json")
        manifest = msgspec.json.decode(file.read_bytes())
        assert manifest["adapter"].keys() == {
            "tenant", "version", "folder", "fingerprint", "canary", "canary_logprobs", "num_bytes", "base"}
        del manifest["adapter"]["base"]
        manifest["adapter"] |= {"canary_logprob": manifest["adapter"].pop("canary_logprobs")[0], "canary_before": None}
        file.write_bytes(msgspec.json.encode(manifest))
        assert replace(await world.checkpoints.adapter(folder), folder=ADAPTER.folder) == ADAPTER

    run(tmp_path, body)
