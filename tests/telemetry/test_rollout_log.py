"""Files of rollouts."""

import pytest
import zstandard

from offbeat.errors import StorageError
from offbeat.telemetry.rollout_log import write_rollouts


def content(path):
    with path.open("rb") as file:
        return zstandard.ZstdDecompressor().stream_reader(file).read()


def test_lines_come_back_in_order_under_the_name_of_their_step(tmp_path):
    lines = [b'{"i": %d}' % i for i in range(1000)]
    path = write_rollouts(tmp_path / "rollouts", step=10, lines=iter(lines))
    assert path.name == "step-000010.jsonl.zst"
    assert content(path).splitlines() == lines
    assert path.stat().st_size < sum(map(len, lines)) / 2


def test_a_step_that_is_written_again_replaces_the_file(tmp_path):
    write_rollouts(tmp_path, step=1, lines=[b"old"])
    assert content(write_rollouts(tmp_path, step=1, lines=[b"new"])) == b"new\n"
    assert len(list(tmp_path.iterdir())) == 1


def test_a_source_that_fails_leaves_the_old_file(tmp_path):
    path = write_rollouts(tmp_path, step=1, lines=[b"old"])
    with pytest.raises(RuntimeError):
        write_rollouts(tmp_path, step=1, lines=(_ for _ in (1,) if _fail()))
    assert content(path) == b"old\n"


def test_a_place_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="rollouts_every_steps"):
        write_rollouts(tmp_path / "file", step=1, lines=[])


def _fail():
    raise RuntimeError
