"""Whole runs from Python: with functions and rows of the program's own, while an event loop runs, in a script, and interrupted."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util.tensor_util import make_ndarray

import offbeat
from offbeat.aio import ASKED_TO_STOP
from offbeat.cli import main as cli
from offbeat.errors import CodeError, ConfigError, RunError
from small_run import ENVIRONMENT, SETTINGS
from waiting import wait_until

SMALL: dict[str, Any] = {
    "rollout": {"group_size": 2, "consumer_batch_size": 2, "max_concurrent_rollouts": 4, "max_new_tokens": 5}, "run.name": "small",
    "train": {"threads": 1}, "inference": {"threads": 1}, "evaluate.every_steps": 0, "telemetry.rollouts_every_steps": 1,
    "cluster.stop_timeout_s": 3}
ROWS = [{"prompt": f"{a}{b}>", "answer": f"{b}{a}", "level": a} for a in range(10) for b in range(10)]
PAIRS = [{"prompt": f"{i}=", "chosen": f"{i % 7}", "rejected": f"a{i % 7}b"} for i in range(20)]


@pytest.mark.drill
def test_a_program_with_a_running_loop_trains_with_a_function_and_rows_of_its_own(
    tmp_path: Path, model_dir: str, capsys: pytest.CaptureFixture[str],
) -> None:
    weights, steps, told, watched = {"1": 0.25, "2": 0.5}, [], [], []

    def reward(completion: str, row: offbeat.Row) -> float:
        return sum(weights.get(each, 0.125) for each in completion) + float(row.extra["level"])

    def watch(_step: offbeat.Step) -> None:
        wait_until(lambda: told.append(capsys.readouterr().out) or "\n" in "".join(told), timeout_s=60)
        url = "".join(told).removeprefix("watch this run at ").strip()
        with urllib.request.urlopen(f"{url}api/runs", timeout=30) as answer:
            watched.append([each["name"] for each in json.load(answer)])

    async def cell() -> offbeat.Run:
        return offbeat.train(
            model=model_dir, data=(row for row in ROWS), reward=reward, total_steps=2, lr=1e-3,
            settings=SMALL | {"run.dir": tmp_path, "telemetry.sinks": ["tensorboard"], "telemetry.sample_tables_every_steps": 2},
            evaluate={"own": ROWS[:3]}, callbacks=[steps.append, watch], progress=False, dashboard=True, heldout_size=4)

    run = asyncio.run(cell())
    assert watched == [["small"], ["small"]]
    assert (run.folder, run.steps, run.stopped_early) == (tmp_path / "small", 2, False)
    assert run.heldout_before is not None and run.heldout_after is not None and (run.model / "config.json").is_file()
    assert [(step.number, step.total_steps) for step in steps] == [(1, 2), (2, 2)]
    assert steps[1].metrics["reward/mean"] == pytest.approx(run.metrics()[-1]["reward/mean"])
    for rollout in run.rollouts(step=2):
        row = next(row for row in ROWS if row["prompt"] == rollout.prompt)
        assert rollout.reward == pytest.approx(sum(weights.get(each, 0.125) for each in rollout.completion) + row["level"])
    accumulator = EventAccumulator(str(run.folder / "tensorboard"))
    accumulator.Reload()
    [table] = accumulator.Tensors("samples")
    head, *shown = make_ndarray(table.tensor_proto).tolist()
    rewards = sorted((rollout.reward for rollout in run.rollouts(step=2)), reverse=True)
    assert table.step == 2 and head[0] == b"reward" and [float(row[0].decode().strip()) for row in shown] == pytest.approx(rewards)
    assert run.config["rollout"]["reward"] == "python:reward" and "own" in run.result["sets"]
    assert (run.folder / "report.html").exists()

    # The command knows the run that the interface has made, and the interface its configuration; both want the function's name.
    file = str(run.folder / "config.toml")
    assert cli.main(["train", file]) == 2
    with pytest.raises(ConfigError, match=r"is already complete \(2 steps\); raise run\.total_steps to continue, or"):
        offbeat.train(config=run.config, reward=reward)
    more = offbeat.train(config=file, reward=reward, total_steps=3, progress=False)
    assert more.steps == 3 and [event["global_step"] for event in more.events() if event["kind"] == "resumed"] == [2]


def test_arguments_become_settings_of_the_run(tmp_path: Path, model_dir: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr("offbeat.api.training.run_training", lambda config, console, *, fresh: asked.append((config, fresh)))
    with pytest.raises(RunError, match="does not lead"):
        offbeat.train(model=model_dir, data="sort_digits", fresh=True, tools=[max], preset="dapo", settings={"run.dir": tmp_path})
    [(config, fresh)] = asked
    assert fresh and config.rollout.workflow == "tool_loop" and config.agent.tools == ("builtins:max",)
    assert (config.algorithm.preset, config.data.task) == ("dapo", "sort_digits")


@pytest.mark.whole_run
@pytest.mark.parametrize(("learn", "section", "data"), [
    (offbeat.sft, "sft", ROWS), (offbeat.dpo, "preference", PAIRS), (offbeat.reward_model, "reward_model", PAIRS)],
    ids=["sft", "dpo", "reward_model"])
def test_lessons_share_the_path_of_their_commands(
    learn: Callable[..., offbeat.Run], section: str, data: Any, tmp_path: Path, model_dir: str,
) -> None:
    run = learn(
        model=model_dir, data=data, total_steps=2, batch_size=4, lr=1e-3, heldout_size=4, progress=False,
        settings={key: value for key, value in SMALL.items() if key != "evaluate.every_steps"} | {"run.dir": tmp_path})
    assert run.config[section]["total_steps"] == 2 and run.config[section]["optimizer"]["lr"] == 1e-3
    assert run.result["steps"] == 2 and (run.model / "config.json").is_file()
    assert run.heldout_after == run.result["accuracy"] is not None and run.result["accuracy_step"] == 2


def test_a_function_that_fails_is_blamed_by_its_name(tmp_path: Path, model_dir: str) -> None:
    def reward(completion: str, row: offbeat.Row) -> float:
        return 1 / 0

    with pytest.raises(CodeError, match=r"the reward python:reward raised ZeroDivisionError: division by zero"):
        offbeat.train(model=model_dir, data=ROWS, reward=reward, settings=SMALL | {"run.dir": tmp_path}, progress=False)


SCRIPT = """
import json, sys
import offbeat

