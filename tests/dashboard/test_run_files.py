"""Reading what a run left."""

import pytest

from offbeat.dashboard.report import write_report
from offbeat.dashboard.run_files import read_run
from offbeat.errors import DataError


def test_a_folder_that_is_missing_or_no_run_is_refused(tmp_path):
    with pytest.raises(DataError, match="does not exist; give a folder such as runs/NAME"):
        read_run(tmp_path / "none")
    with pytest.raises(DataError, match="is not a run's folder: it has neither"):
        read_run(tmp_path)


def test_missing_files_are_empty_and_torn_ones_are_read_as_far_as_they_go(tmp_path):
    (tmp_path / "config.toml").write_text("[rollout]\nmax_head_offpolicyness = 2\n")
    rows = ['{"global_step": 1, "a": 0.5}', '{"global_step": 2, "a": null}', '{"global_step": 3, "a": 1}', '{"glo']
    (tmp_path / "metrics.jsonl").write_text("\n".join(rows))
    (tmp_path / "result.json").write_text("{")
    run = read_run(tmp_path)
    assert run.points("a") == [(1, 0.5), (3, 1.0)]
    assert run.values("missing") == []
    assert run.setting("rollout", "max_head_offpolicyness") == 2
    assert run.setting("rollout", "x") is None and run.setting("x", "y") is None
    assert (list(run.events), list(run.spans), dict(run.result)) == ([], [], {})


def test_a_torn_configuration_is_kept_as_text(tmp_path):
    (tmp_path / "config.toml").write_text("[rollout\n")
    run = read_run(tmp_path)
    assert (run.config_text, dict(run.config)) == ("[rollout\n", {})


@pytest.mark.parametrize("rubbish", [
    b"\xff\xfe\x00", b'{"global_step": "seven", "a": 1}', b'{"global_step": 1e999, "a": 1}',
    b'{"global_step": 2, "a": 1' + b"0" * 400 + b"}", b'{"global_step": 2, "a": [1]}', b'{"time_s": "noon", "kind": 3}', b'{"ph": "X"}',
    b'{"ph": "M", "tid": 1, "name": "x"}', b"[" * 100_000,
    b'{"global_step": 2, "step/publish_s": 9, "a": "\\ud800"}', b'{"kind": "\\ud800", "time_s": 1.0}', b"\x00" * 5000, b"= [",
    b"rollout = 7\n[rollout]", b'[rollout]\nmax_head_offpolicyness = "two"\n[run]\ntotal_steps = []\n[train]\nnum_ranks = "x"'])
def test_a_report_is_written_whatever_stands_in_the_files(rubbish, tmp_path):
    files = {
        "metrics.jsonl": b'{"global_step": 1, "a": 0.5, "rollout/staleness_max_versions": 1}',
        "events.jsonl": b'{"time_s": 1.5, "kind": "x"}',
        "trace.json": b'{"ph": "M", "name": "thread_name", "pid": 1, "tid": 1, "args": {"name": "rank 0"}},', "result.json": b"{}",
        "config.toml": b"[run]"}
    for name, sound in files.items():
        (tmp_path / name).write_bytes(sound + b"\n" + rubbish + b"\n" + sound + b"\n")
    (tmp_path / "result.json").write_bytes(rubbish)
    (tmp_path / "config.toml").write_bytes(rubbish)
    assert (1, 0.5) in read_run(tmp_path).points("a")
    assert write_report(tmp_path).read_bytes().startswith(b"<!")
