"""Every mistake a user can make gives one clear sentence and exit code 2, and loses nothing. The real command on real processes."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from faults.workshop import Workshop
from offbeat.cli.main import main
from small_run import SmallRun

SORT = str(Path(__file__).parents[2] / "examples" / "sort_digits.toml")
SMALL = [
    "--run.total_steps", "2", "--run.warm_up", "false", "--evaluate.num_prompts", "4", "--rollout.consumer_batch_size", "2",
    "--rollout.group_size", "2", "--telemetry.console", "false", "--checkpoint.every_steps", "1",
]
REWARDS = """
import time
def hang(completion, row): time.sleep(1000)
def boom(completion, row): raise ValueError("no such answer")
"""


@pytest.fixture
def fails(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Runs `offbeat train` with more arguments in an empty folder, expects exit code 2, and gives the one line on stderr."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rewards.py").write_text(REWARDS)

    def run(*arguments: str) -> str:
        assert main(["train", SORT, *SMALL, *arguments]) == 2
        (line,) = capsys.readouterr().err.strip().splitlines()
        assert line.startswith("offbeat: ")
        return line

    return run


@pytest.mark.parametrize(("arguments", "sentence"), [
    (["--rollout.max_head_offpolicynes", "2"], "did you mean rollout.max_head_offpolicyness?"),
    (["--rollout.group_size", "eight"], "rollout.group_size must be an integer, got 'eight'"),
    (["--rollout.group_size", "true"], "rollout.group_size must be an integer, got True"),
    (["--rollout.max_head_offpolicyness", "-1"], "must be >= 0, got -1; use 0 for synchronous training"),
    (["--rollout.single_rank_load", "false"], "rollout.single_rank_load must be true with run.mode = 'controller', got false"),
    (["--run.mode", "spmd", "--rollout.single_rank_load", "false"], "rollout.balance_batch must be false with rollout.single_rank_load"),
    (["--run.mode", "spmd"], "needs the variables that torchrun sets, and RANK, WORLD_SIZE, LOCAL_RANK"),
    (["--dist.sync_timeout_s", "0"], "dist.sync_timeout_s must be > 0, got 0"),
    (["--dist.collective_timeout_s", "-3"], "dist.collective_timeout_s must be > 0, got -3"),
    (["--model.path", "."], "is not a model folder: it has no config.json"),
    (["--rollout.reward", "rewards.py:absent"], "has no function 'absent'"),
    (["--rollout.reward", "rewards.py:boom"], "raised ValueError: no such answer"),
    (["--rollout.reward", "rewards.py:hang", "--rollout.reward_timeout_s", "1"], "did not answer within rollout.reward_timeout_s = 1 s"),
])
def test_a_wrong_setting_or_reward_is_one_sentence(fails: Callable[..., str], arguments: list[str], sentence: str) -> None:
    assert sentence in fails(*arguments)


@pytest.mark.parametrize(("lines", "sentence"), [
    ([], "'rows.jsonl' has no rows"),
    ([{"prompt": "1>", "answer": "1"}, {"prompt": "2>"}], "'rows.jsonl', line 2, has no field 'answer'"),
    ([{"prompt": "1" * 600 + ">", "answer": "1"}] * 3, "prompt of 'rows.jsonl', line 1 has 601 tokens, allowed are 502"),
])
def test_a_wrong_dataset_is_one_sentence(fails: Callable[..., str], tmp_path: Path, lines: list[dict], sentence: str) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert sentence in fails("--data.task", "", "--data.path", "rows.jsonl", "--data.heldout_size", "0")
    assert not (tmp_path / "runs").exists()


def test_a_missing_extra_is_named(fails: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "offbeat.workers.ray", raising=False)
    monkeypatch.setitem(sys.modules, "ray", None)
    assert "pip install 'offbeat[ray]'" in fails("--cluster.launcher", "ray")


def test_a_full_disk_loses_no_checkpoint(shop: Workshop, tmp_path: Path, model_dir: str) -> None:
    """A disk that takes the first checkpoint and not the second: a file stands where its folder would go, as a stand-in for no space."""
    run = SmallRun(tmp_path, model_dir)
    assert shop.train(run, checkpoint__every_steps="1", run__total_steps="1").code == 0
    blocked = run.folder / "checkpoints" / "step-00000002"
    blocked.write_text("")
    failed = shop.train(run, checkpoint__every_steps="1")
    assert failed.code == 2 and "step-00000002" in failed.error and len(failed.error.splitlines()) == 1
    assert (blocked.parent / "step-00000001" / "complete.json").exists()
    blocked.unlink()
    assert shop.train(run, checkpoint__every_steps="1").code == 0
    assert json.loads((run.folder / "result.json").read_text())["steps"] == 2


def test_a_run_whose_model_could_not_be_exported_goes_on_until_it_is(shop: Workshop, tmp_path: Path, model_dir: str) -> None:
    run = SmallRun(tmp_path, model_dir)
    assert shop.train(run, checkpoint__every_steps="1", run__total_steps="1").code == 0
    export, staging = run.folder / "export", run.folder / ".export.export"  # a file where the model is put together takes nothing
    shutil.rmtree(export)
    staging.write_text("")
    failed = shop.train(run, checkpoint__every_steps="1")
    assert failed.code == 2 and "export" in failed.error and len(failed.error.splitlines()) == 1
    staging.unlink()
    done = shop.train(run, checkpoint__every_steps="1")
    assert (done.code, done.error) == (0, "") and (export / "config.json").exists()
    again = shop.train(run)
    assert again.code == 2 and "is already complete (2 steps)" in again.error


def test_a_run_that_another_process_holds_is_refused(fails: Callable[..., str], tmp_path: Path) -> None:
    script = "import sys, time; from pathlib import Path; from offbeat.telemetry.record import RunRecord; from offbeat.telemetry.console import Console\nr = RunRecord(Path('runs/sort_digits'), trace=False, console=Console('quiet')); print('held', flush=True); time.sleep(60)"  # noqa: E501
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, cwd=tmp_path) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
        assert "is being run by another process" in fails()
        holder.kill()
