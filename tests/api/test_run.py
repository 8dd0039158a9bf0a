"""A run as its folder tells of it: one that has ended, one that goes on, and what is no run."""

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

import pandas
import pytest

import offbeat
from offbeat.config.load import load_config
from offbeat.errors import ConfigError, DataError, MissingExtraError, ModelError
from small_run import SmallRun
from support.rewards import random_looking


@pytest.fixture
def run(finished_run: SmallRun) -> offbeat.Run:
    return offbeat.Run(finished_run.folder)


def test_a_run_says_what_it_came_to(run: offbeat.Run, finished_run: SmallRun) -> None:
    result = json.loads((finished_run.folder / "result.json").read_text())
    assert run.result == result and not run.stopped_early
    assert (run.heldout_before, run.heldout_after) == (result["heldout_before"], result["heldout_after"])
    assert (run.name, run.steps, run.model) == ("small", 2, finished_run.folder / "export")
    assert repr(run).startswith(f"Run({str(finished_run.folder)!r}, steps=2, heldout_before=")
    assert "publish" in {event["kind"] for event in run.events()}
    assert load_config(str(run.folder / "config.toml")) == load_config(None, values=run.config)
    with pytest.raises(DataError, match="has no folder 'best'; it is written where evaluate.keep_best names a metric"):
        _ = run.best_model


def test_metrics_are_rows_or_a_data_frame(run: offbeat.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = run.metrics()
    assert [row["global_step"] for row in rows] == [0, 1, 2]
    frame = run.metrics("pandas")
    assert isinstance(frame, pandas.DataFrame) and len(frame) == 3
    assert frame["reward/mean"].iloc[2] == rows[2]["reward/mean"] and math.isnan(frame["reward/mean"].iloc[0])
    monkeypatch.setitem(sys.modules, "polars", None)
    with pytest.raises(MissingExtraError, match="to make a data frame of polars, polars must be installed: pip install polars"):
        run.metrics("polars")
    with pytest.raises(ConfigError, match="frame must be 'pandas' or 'polars', got 'arrow'"):
        run.metrics("arrow")  # type: ignore[call-overload]


def test_rollouts_are_decoded_and_have_the_reward_of_their_text(run: offbeat.Run, finished_run: SmallRun) -> None:
    rollouts = list(run.rollouts(step=2))
    assert run.rollout_steps == [1, 2] and len(rollouts) == 4 == len(list(run.rollouts())) // 2
    for rollout, chain in zip(rollouts, [each for group in finished_run.groups(2) for each in group["trajectories"]], strict=True):
        assert rollout.reward == random_looking(rollout.completion, None) == chain["reward"]
        assert len(rollout.prompt) == 4 and rollout.prompt.endswith(">") and rollout.prompt[:3].isdigit()
        assert list(rollout.tokens) == chain["tokens"] and list(rollout.generated) == chain["loss_mask"]
        assert (rollout.step, rollout.reason, rollout.agent) == (2, chain["reason"], "")
    assert len({rollout.prompt_id for rollout in rollouts}) == 2
    with pytest.raises(DataError, match=r"no rollouts of step 7 are kept in .*, but those of 1, 2; telemetry.rollouts_every_steps"):
        run.rollouts(step=7)


def test_a_run_that_goes_on_or_was_cut_off_is_shown_as_far_as_it_got(finished_run: SmallRun, tmp_path: Path) -> None:
    folder = tmp_path / "cut"
    shutil.copytree(finished_run.folder, folder)
    shutil.rmtree(folder / "export")
    (folder / "result.json").unlink()
    path = folder / "rollouts" / "step-000001.jsonl.zst"
    path.write_bytes(path.read_bytes()[:-20])
    cut = offbeat.Run(folder)
    assert cut.result == {} and cut.steps == 2 and cut.heldout_after == offbeat.Run(finished_run.folder).heldout_after
    with pytest.raises(DataError, match="has no folder 'export'; it is written when the run ends"):
        _ = cut.model
    assert len(list(cut.rollouts(step=2))) == 4, "the tokenizer is that of the model that the run began with"
    with pytest.raises(DataError, match="is damaged, so its rollouts cannot be read"):
        list(cut.rollouts(step=1))
    assert cut.report() == folder / "report.html" and "<html" in cut.report().read_text()


def test_rollouts_whose_tokenizer_is_gone_are_not_called_damaged(finished_run: SmallRun, tmp_path: Path) -> None:
    folder = tmp_path / "bare"
    shutil.copytree(finished_run.folder, folder)
    for name in ("export", "model"):
        shutil.rmtree(folder / name, ignore_errors=True)
    (folder / "config.toml").write_text('[model]\ntokenizer = "/nowhere/gone"\n')
    with pytest.raises(ModelError) as refused:
        list(offbeat.Run(folder).rollouts(step=1))
    assert "damaged" not in str(refused.value)


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="run folder .*gone does not exist; give a folder such as runs/NAME"):
        offbeat.Run(tmp_path / "gone")
    with pytest.raises(DataError, match="is not a run's folder: it has neither config.toml nor metrics.jsonl"):
        offbeat.Run(tmp_path)


def test_a_run_is_read_and_compared_without_what_the_extra_train_installs(tmp_path: Path) -> None:
    program = (
        "import sys\nfor name in ('torch', 'transformers', 'tokenizers'): sys.modules[name] = None\n"
        "import offbeat.cli.compare\nfrom offbeat import Run\nfrom offbeat.errors import DataError\n"
        "try:\n    Run(sys.argv[1])\nexcept DataError as exc:\n    print(exc)\n")
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path / "none")], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and str(tmp_path / "none") in done.stdout, done.stderr
