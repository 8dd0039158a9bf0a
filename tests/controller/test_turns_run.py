"""Whole runs whose engines sleep while the ranks train: the memory that they give, what becomes of an engine asleep, resumption."""

import os
import signal
from pathlib import Path

import psutil
import pytest

from offbeat.dashboard.timeline import overlap
from offbeat.data.batch import Batch
from offbeat.data.trajectory import Group
from offbeat.errors import EngineError, PublishError
from offbeat.fleet.engine_group import EngineGroup
from offbeat.process.child import Child
from offbeat.ranks.trainers import Trainers
from offbeat.rollout.executor import RolloutExecutor
from offbeat.runs.run import run_training
from offbeat.telemetry.console import Console
from offbeat.telemetry.trace import read_trace
from small_run import SmallRun, offbeat, small_config, start_offbeat, torchrun
from waiting import wait_until

TURNS = {"cluster__take_turns": "true"}
LARGE = {  # 50 MiB of weights, so that it shows whether an engine holds them
    "model__tiny__hidden_size": "512", "model__tiny__num_layers": "4", "model__tiny__intermediate_size": "1536",
    "model__tiny__num_heads": "8", "model__tiny__num_kv_heads": "8", "model__tiny__head_dim": "64"}
WEIGHTS_BYTES = 4 * 4 * (4 * 512 * 512 + 3 * 512 * 1536)


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[EngineGroup]:
    """The engines of the run that is started in this process."""
    found: list[EngineGroup] = []
    start = EngineGroup.start

    async def remember(*arguments: object, **named: object) -> EngineGroup:
        found.append(await start(*arguments, **named))  # type: ignore[arg-type]
        return found[-1]

    monkeypatch.setattr(EngineGroup, "start", remember)
    return found


def pid_of(engines: list[EngineGroup]) -> int:
    """The process of the only engine, as it is now."""
    worker = engines[0].workers[0]
    assert isinstance(worker, Child), "it is on this machine"
    return worker.pid


def before_step(monkeypatch: pytest.MonkeyPatch, act, *, at: int = 0) -> None:
    """Call `act` in every step before it is trained, or in one of them."""
    train_step, steps = Trainers.train_step, []

    async def acting(self: Trainers, batch: Batch, *, num_minibatches: int = 1) -> dict[str, float]:
        steps.append(batch)
        if at in (0, len(steps)):
            act()
        return await train_step(self, batch, num_minibatches=num_minibatches)

    monkeypatch.setattr(Trainers, "train_step", acting)


def check_turns(run: SmallRun, *, steps: int, first: int = 0) -> None:
    """Ranks compute only while the engines sleep, and staleness keeps its bound; `first` is the version before the first step."""
    spans = read_trace(run.folder / "trace.json")
    sleeps = [(span.start_s, span.end_s) for span in spans if span.name == "asleep"]
    trained = [(span.start_s, span.end_s) for span in spans if span.name == "train_step"]
    assert trained and all(any(a <= start and end <= b for a, b in sleeps) for start, end in trained)
    rows = run.metrics()
    assert [row["global_step"] for row in rows] == list(range(1, steps + 1))
    assert all(row["turns/asleep_s"] > 0 and row["turns/to_ranks_s"] > 0 for row in rows)
    for step in range(1, steps + 1):
        for trajectory in (t for group in run.groups(step) for t in group["trajectories"]):
            generated = [version for version in trajectory["versions"] if version >= 0]
            assert generated == sorted(generated) and all(0 <= first + step - 1 - version <= 1 for version in generated)


@pytest.mark.drill
def test_engines_hold_no_weights_while_the_ranks_train_and_serve_every_version(
    tmp_path: Path, engines: list[EngineGroup], monkeypatch: pytest.MonkeyPatch,
) -> None:
    held: dict[str, list[int]] = {}

    def measure(when: str) -> None:
        held.setdefault(when, []).append(psutil.Process(pid_of(engines)).memory_info().rss)

    prepare_batch = RolloutExecutor.prepare_batch

    async def prepare_and_measure(self: RolloutExecutor) -> list[Group]:
        groups = await prepare_batch(self)
        measure("awake")
        return groups

    monkeypatch.setattr(RolloutExecutor, "prepare_batch", prepare_and_measure)
    before_step(monkeypatch, lambda: measure("asleep"))
    # Without staleness a batch is there only once the engine has generated it with the newest version.
    run_training(small_config(tmp_path, **LARGE, **TURNS, run__total_steps="3", rollout__max_head_offpolicyness="0"), Console("quiet"))
    run = SmallRun(tmp_path, "")
    check_turns(run, steps=3)
    assert [event["version"] for event in run.events("publish")] == [0, 1, 2, 3]
    assert all(event["canary_gap"] < 1e-3 and not event["quarantined"] for event in run.events("publish"))
    assert len(run.events("slept")) == 3
    assert all(abs(row["train/loss"]) < 1 for row in run.metrics())
    # What an allocator gives back to the system varies; tests/engine/test_sleep.py measures it closely.
    assert all(asleep < awake - 0.2 * WEIGHTS_BYTES for asleep, awake in zip(held["asleep"], held["awake"], strict=True)), held


