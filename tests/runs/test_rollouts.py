"""Rollouts of a process on engines. Whole runs are in the tests of the controller and of SPMD mode."""

import asyncio
import io
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from offbeat.config.root import Config
from offbeat.controller.inputs import read_inputs
from offbeat.data.stored_rollouts import read_rollouts
from offbeat.data.stream import PromptStream
from offbeat.engine.options import EngineOptions
from offbeat.engine.server import EngineServer
from offbeat.fleet.dispatch import Dispatcher
from offbeat.fleet.pool import EnginePool
from offbeat.inference.client import EngineClient, EngineSession
from offbeat.inference.sampling import Sample
from offbeat.rollout.idle import IdleMeter, WaitingMinute
from offbeat.rollout.staleness import Gate
from offbeat.rollout.workflows.single_turn import single_turn
from offbeat.runs.rollouts import EngineRollouts
from offbeat.runs.run_code import UserCode
from offbeat.telemetry.console import Console
from offbeat.telemetry.jsonl import read_json_lines
from offbeat.telemetry.record import RunRecord
from offbeat.user_code.functions import resolve
from small_run import build_small_model, small_config


async def score(completions, row):
    return [float(i) for i in range(len(completions))]


async def generate(prompt, sampling, *, n, session=""):
    return [Sample((5,) * sampling.max_new_tokens, (-0.5,) * sampling.max_new_tokens, (0,) * sampling.max_new_tokens, "2", "length")] * n


async def talkative(episode):
    """The first sample goes on for a second turn; of a row that begins with an odd digit for so many that they do not fit."""
    group = await single_turn(episode)
    turns = 40 if int(str(episode.row.prompt)[0]) % 2 else 1
    first = group[0]
    for _ in range(turns):
        [sample] = await episode.generate(tuple(first.tokens.tolist()), episode.sampling, n=1)
        more = {"tokens": sample.token_ids, "loss_mask": [True] * 5, "rollout_logprobs": sample.logprobs, "versions": sample.versions}
        first = replace(first, **{name: np.concatenate([getattr(first, name), values]) for name, values in more.items()})
    return [first, *group[1:]]


def code(config: Config) -> UserCode:
    return UserCode(SimpleNamespace(score=score), resolve(config.rollout.workflow, kind="workflow"))


def play(config: Config, root: Path) -> tuple[list, list[dict]]:
    """The groups of one step, and what was recorded meanwhile."""
    async def main(record: RunRecord) -> list:
        inputs = read_inputs(config)
        source = EngineRollouts(config, record, inputs, generate, code(config))
        async with source.rollouts(PromptStream(inputs.train, seed=0), version=0, last_version=1) as rollouts:
            return await rollouts.prepare_batch()

    with RunRecord(root / "run", trace=False, console=Console("quiet")) as record:
        groups = asyncio.run(main(record))
    return groups, list(read_json_lines(root / "run" / "events.jsonl"))


def test_what_a_workflow_makes_too_long_is_left_out_or_rejected_with_its_reason(tmp_path: Path, model_dir: str) -> None:
    # Prompts of 4 tokens, answers of 5: a second turn makes 14 tokens, of which the last is not run.
    config = small_config(
        tmp_path, model_dir, rollout__workflow=f"{__file__}:talkative", train__max_tokens_per_microbatch="12", rollout__group_size="3",
        rollout__consumer_batch_size="12", rollout__max_concurrent_rollouts="12")
    groups, events = play(config, tmp_path)
    reason = "too long: a row of 13 tokens exceeds train.max_tokens_per_microbatch = 12"
    assert [[t.reason for t in group.trajectories] for group in groups] == [[reason, "length", "length"]] * 12
    unusable = [event for event in events if event["kind"] == "unusable_samples"]
    assert {tuple(event["reasons"]) for event in unusable} == {(reason,)}
    rejected = [event for event in events if event["kind"] == "rejected"]
    assert {event["why"] for event in rejected} == {"too long"}
    assert "a prompt of 64 tokens and max_new_tokens = 5 are more than the context of 64" in rejected[0]["reason"]


def test_rejected_groups_are_kept_with_their_samples_and_reason(tmp_path: Path, model_dir: str) -> None:
    config = small_config(
        tmp_path, model_dir, rollout__should_accept=f"{__file__}:accepts_even", rollout__consumer_batch_size="4",
        rollout__max_concurrent_rollouts="4")

    async def main(record: RunRecord) -> None:
        inputs = read_inputs(config)
        source = EngineRollouts(config, record, inputs, generate, code(config))
        async with source.rollouts(PromptStream(inputs.train, seed=0), version=0, last_version=1) as rollouts:
            await rollouts.prepare_batch()
        await record.rollouts(1, [])

    with RunRecord(tmp_path / "run", trace=False, console=Console("quiet")) as record:
        asyncio.run(main(record))
    groups = list(read_rollouts(tmp_path / "run", rejected=True))
    assert groups and {group.why for group in groups} == {"not accepted"}
    assert all(int(group.prompt_id.partition(":")[2]) % 2 for group in groups)
    assert {(group.rejected, group.step, group.drawn_again) for group in groups} == {("not accepted by should_accept", 1, False)}
    assert {(t.text, t.reward) for t in groups[0].trajectories} == {(f"{groups[0].prompt}22222", 0.0), (f"{groups[0].prompt}22222", 1.0)}


