"""Runs that are replayed from their journals; those of more than one kind of run are drills."""

import os
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest

from offbeat.config.load import load_config
from offbeat.errors import ConfigError
from offbeat.journal.history import JournalHistory, PastStep
from offbeat.runs.recorded_run import check_live, make_replay_plan, replay
from small_run import SmallRun, offbeat, small_config, start_offbeat, torchrun
from support import playing
from waiting import wait_until

STATE = (
    b'{"global_step":1,"version":1,"heads":[],"highlights":{"heldout_before":null,"heldout_after":null,"heldout_after_step":null,'
    b'"heldout_prompts":0,"max_staleness":0,"max_logprob_gap":0,"trained_tokens":0,"warm_up_steps":7}}')
KEEP = {"checkpoint__journal_keep": "all"}


def history_of(*numbers: int) -> JournalHistory:
    return JournalHistory({number: PastStep(number, (), STATE, None, b"{}") for number in numbers})


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_a_replay_begins_with_the_initial_model_and_its_warm_up(tmp_path: Path) -> None:
    plan = make_replay_plan(tmp_path, history_of(1, 2, 3), last=2)
    assert [step.global_step for step in plan.steps] == [1, 2] and plan.first == 1 and not plan.missing
    assert plan.beginning.warm_up_steps == 7


def test_what_the_journal_does_not_have_is_refused_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no journal with steps in it"):
        make_replay_plan(tmp_path, history_of())
    with pytest.raises(ConfigError, match="step 5 cannot be replayed: there is no checkpoint before it .* it has steps 4 to 5, 7"):
        make_replay_plan(tmp_path, history_of(4, 5, 7), first=5)
    with pytest.raises(ConfigError, match="step 9 cannot be replayed: the journal has steps 1 to 2; checkpoint.journal_keep"):
        make_replay_plan(tmp_path, history_of(1, 2), last=9)


def test_steps_behind_a_gap_of_the_journal_are_named(tmp_path: Path) -> None:
    plan = make_replay_plan(tmp_path, history_of(1, 2, 4, 5))
    assert [step.global_step for step in plan.steps] == [1, 2]
    assert list(plan.missing) == [
        "the replay ends with step 2: the journal has steps 1 to 2, 4 to 5; --from-step goes on from a later checkpoint"]
    assert not make_replay_plan(tmp_path, history_of(1, 2, 4, 5), last=2).missing


def test_the_steps_of_a_run_come_out_equal_to_the_bit_and_a_changed_metric_is_named(finished_run: SmallRun, tmp_path: Path) -> None:
    shutil.copytree(finished_run.folder, tmp_path / "run")
    metrics = tmp_path / "run" / "metrics.jsonl"
    was = '"reward/mean": ' + str(finished_run.metrics()[1]["reward/mean"])
    assert metrics.read_text().count(was)
    metrics.write_text(was.join(metrics.read_text().rsplit(was, 1)).replace(was, was[:-1] + "7", 1))
    before = files_of(tmp_path / "run")
    steps, told = [], []
    assert not replay(tmp_path / "run", SimpleNamespace(compared=steps.append, remark=told.append))
    changed, equal = sorted(steps, key=lambda step: not step.difference)
    assert changed.difference.startswith("reward/mean is ") and not equal.difference
    assert all(step.has_weights and step.num_metrics > 30 for step in steps) and steps[1].has_checkpoint and steps[1].has_export
    assert files_of(tmp_path / "run") == before and not told


@pytest.mark.drill
@pytest.mark.parametrize(("kind", "settings"), [
    ("asynchronous", {"rollout__max_head_offpolicyness": "2"}),
    ("adapter", {"model__lora__rank": "4", "train__optimizer__lr": "1e-2"}),
    ("two ranks", {"train__num_ranks": "2", "rollout__consumer_batch_size": "4", "rollout__max_concurrent_rollouts": "8"}),
    ("reference", {"algorithm__kl_loss": "k3", "algorithm__num_minibatches": "2"}),
])
def test_a_run_that_was_killed_and_went_on_is_replayed_to_the_bit(
    tmp_path: Path, model_dir: str, kind: str, settings: dict[str, str],
) -> None:
    run = SmallRun(tmp_path, model_dir)
    arguments = run.arguments(**KEEP, **settings, run__total_steps="16", checkpoint__every_steps="5")
    with start_offbeat("train", *arguments) as process:
        try:
            metrics = run.folder / "metrics.jsonl"
            wait_until(lambda: process.poll() is not None or (metrics.exists() and len(run.metrics()) >= 8), timeout_s=200)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    done = offbeat("train", *arguments)
    assert done.returncode == 0, done.stderr
    replayed = offbeat("replay", str(run.folder))
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    lines = replayed.stdout.splitlines()
    assert len(lines) == 17 and all("weights" in line and "equal" in line for line in lines[:16]), kind


@pytest.mark.drill
def test_a_run_in_spmd_mode_is_replayed_to_the_bit(tmp_path: Path, model_dir: str) -> None:
    run = SmallRun(tmp_path, model_dir)
    done = torchrun("train", *run.arguments(**KEEP, run__total_steps="8", rollout__consumer_batch_size="4"), world=2)
    assert done.returncode == 0, done.stderr
    replayed = offbeat("replay", str(run.folder))
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr


PLAYING = Path(playing.__file__)
SEEDED = {"inference__seeded_requests": "true", "inference__batch_invariant": "true", "rollout__max_head_offpolicyness": "1"}


@pytest.mark.parametrize(("settings", "told"), [
    ({"inference": {"urls": ("http://localhost:9",)}}, "this one had engines by URL; leave --live out"),
    ({"inference": {"engine": "vllm"}}, "this one had inference.engine = 'vllm'"),
])
def test_runs_of_other_engines_are_refused(tmp_path: Path, settings: dict[str, dict[str, object]], told: str) -> None:
    values = small_config(tmp_path, "model").model_dump()
    config = load_config(None, [], values=values | {name: values[name] | each for name, each in settings.items()})
    with pytest.raises(ConfigError, match=told):
        check_live(config)


@pytest.mark.drill
@pytest.mark.parametrize("settings", [
    SEEDED, SEEDED | {"model__lora__rank": "4", "train__optimizer__lr": "1e-2"},
    SEEDED | {
        "rollout__workflow": "gym", "agent__environment": f"{PLAYING}:Digits", "agent__processes": "1", "rollout__max_new_tokens": "8"},
], ids=["whole model", "adapter", "agents"])
def test_with_seeds_all_tokens_are_sampled_again_bit_for_bit(tmp_path: Path, model_dir: str, settings: dict[str, str]) -> None:
    run = SmallRun(tmp_path, model_dir)
    done = offbeat("train", *run.arguments(**settings, checkpoint__journal_keep="all", run__total_steps="4"))
    assert done.returncode == 0, done.stderr
    again = offbeat("replay", str(run.folder), "--live", "--groups", "0")
    assert again.returncode == 0, again.stdout + again.stderr
    assert again.stdout.count("2 groups generated again:") == 4 and again.stdout.count("their log-probabilities bit for bit") == 4


@pytest.mark.drill
def test_without_seeds_the_first_token_that_differs_is_named_with_the_reason(tmp_path: Path, model_dir: str) -> None:
    run = SmallRun(tmp_path, model_dir)
    assert offbeat("train", *run.arguments(checkpoint__journal_keep="all", run__total_steps="2")).returncode == 0
    again = offbeat("replay", str(run.folder), "--live", "--groups", "0")
    assert again.returncode == 1, again.stdout + again.stderr
    assert "engines drew random numbers that are not recorded, as inference.seeded_requests was off" in again.stdout
