"""Which checkpoint a run continues from, whatever a crash left behind."""

import errno
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from offbeat.checkpoint import manifest
from offbeat.checkpoint.recover import CheckpointIndex, none_sound
from offbeat.controller.state import HeadState, Highlights, SavedState
from offbeat.data import wire
from offbeat.data.stream import StreamState
from offbeat.errors import ConfigError, StorageError

OLDER = Path(__file__).parent / "older"
"""Checkpoints as the code of older commits wrote them, each in a folder named after its commit: at first without checksums."""


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


def test_a_checkpoint_that_cannot_be_removed_does_not_count_and_is_removed_later(tmp_path, monkeypatch):
    index = CheckpointIndex(tmp_path)
    for step in (10, 20):
        write(index, step)

    def busy(*_):
        raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY))

    with monkeypatch.context() as patched:
        patched.setattr("shutil.rmtree", busy)
        index.prune(1)
    assert index.folder(10).is_dir() and index.newest().step == 20
    index.prune(1)
    assert not index.folder(10).exists()


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


def test_a_damaged_checkpoint_is_passed_over_and_set_aside_under_a_free_name(tmp_path):
    index = CheckpointIndex(tmp_path)
    for step in (10, 20, 30):
        write(index, step)
    (index.folder(30) / "data").write_text("y")  # as many bytes
    (index.folder(20) / "data").write_text("")
    assert index.newest().step == 30, "a look does not read files"
    chosen, damages = index.choose()
    assert chosen.step == 10
    assert [str(damage) for damage in damages] == [
        "step-00000030 is damaged: data has other bytes than were written",
        "step-00000020 is damaged: data has 0 bytes, and was written with 1"]
    assert index.set_aside(30).name == "step-00000030.damaged"
    write(index, 30)
    assert index.set_aside(30).name == "step-00000030.damaged.1"
    index.prune(1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000020", "step-00000030.damaged", "step-00000030.damaged.1"]


def test_a_save_that_was_cut_off_is_no_damage(tmp_path):
    index = CheckpointIndex(tmp_path)
    write(index, 10)
    write(index, 20, complete=False)
    index.folder(30).mkdir()
    assert (index.newest().step, index.damaged()) == (10, [])
    chosen, (unfinished,) = index.choose()
    assert (chosen.step, unfinished.step, unfinished.finished) == (10, 20, False)


def test_where_none_is_sound_the_error_says_what_to_do(tmp_path):
    index = CheckpointIndex(tmp_path)
    write(index, 10)
    (index.folder(10) / "data").unlink()
    assert index.newest() is None
    assert re.fullmatch(
        r"no checkpoint in '.*' can be resumed from \(step-00000010 is damaged: data is gone\); put sound copies of the files there, or"
        r" give run.name a new name to begin anew", str(none_sound(index.damaged())))


@pytest.mark.parametrize("commit", sorted(path.name for path in OLDER.iterdir()))
def test_a_checkpoint_that_an_older_commit_wrote_is_read(commit, tmp_path):
    shutil.copytree(OLDER / commit, tmp_path / "checkpoints")
    newest, damages = CheckpointIndex(tmp_path / "checkpoints").choose()
    assert not damages and newest.step == 4
    assert wire.decode_json(SavedState, newest.payload) == SavedState(
        4, 5, (HeadState(StreamState(1, 24), ("1:25", "1:26")),), Highlights(heldout_before=0.25, heldout_after=0.5, max_staleness=1))


def test_a_checkpoint_of_a_newer_format_is_refused_in_a_sentence_and_nothing_is_touched(tmp_path, monkeypatch):
    index = CheckpointIndex(tmp_path)
    write(index, 1)
    write(index, 2)
    marker = index.folder(2) / "complete.json"
    assert json.loads(marker.read_text())["format"] == 1
    with monkeypatch.context() as later:
        later.setattr(manifest, "FORMAT", 2)
        index.amend(2, b'{"global_step": 2}')
    newer = marker.read_text()
    marker.write_text(newer)
    for find in (index.newest, index.choose, index.damaged):
        with pytest.raises(ConfigError, match=r"step-00000002 has format 2, made by a newer Offbeat .* knows up to 1; upgrade Offbeat"):
            find()
    assert marker.read_text() == newer