@pytest.mark.parametrize("fault", [
    pytest.param(signal.SIGKILL, id="killed", marks=pytest.mark.drill),
    pytest.param(signal.SIGSTOP, id="stopped", marks=pytest.mark.whole_run)])
def test_an_engine_that_is_lost_asleep_is_restarted_and_the_run_goes_on(
    fault: signal.Signals, tmp_path: Path, model_dir: str, engines: list[EngineGroup], monkeypatch: pytest.MonkeyPatch,
) -> None:
    before_step(monkeypatch, lambda: os.kill(pid_of(engines), fault), at=2)
    config = small_config(
        tmp_path, model_dir, **TURNS, run__total_steps="4", inference__probe_interval_s="0.2", inference__probe_timeout_s="2",
        weights__stage_timeout_s="20")
    run_training(config, Console("quiet"))
    run = SmallRun(tmp_path, model_dir)
    check_turns(run, steps=4)
    assert len(run.events("quarantine")) == len(run.events("healed")) == 1
    assert run.events("healed")[0]["time_s"] > run.events("slept")[1]["time_s"], "in the engines' turn"


@pytest.mark.drill
def test_a_hang_at_wake_ends_in_a_sentence(
    tmp_path: Path, model_dir: str, engines: list[EngineGroup], monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def restart(_self: EngineGroup, name: str) -> str:
        raise EngineError(f"there is no memory for {name}")

    monkeypatch.setattr(EngineGroup, "restart", restart)
    before_step(monkeypatch, lambda: os.kill(pid_of(engines), signal.SIGSTOP), at=2)
    config = small_config(
        tmp_path, model_dir, **TURNS, weights__stage_timeout_s="1", inference__heal_timeout_s="4", inference__probe_interval_s="0.2",
        inference__probe_timeout_s="1", cluster__stop_timeout_s="0.5")
    with pytest.raises(PublishError, match="version 2 is served by 0 engines, fewer than the 1 needed: .* there is no memory|engine 0: "):
        run_training(config, Console("quiet"))


@pytest.mark.drill
def test_a_run_that_is_killed_goes_on_with_turns_or_without(tmp_path: Path, model_dir: str) -> None:
    run = SmallRun(tmp_path, model_dir)
    arguments = {"checkpoint__every_steps": "1", "run__total_steps": "100000", **TURNS}
    with start_offbeat("train", *run.arguments(**arguments), "--json") as process:
        wait_until(lambda: len(run.events("checkpoint")) > 1 or process.poll() is not None, timeout_s=120)
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=60)
    done = run.events("checkpoint")[-1]["global_step"]
    for steps, turns in ((done + 2, "true"), (done + 3, "false")):
        gone_on = offbeat("train", *run.arguments(run__total_steps=str(steps), cluster__take_turns=turns), "--json")
        assert gone_on.returncode == 0, gone_on.stderr
        assert ("turns/asleep_s" in run.metrics()[-1]) == (turns == "true")
    assert [row["global_step"] for row in run.metrics()] == list(range(1, done + 4))


@pytest.mark.parametrize(("changes", "first"), [
    pytest.param({"model__lora__rank": "4", "inference__num_engines": "2"}, 0, id="an adapter", marks=pytest.mark.whole_run),
    pytest.param(
        {"run__warm_up": "true", "sft__total_steps": "2", "sft__evaluate_every_steps": "1"}, 3, id="a warm-up",
        marks=pytest.mark.whole_run),
    pytest.param({"algorithm__kl_loss": "k3", "inference__num_engines": "2"}, 0, id="scores, and two engines", marks=pytest.mark.whole_run),
    pytest.param(
        {"weights__channel": "collective", "weights__whole_every_versions": "3"}, 0, id="broadcasts", marks=pytest.mark.whole_run),
])
def test_turns_with(changes: dict[str, str], first: int, tmp_path: Path, model_dir: str) -> None:
    config = small_config(tmp_path, model_dir, **TURNS, **changes, evaluate__every_steps="1", run__total_steps="3")
    run_training(config, Console("quiet"))
    run = SmallRun(tmp_path, model_dir)
    check_turns(run, steps=3, first=first)
    assert overlap(read_trace(run.folder / "trace.json")) == 0, "engines that sleep generate nothing"
    assert all(event["canary_gap"] < 1e-3 and not event["quarantined"] for event in run.events("publish"))
    assert not run.events("engine_failed") and not run.events("rejected")


@pytest.mark.drill
def test_turns_under_torchrun(tmp_path: Path, model_dir: str) -> None:
    run = SmallRun(tmp_path, model_dir)
    done = torchrun("train", *run.arguments(**TURNS, run__total_steps="3"), "--json", world=2)
    assert done.returncode == 0, done.stderr
    check_turns(run, steps=3)
