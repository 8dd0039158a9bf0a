"""Files of rollouts."""

from itertools import pairwise

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from offbeat.errors import StorageError
from offbeat.telemetry.rollout_log import RolloutLog, to_thin_out


def content(path):
    with path.open("rb") as file:
        return zstandard.ZstdDecompressor().stream_reader(file).read()


def test_lines_come_back_in_order_under_the_name_of_their_step(tmp_path):
    lines = [b'{"i": %d}' % i for i in range(1000)]
    path = RolloutLog(tmp_path / "rollouts").write(10, iter(lines))
    assert path.name == "step-000010.jsonl.zst"
    assert content(path).splitlines() == lines
    assert path.stat().st_size < sum(map(len, lines)) / 2
    assert len(list(path.parent.iterdir())) == 1


def test_half_a_file_of_a_process_that_was_killed_goes_with_the_next_one(tmp_path):  # worlds 83 and 96 of tests/worlds
    RolloutLog(tmp_path).write(1, [b"whole"])
    (tmp_path / ".step-000002.jsonl.zst.part").write_bytes(b"half")
    RolloutLog(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001.jsonl.zst"]


def test_a_step_that_is_written_again_replaces_its_files(tmp_path):
    log = RolloutLog(tmp_path)
    log.write(1, [b"old"], [lambda step: b"refused"])
    assert len(list(tmp_path.iterdir())) == 2
    assert content(log.write(1, [b"new"])) == b"new\n"
    assert len(list(tmp_path.iterdir())) == 1


def test_rejected_groups_are_written_with_the_next_step_and_once(tmp_path):
    log = RolloutLog(tmp_path)
    log.reject(10, lambda step: b"a%d" % step)
    log.reject(10, lambda step: b"b%d" % step)
    log.write(5, [b"x"], log.take_rejected())
    log.write(6, [b"y"], log.take_rejected())
    assert content(tmp_path / "rejected-000005.jsonl.zst") == b"a5\nb5\n"
    assert not (tmp_path / "rejected-000006.jsonl.zst").exists()


def test_rejected_groups_occupy_bounded_memory(tmp_path):
    log = RolloutLog(tmp_path)
    for i in range(8):
        log.reject(600_000, lambda _step, i=i: b"%d" % i)
    assert [line(0) for line in log.take_rejected()] == [b"5", b"6", b"7"]
    log.reject(5_000_000, lambda _step: b"long")
    assert len(log.take_rejected()) == 1


def test_a_source_that_fails_leaves_the_old_file(tmp_path):
    log = RolloutLog(tmp_path)
    path = log.write(1, [b"old"])
    with pytest.raises(RuntimeError):
        log.write(1, (_ for _ in (1,) if _fail()))
    assert content(path) == b"old\n"


def test_a_place_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="rollouts_every_steps"):
        RolloutLog(tmp_path / "file").write(1, [])


def test_the_folder_stays_within_its_bound_and_the_newest_and_first_steps_remain(tmp_path):
    log = RolloutLog(tmp_path, most_bytes=1000)
    for step in range(1, 101):
        log.write(step, [b"x"], [lambda _step: b"y"])
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 1000
        assert (tmp_path / f"step-{step:06d}.jsonl.zst").exists()
    steps = sorted(int(path.name[5:11]) for path in tmp_path.glob("step-*"))
    assert steps[0] == 1 and steps[-2:] == [99, 100]
    gaps = [b - a for a, b in pairwise(steps)]
    assert max(gaps[: len(gaps) // 2]) > gaps[-1] == 1


@given(st.dictionaries(st.integers(1, 500), st.integers(1, 100), min_size=1), st.integers(0, 2000))
def test_thinning_out_fits_the_bound_and_never_removes_the_newest_step(sizes, most_bytes):
    removed = to_thin_out(sizes, most_bytes=most_bytes)
    left = sizes.keys() - set(removed)
    assert len(set(removed)) == len(removed) and max(sizes) in left
    assert sum(sizes[step] for step in left) <= most_bytes or len(left) == 1
    if sum(sizes.values()) <= most_bytes:
        assert removed == []


def test_resuming_removes_later_steps(tmp_path):
    log = RolloutLog(tmp_path)
    for step in (1, 2, 3):
        log.write(step, [b"x"], [lambda _step: b"y"])
    (tmp_path / "mine.txt").touch()
    log.resume_after(2)
    assert sorted(path.name[:15] for path in tmp_path.iterdir()) == [
        "mine.txt", "rejected-000001", "rejected-000002", "step-000001.jso", "step-000002.jso"]
    RolloutLog(tmp_path / "absent").resume_after(2)


def _fail():
    raise RuntimeError