KNOWN = {"1": 1.0}

def reward(completion: str, row: offbeat.Row) -> float:
    return KNOWN.get(completion[:1], 0.0)

run = offbeat.train(
    model=sys.argv[1], data=[{"prompt": f"{i}>", "answer": "1"} for i in range(40)], reward=reward, total_steps=100_000,
    settings=json.loads(sys.argv[2]))
print(json.dumps([run.stopped_early, run.steps, run.heldout_after, str(run.model)]))
"""


@pytest.mark.drill
@pytest.mark.parametrize(("sent", "said"), [
    (signal.SIGINT, "stopping after this step; interrupt again to stop at once"),
    (signal.SIGTERM, ASKED_TO_STOP)], ids=["ctrl_c", "sigterm"])
def test_a_script_that_is_stopped_keeps_what_was_trained_and_says_how_to_go_on(
    sent: signal.Signals, said: str, tmp_path: Path, model_dir: str,
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    settings = json.dumps(SMALL | {"run.dir": str(tmp_path / "runs"), "telemetry.trace": False})
    metrics = tmp_path / "runs" / SETTINGS["run.name"] / "metrics.jsonl"
    with subprocess.Popen(
            [sys.executable, "script.py", model_dir, settings], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=os.environ | ENVIRONMENT, process_group=0) as process:
        try:
            wait_until(lambda: process.poll() is not None or (metrics.exists() and metrics.read_text().count("\n") > 2), timeout_s=120)
            process.send_signal(sent)
            stdout, stderr = process.communicate(timeout=60)
        except BaseException:
            process.kill()
            raise
    assert process.returncode == 0, stderr
    *shown, again, told = stdout.splitlines()
    assert f"  {said}" in shown and again == "to go on: make the same call again"
    stopped_early, steps, after, model = json.loads(told)
    assert after is None and any(line.split() == ["held-out", "accuracy", "after", "not", "measured"] for line in shown)
    assert stopped_early and 2 <= steps < 100_000 and (Path(model) / "model.safetensors").is_file()
