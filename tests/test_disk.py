"""Files and folders are synced with all that their names need."""

import os
from pathlib import Path

import pytest

from offbeat.disk import make_folder, remove_parts, replacing, sync, write_file

OPEN = Path("/proc/self/fd")


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Paths in the order in which they are synced."""
    paths: list[Path] = []
    monkeypatch.setattr("offbeat.disk.os.fsync", lambda descriptor: paths.append(Path(f"/proc/self/fd/{descriptor}").readlink()))
    return paths


def test_a_file_is_synced_before_it_has_its_name_and_the_name_afterwards(tmp_path: Path, synced: list[Path]) -> None:
    write_file(tmp_path / "identity", b"one")
    write_file(tmp_path / "identity", b"two")
    assert (tmp_path / "identity").read_bytes() == b"two" and len(list(tmp_path.iterdir())) == 1
    assert synced == [tmp_path / ".identity.part", tmp_path] * 2


def test_a_new_folder_is_synced_in_every_folder_that_is_new_above_it(tmp_path: Path, synced: list[Path]) -> None:
    make_folder(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir() and synced == [tmp_path / "a", tmp_path]
    make_folder(tmp_path / "a" / "b")
    assert len(synced) == 2, "nothing was new"


def test_syncing_leaves_no_file_open(tmp_path: Path) -> None:
    before = len(list(OPEN.iterdir()))
    sync(tmp_path)
    with pytest.raises(FileNotFoundError):
        sync(tmp_path / "none")
    assert len(list(OPEN.iterdir())) == before


def test_a_file_that_is_not_written_to_its_end_leaves_the_one_before(tmp_path: Path, synced: list[Path]) -> None:
    with replacing(tmp_path / "rows") as file:
        file.write(b"one")
    with pytest.raises(KeyError), replacing(tmp_path / "rows") as file:
        file.write(b"tw")
        raise KeyError
    assert (tmp_path / "rows").read_bytes() == b"one" and not synced


def test_processes_that_write_one_file_at_a_time_each_write_their_own_beside_it(tmp_path: Path) -> None:
    with replacing(tmp_path / "rows", concurrent=True) as file:
        file.write(b"one")
        assert [path.name for path in tmp_path.iterdir()] == [f".rows.{os.getpid()}.part"]
    assert [path.name for path in tmp_path.iterdir()] == ["rows"]


def test_parts_of_a_killed_process_are_removed_and_nothing_else(tmp_path: Path) -> None:
    for name in ("whole", ".hidden", ".whole.part", "named.part"):
        (tmp_path / name).write_bytes(b"data")
    remove_parts(tmp_path)
    remove_parts(tmp_path / "absent")
    assert {path.name for path in tmp_path.iterdir()} == {"whole", ".hidden", "named.part"}
