"""Which checkpoint a run goes on from, whatever a crash left behind."""

import json
import subprocess
import sys

import pytest

from offbeat.checkpoint.recover import CheckpointIndex
from offbeat.errors import StorageError


def write(index, step, *, complete=True):
    index.folder(step).mkdir(parents=True)
    (index.folder(step) / "data").write_text("x")
    if complete:
        index.complete(step, b'{"global_step": %d}' % step)


def test_a_directory_that_does_not_exist_holds_no_checkpoint(tmp_path):
    index = CheckpointIndex(tmp_path / "none")
    assert index.newest() is None
    index.prune(1)


def test_the_newest_complete_checkpoint_is_found_by_number_not_by_name(tmp_path):
    index = CheckpointIndex(tmp_path)
    for step in (99_999_999, 100_000_000, 5):
        write(index, step)
    write(index, 100_000_001, complete=False)
    (tmp_path / "notes").mkdir()
    newest = index.newest()
    assert (newest.step, newest.folder) == (100_000_000, index.folder(100_000_000))
    assert json.loads(newest.payload)["global_step"] == 100_000_000


def test_pruning_keeps_the_newest_and_clears_what_crashes_left(tmp_path):
    index = CheckpointIndex(tmp_path)
    for step in (10, 20, 30, 40):
        write(index, step, complete=step != 20)
    write(index, 50, complete=False)
    index.prune(2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000030", "step-00000040", "step-00000050"]
    assert index.newest().step == 40


def test_without_a_complete_checkpoint_nothing_is_pruned(tmp_path):
    index = CheckpointIndex(tmp_path)
    write(index, 10, complete=False)
    index.prune(1)
    assert index.folder(10).is_dir()


def test_a_marker_cut_off_while_it_was_written_does_not_count(tmp_path):
    index = CheckpointIndex(tmp_path)
    write(index, 10)
    write(index, 20, complete=False)
    (index.folder(20) / "complete.part").write_text("sta")
    assert index.newest().step == 10


def test_a_marker_that_cannot_be_written_is_a_storage_error(tmp_path):
    index = CheckpointIndex(tmp_path)
    write(index, 10)
    index.folder(20).write_text("a file where the folder should be")
    with pytest.raises(StorageError, match=r"step-00000020.*earlier checkpoints are intact"):
        index.complete(20, b"{}")
    assert index.newest().step == 10


def test_kinds_of_checkpoints_do_not_see_each_other(tmp_path):
    own, other = CheckpointIndex(tmp_path), CheckpointIndex(tmp_path, "warm-up")
    write(own, 10)
    for step in (20, 30):
        write(other, step)
    assert (own.newest().step, other.newest().step) == (10, 30)
    own.prune(1)
    other.clear()
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000010"]
    assert other.newest() is None


def test_recovery_needs_no_torch():
    code = "import sys, offbeat.checkpoint.recover; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
