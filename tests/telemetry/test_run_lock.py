"""The lock on a run's folder, and telling from outside whether it is held."""

import errno
import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from offbeat.errors import ConfigError
from offbeat.telemetry import run_lock
from offbeat.telemetry.run_lock import is_running, lock_run


def test_a_folder_is_running_as_long_as_its_lock_is_held(tmp_path: Path) -> None:
    assert is_running(tmp_path) is None
    with lock_run(tmp_path):
        assert is_running(tmp_path) is True
    assert is_running(tmp_path) is False


def test_looking_does_not_take_the_lock_and_a_refused_start_leaves_it_readable(tmp_path: Path) -> None:
    with lock_run(tmp_path):
        with pytest.raises(ConfigError, match="is being run by another process"):
            lock_run(tmp_path)
        assert is_running(tmp_path) is True
    is_running(tmp_path)
    lock_run(tmp_path).close()


def test_a_copy_of_a_running_folder_is_not_running(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with lock_run(tmp_path / "run"):
        shutil.copytree(tmp_path / "run", tmp_path / "copy")
        assert is_running(tmp_path / "copy") is False


def test_a_run_of_another_machine_or_a_system_without_a_list_of_locks_is_unknown(tmp_path: Path) -> None:
    with lock_run(tmp_path):
        assert is_running(tmp_path, locks=tmp_path / "none") is None
    for other in ("", "4bd1c1d4-0000-0000-0000-000000000000 pid:[4026531836]\n", "\udcff"):
        (tmp_path / "lock").write_text(other, errors="surrogateescape")
        assert is_running(tmp_path) is None


def test_locks_of_other_kinds_and_files_are_no_sign_and_one_behind_others_is_found(tmp_path: Path) -> None:
    lock_run(tmp_path).close()
    inode, locks = (tmp_path / "lock").stat().st_ino, tmp_path / "locks"
    locks.write_text(
        f"1: POSIX  ADVISORY  WRITE 7 fe:00:{inode} 0 EOF\n2: FLOCK  ADVISORY  WRITE 7 fe:00:{inode}1 0 EOF\n\n3: FLOCK\n")
    assert is_running(tmp_path, locks=locks) is False
    with locks.open("a") as file:
        file.write(f"4: FLOCK  ADVISORY  WRITE 8 00:2c:{inode} 0 EOF\n")
    assert is_running(tmp_path, locks=locks) is True


@pytest.fixture
def no_flock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system without locks, as some mounts of Lustre (ENOSYS) and NFS (ENOLCK)."""
    def refuse(_file: object, _how: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", refuse)


@pytest.mark.usefixtures("no_flock")
def test_a_file_system_without_locks_has_a_file_that_one_process_can_make(tmp_path: Path) -> None:
    with lock_run(tmp_path):
        assert is_running(tmp_path) is True
        with pytest.raises(ConfigError, match="is being run by another process; wait for it"):
            lock_run(tmp_path)
    assert is_running(tmp_path) is False and [path.name for path in tmp_path.iterdir()] == ["lock"]
    run = tmp_path / "run"
    run.mkdir()
    with lock_run(run):
        run.rename(tmp_path / "run.1")
    assert [path.name for path in (tmp_path / "run.1").iterdir()] == ["lock"], "the lock goes with a folder that is renamed"


@pytest.mark.parametrize("mounted_without", [True, False])
def test_who_holds_a_run_without_locks_is_told_and_the_dead_make_way(
    mounted_without: bool, tmp_path: Path, request: pytest.FixtureRequest,
) -> None:
    if mounted_without:
        request.getfixturevalue("no_flock")
    held, own = tmp_path / "lock.held", run_lock._Holder.own()
    for holder, shown in (
        (replace(own, system="another boot\n", host="node-7", pid=4711), "may be being run by process 4711 of node-7, and its file system"),
        (own, "is being run by another process"),
    ):
        held.write_text(json.dumps(asdict(holder)))
        with pytest.raises(ConfigError, match=shown):
            lock_run(tmp_path)
        assert held.exists()
    held.write_text("")
    with pytest.raises(ConfigError, match=f"if that has ended, remove {held}"):
        lock_run(tmp_path)
    held.write_text(json.dumps(asdict(replace(own, started_s=own.started_s - 1))))  # its number is another process's by now
    assert is_running(tmp_path) is False
    with lock_run(tmp_path):
        assert is_running(tmp_path) is True
