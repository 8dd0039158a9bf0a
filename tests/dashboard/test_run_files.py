"""Reading what a run left."""

import pytest

from offbeat.dashboard.run_files import read_run
from offbeat.errors import DataError


def test_a_folder_that_is_missing_or_no_run_is_refused(tmp_path):
    with pytest.raises(DataError, match="does not exist; give a folder such as runs/NAME"):
        read_run(tmp_path / "none")
    with pytest.raises(DataError, match="is no run: it holds neither"):
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