def accepts_even(group):
    """Refuses prompts of odd rows."""
    return int(group.prompt_id.partition(":")[2]) % 2 == 0


@pytest.mark.parametrize(("preset", "num_rejected"), [("dapo", 3), ("grpo", 0)])
def test_dynamic_sampling_goes_on_with_what_a_checkpoint_counted(preset: str, num_rejected: int, tmp_path: Path, model_dir: str) -> None:
    config = small_config(tmp_path, model_dir, algorithm__preset=preset)
    inputs = read_inputs(config)
    with RunRecord(tmp_path / "run", trace=False, console=Console("quiet")) as record:
        source = EngineRollouts(config, record, inputs, generate, code(config))
        rollouts = source.rollouts(PromptStream(inputs.train, seed=0), version=0, last_version=1, num_flat_rejected=3)
    assert rollouts.num_flat_rejected == num_rejected


def test_advice_on_engines_that_idle_is_an_event_of_the_run_and_on_the_console(tmp_path: Path, model_dir: str) -> None:
    config, shown, now_s = small_config(tmp_path, model_dir), io.StringIO(), [0.0]
    inputs = read_inputs(config)
    with RunRecord(tmp_path / "run", trace=False, console=Console("plain", stream=shown)) as record:
        executor = EngineRollouts(config, record, inputs, generate, code(config)).rollouts(
            PromptStream(inputs.train, seed=0), version=0, last_version=1)
        meter, gate = executor.idle, executor._gate
        meter._now_s = lambda: now_s[0]
        while gate.capacity:
            gate.admit(f"0:{gate.capacity}")
        with meter.scoring():
            for now_s[0] in (1e6, 2e6, 3e6, 4e6):
                meter.look()
    [event] = [event for event in read_json_lines(tmp_path / "run" / "events.jsonl") if event["kind"] == "advice"]
    assert event["text"].startswith("engines had nothing to do for 100% of the last minute in which groups ran")
    assert shown.getvalue() == f"  {event['text']}\n"


def test_engines_that_play_an_evaluation_set_are_not_idle_for_the_run(tmp_path: Path, model_dir: str) -> None:
    now, minutes, gate = [0.0], list[WaitingMinute](), Gate(batch_size=1, max_running=1, eta=0, version=0)
    gate.admit("0:0")

    class Listener:
        def report_minute(self, minute: WaitingMinute) -> None:
            minutes.append(minute)

    meter = IdleMeter(gate, Listener(), now_s=lambda: now[0])

    async def takes_a_while(*arguments, **named):
        now[0] += 100.0
        return await generate(*arguments, **named)

    async def main(record: RunRecord) -> None:
        config = small_config(tmp_path, model_dir, evaluate__sets__few__num_prompts="1")
        inputs = read_inputs(config)
        source = EngineRollouts(config, record, inputs, takes_a_while, code(config), meters=[meter])
        meter.look()
        await source.rollouts_of_set("few").rollout_batch([inputs.sets["few"].heldout.row(0)], group_size=1, sampling=inputs.sampling)
        assert len(source.meters) == 1 and now == [100.0] and [minute.idle_s for minute in minutes] == [0]
        now[0] += 100.0
        meter.look()
        assert [minute.idle_s for minute in minutes] == [0, 100]

    with RunRecord(tmp_path / "run", trace=False, console=Console("quiet")) as record:
        asyncio.run(main(record))


def test_a_row_as_long_as_a_micro_batch_is_trained_on(tmp_path: Path, model_dir: str) -> None:
    config = small_config(tmp_path, model_dir, train__max_tokens_per_microbatch="8")
    groups, events = play(config, tmp_path)
    assert {t.reason for group in groups for t in group.trajectories} == {"length"}
    assert events == []


def test_samples_end_at_every_end_token_of_the_model_and_hold_it(tmp_path: Path) -> None:
    model = Path(build_small_model(tmp_path / "model", seed=1))
    (model / "generation_config.json").write_text('{"eos_token_id": [0, 30]}')
    config = small_config(tmp_path, str(model), rollout__stop='["<unk>"]')
    sampling = replace(read_inputs(config).sampling, max_new_tokens=56, seed=3)

    async def main() -> list[Sample]:
        async with EngineSession() as http:
            pool = EnginePool([EngineClient("engine 0", server.start(), http.session)])
            pool.admit("engine 0", 0)
            return await Dispatcher(pool, request_timeout_s=60).generate((13, 14, 15), sampling, n=16)

    server = EngineServer(EngineOptions(model=str(model)))
    try:
        samples = asyncio.run(main())
    finally:
        server.stop()
    ends = {0, 30, 2}
    stopped = [sample for sample in samples if sample.finish_reason == "stop"]
    assert {sample.token_ids[-1] for sample in stopped} == ends
    assert all(not ends & set(sample.token_ids[:-1]) for sample in samples)
