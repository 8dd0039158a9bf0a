"""The executor on a real event loop; only the engine and the reward are in memory, so that each test decides when a group ends and how."""

import asyncio
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest

from offbeat.agents.group import play_group
from offbeat.aio import cancelled
from offbeat.config.algorithms import AlgorithmConfig
from offbeat.config.curriculum import CurriculumConfig
from offbeat.config.rollout import RolloutConfig
from offbeat.data.dataset import ListDataset
from offbeat.data.reward import FailedReward
from offbeat.data.row import Row
from offbeat.data.stream import PromptStream
from offbeat.data.tokenizer import character_tokenizer
from offbeat.data.trajectory import Group, Trajectory
from offbeat.errors import (
    CodeError,
    DeadlineError,
    EngineError,
    RefusedError,
    RolloutError,
    TooLongError,
    WorkerError,
    describe,
)
from offbeat.inference.sampling import Sample, Sampling
from offbeat.raised import describe_at
from offbeat.rollout import idle, player
from offbeat.rollout.dynamic import DynamicSampling
from offbeat.rollout.episode import Episode
from offbeat.rollout.executor import RolloutExecutor
from offbeat.rollout.idle import WaitingMinute
from offbeat.rollout.outcomes import RolloutListener, Settled
from offbeat.rollout.player import RolloutParts
from offbeat.rollout.staleness import Gate
from offbeat.rollout.trajectory_checks import TrajectoryChecks
from offbeat.rollout.workflows.single_turn import single_turn
from waiting import until


class Panic(BaseException):
    """As a library in Rust raises it, which is no Exception."""


TOKENIZER = character_tokenizer()
ROWS = tuple(Row(f"{i}>", str(i)) for i in range(40))


@dataclass
class Engine:
    """Answers after a random instant; `slow` prompts wait for `release`."""

    slow: frozenset[str] = frozenset()
    release: asyncio.Event = field(default_factory=asyncio.Event)
    version: int = 0
    error: Exception | None = None
    running: int = 0
    most_running: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)

    async def generate(self, prompt: tuple[int, ...], sampling: Sampling, *, n: int, session: str = "") -> list[Sample]:
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        version = self.version
        try:
            if TOKENIZER.decode(prompt) in self.slow:
                await self.release.wait()
            for _ in range(self.chance.randrange(5)):
                await asyncio.sleep(0)
            if self.error is not None:
                raise self.error
            return [Sample((5, 0), (-0.5, -0.5), (version, self.version), "1", "stop")] * n
        finally:
            self.running -= 1


async def no_score(completions: Sequence[str], row: Row) -> list[float]:
    return [1.0] * len(completions)


@dataclass
class Play(RolloutListener):
    """An executor over an engine in memory."""

    engine: Engine
    gate: Gate
    config: RolloutConfig
    stream: PromptStream
    rejected: list[Settled] = field(default_factory=list)
    unusable: list[tuple[str, list[str]]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    minutes: list[WaitingMinute] = field(default_factory=list)
    accept: Callable[[Group], bool] = lambda _group: True
    dynamic: DynamicSampling | None = None
    checks: TrajectoryChecks = TrajectoryChecks(TOKENIZER.vocab_size)
    has_places: bool = False
    score: Callable[[Sequence[str], Row], Awaitable[list[float]]] = no_score
    workflow: Callable[[Episode], Awaitable[Sequence[Trajectory]]] = single_turn

    def executor(self) -> RolloutExecutor:
        def episode(row: Row, group_size: int, sampling: Sampling) -> Episode:
            return Episode(row, tuple(TOKENIZER.encode(str(row.prompt))), group_size, sampling, self.engine.generate, self.score, TOKENIZER)

        parts = RolloutParts(
            workflow=self.workflow, make_episode=episode, accept=self.accept, dynamic=self.dynamic, checks=self.checks,
            has_places=self.has_places)
        return RolloutExecutor(
            self.gate, self.stream, parts, config=self.config, sampling=Sampling(8), listener=self, idle_listener=self)

    def report_minute(self, minute: WaitingMinute) -> None:
        self.minutes.append(minute)

    def on_rejected(self, settled: Settled) -> None:
        self.rejected.append(settled)

    def on_unusable(self, prompt_id: str, reasons: Sequence[str]) -> None:
        self.unusable.append((prompt_id, list(reasons)))

    def warn(self, text: str) -> None:
        self.warnings.append(text)

    async def advance(self, executor: RolloutExecutor, version: int) -> None:
        executor.advance(version)
        self.serve(executor, version)

    def serve(self, executor: RolloutExecutor, version: int) -> None:
        self.engine.version = version
        executor.serve(version)


def make(*, batch: int = 3, running: int = 6, eta: int = 1, last: int | None = None, on_stale: str = "wait", engine: Engine | None = None,
         rows: tuple[Row, ...] = ROWS, **changes: object) -> Play:
    config = RolloutConfig(
        consumer_batch_size=batch, max_concurrent_rollouts=running, max_head_offpolicyness=eta, on_stale=on_stale,
        **{"group_size": 2, "batch_timeout_s": 60.0, "max_failures_in_a_row": 4, "max_retries": 2} | changes)
    gate = Gate(batch_size=batch, max_running=running, eta=eta, last_version=last, on_stale=on_stale)
    return Play(engine or Engine(), gate, config, PromptStream(ListDataset(rows), seed=0, shuffle=False))


def run(body: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(60):
            await body()
        assert len(asyncio.all_tasks()) == 1, "a task was left behind"

    asyncio.run(main())


def test_room_for_a_thousand_groups_is_filled_by_several_callbacks_of_the_loop() -> None:
    def waiting() -> Play:
        return make(batch=1000, running=1000, engine=Engine(slow=frozenset(str(row.prompt) for row in ROWS)))

    async def fill() -> None:
        play = waiting()
        async with play.executor():
            assert 0 < len(play.gate.running) < 500, "one callback admits only some"
            await until(lambda: len(play.gate.running) == 1000)

    async def leave() -> None:
        play = waiting()
        async with play.executor():
            admitted = len(play.gate.running)
        await asyncio.sleep(0)
        assert len(play.gate.running) == admitted, "nothing is admitted any more once the executor was left"

    async def fail() -> None:
        play = waiting()
        rows = play.stream.next
        with patch.object(play.stream, "next", lambda: rows() if len(play.gate.running) < 200 else 1 / 0):
            async with play.executor() as executor:
                with pytest.raises(ZeroDivisionError):
                    await executor.prepare_batch()

    run(fill)
    run(leave)
    run(fail)


def test_the_groups_of_the_next_step_are_released_ahead_and_stay_in_flight_until_it_begins() -> None:
    async def body() -> None:
        play = make(last=4)
        noted: list[str] = []
        play.stream.note = lambda group: noted.append(group.prompt_id)  # pyright: ignore[reportAttributeAccessIssue]
        async with play.executor() as executor:
            first = [group.prompt_id for group in await executor.prepare_batch()]
            ahead = await executor.take_ahead()
            own = [group.prompt_id for group in ahead]
            assert len(own) == 3 and not set(own) & set(first) and noted == first
            assert executor.has_ahead and executor.in_flight[:3] == tuple(own)
            await play.advance(executor, 1)
            assert await executor.prepare_batch() == ahead
            assert noted == first + own and not executor.has_ahead and not set(own) & set(executor.in_flight)
            await play.advance(executor, 2)
            assert play.gate.training == 0 and len(await executor.prepare_batch()) == 3

    run(body)


def test_what_waits_ahead_in_vain_can_be_cancelled_and_takes_nothing() -> None:
    async def body() -> None:
        play = make(eta=0)
        async with play.executor() as executor:
            await executor.prepare_batch()
            ahead = asyncio.create_task(executor.take_ahead())
            for _ in range(20):
                await asyncio.sleep(0)
            assert not ahead.done() and not executor.has_ahead
            await cancelled(ahead)
            await play.advance(executor, 1)
            assert len(await executor.prepare_batch()) == 3

    run(body)


def test_what_still_waits_ahead_when_its_step_was_trained_takes_nothing_of_what_comes_then() -> None:
    async def body() -> None:
        play = make(eta=0)
        async with play.executor() as executor:
            await executor.prepare_batch()
            ahead = asyncio.create_task(executor.take_ahead())
            await asyncio.sleep(0)
            await play.advance(executor, 1)
            await until(lambda: len(play.gate.ready) == 3)
            for _ in range(20):
                await asyncio.sleep(0)
            assert not ahead.done() and not executor.has_ahead
            await cancelled(ahead)
            assert len(await executor.prepare_batch()) == 3

    run(body)


def test_the_time_of_episodes_that_are_trained_on_is_accounted_for() -> None:
    async def body() -> None:
        play = make()
        play.workflow = lambda episode: play_group(episode, SimpleNamespace(play_episode=one_turn))
        executor = play.executor()
        await executor.rollout_batch(ROWS[:4], group_size=1, sampling=Sampling(8))
        assert "rollout/episode_mean_s" not in executor.take_stats().means, "episodes of an evaluation are none of the step's"
        async with executor:
            await executor.prepare_batch()
            stats = executor.take_stats()
            assert stats.means["rollout/episode_mean_s"][1] >= 6 and stats.means["rollout/model_share"][0] > 0
            assert stats.values()["rollout/metrics/words"] == 0.5, "those of an evaluation are not among them"

    async def one_turn(episode: Episode, index: int) -> list[Trajectory]:
        episode.measured({"words": index})
        return [replace(t, episode=index) for t in await single_turn(replace(episode, group_size=1))]

    run(body)


def test_episodes_that_wait_for_a_place_while_engines_idle_are_limited_by_the_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idle, "_WINDOW_S", 0.02)

    async def body() -> None:
        play, place = make(), asyncio.Semaphore(1)
        play.has_places = True

        async def workflow(episode: Episode) -> Sequence[Trajectory]:
            await episode.off_the_clock(place.acquire())
            try:
                await asyncio.sleep(0.01)
                return await single_turn(episode)
            finally:
                place.release()

        play.workflow = workflow
        async with play.executor() as executor:
            for version in (1, 2):
                await executor.prepare_batch()
                await play.advance(executor, version)
        assert not play.warnings
        assert any(minute.limit == "places" and minute.idle_share > 0.3 for minute in play.minutes)

    run(body)


def test_a_batch_holds_exactly_its_groups_with_all_samples() -> None:
    async def body() -> None:
        play = make()
        async with play.executor() as executor:
            for version in range(1, 4):
                groups = await executor.prepare_batch()
                assert len(groups) == 3
                assert all(len(group.trajectories) == 2 and group.rejected is None for group in groups)
                await play.advance(executor, version)
        assert play.engine.most_running <= 6

    run(body)


@pytest.mark.parametrize("eta", [0, 1, 2])
def test_no_trained_token_is_older_than_the_bound_even_behind_a_straggler(eta: int) -> None:
    async def body() -> None:
        play = make(eta=eta, running=12, engine=Engine(slow=frozenset({"1>"})))
        waited = False
        async with play.executor() as executor:
            for version in range(6):
                preparing = asyncio.create_task(executor.prepare_batch())
                for _ in range(200):
                    await asyncio.sleep(0)
                if not preparing.done():
                    waited = True
                    play.engine.release.set()
                for group in await preparing:
                    assert all(version - t.head_version <= eta for t in group.trajectories)
                await play.advance(executor, version + 1)
        assert waited, "the straggler never mattered, so this test shows nothing"
        assert play.rejected == []

    run(body)


@pytest.mark.parametrize("eta", [1, 2])
def test_steps_go_on_as_far_as_the_bound_while_engines_are_behind(eta: int) -> None:
    async def body() -> None:
        play = make(eta=eta, running=30)
        async with play.executor() as executor:
            for version in range(eta + 1):  # engines serve version 0 all the while
                groups = await executor.prepare_batch()
                assert {t.head_version for group in groups for t in group.trajectories} == {0}
                executor.advance(version + 1)
            assert not play.gate.running and not play.gate.ready, "nothing more may be sampled from version 0"
            preparing = asyncio.create_task(executor.prepare_batch())
            await asyncio.sleep(0.05)
            assert not preparing.done()
            play.serve(executor, eta)  # the newest but one
            groups = await preparing
            assert {(group.admitted_version, t.head_version) for group in groups for t in group.trajectories} == {(eta, eta)}

    run(body)


def test_a_version_that_is_served_after_the_executor_was_left_admits_nothing() -> None:
    async def body() -> None:
        play = make(eta=0)
        async with play.executor() as executor:
            await executor.prepare_batch()
        await play.advance(executor, 1)
        assert play.gate.capacity and not play.gate.running

    run(body)


def test_requeue_draws_a_straggler_again_and_never_waits_for_it() -> None:
    async def body() -> None:
        play = make(eta=1, on_stale="requeue", engine=Engine(slow=frozenset({"1>"})))
        async with play.executor() as executor:
            trained: list[str] = []
            for version in range(4):
                groups = await executor.prepare_batch()
                assert all(version - t.head_version <= 1 for group in groups for t in group.trajectories)
                trained += [group.prompt_id for group in groups]
                await play.advance(executor, version + 1)
            assert {settled.prompt_id for settled in play.rejected} == {"0:1"}
            assert play.rejected[0] == Settled("0:1", "it would have become too stale", "too stale", drawn_again=True)
            assert "0:1" in executor.in_flight
            assert executor.take_stats().values()["rollout/requeued_prompts"] == len(play.rejected)
            assert len(set(trained)) == 12
            play.engine.release.set()
            for version in range(4, 7):
                trained += [group.prompt_id for group in await executor.prepare_batch()]
                await play.advance(executor, version + 1)
            assert "0:1" in trained

    run(body)


def test_a_workflow_that_swallows_its_cancellation_harms_nobody() -> None:
    async def stubborn(episode: Episode) -> list[Trajectory]:
        try:
            return await single_turn(episode)
        except asyncio.CancelledError:
            return []

    async def body() -> None:
        play = make(eta=1, on_stale="requeue", engine=Engine(slow=frozenset({"1>"})))
        play.workflow = stubborn
        async with play.executor() as executor:
            for version in range(4):
                assert all(group.trajectories for group in await executor.prepare_batch())
                await play.advance(executor, version + 1)
            assert "0:1" in executor.in_flight

    run(body)


def test_keep_trains_on_what_is_too_old() -> None:
    async def body() -> None:
        play = make(eta=0, batch=2, running=8, on_stale="keep", engine=Engine(slow=frozenset({"0>"})))
        play.gate.eta = 2
        async with play.executor() as executor:
            for version in range(4):
                await executor.prepare_batch()
                await play.advance(executor, version + 1)
            play.engine.release.set()
            for _ in range(200):  # its turns of the loop, and more
                await asyncio.sleep(0)
            (late,) = [group for group in await executor.prepare_batch() if group.prompt_id == "0:0"]
            assert late.trajectories[0].head_version == 0

    run(body)


def test_what_should_accept_refuses_is_recorded_and_replaced() -> None:
    async def body() -> None:
        play = make()
        play.accept = lambda group: int(group.prompt_id.split(":")[1]) % 2 == 0
        async with play.executor() as executor:
            groups = await executor.prepare_batch()
            assert [int(group.prompt_id.split(":")[1]) % 2 for group in groups] == [0, 0, 0]
        assert play.rejected
        assert {settled.rejected for settled in play.rejected} == {"not accepted by should_accept"}
        assert all(settled.played is not None and len(settled.played.trajectories) == 2 for settled in play.rejected)

    run(body)


def dynamic(play: Play, *, batches: float, num_rejected: int = 0) -> DynamicSampling:
    config = AlgorithmConfig(dynamic_sampling=True, max_draw_batches=batches)
    return DynamicSampling(config, batch_size=play.gate.batch_size, num_rejected=num_rejected, warn=play.warnings.append)


async def odd_rows_differ(completions: Sequence[str], row: Row) -> list[float]:
    return [float(i * (int(row.answer) % 2)) for i, _ in enumerate(completions)]


def test_groups_of_equal_rewards_are_recorded_and_replaced_beside_a_filter() -> None:
    async def body() -> None:
        play = make(eta=0)
        play.dynamic, play.score = dynamic(play, batches=10), odd_rows_differ
        play.accept = lambda group: group.prompt_id != "0:1"
        async with play.executor() as executor:
            for version in range(3):
                groups = await executor.prepare_batch()
                assert all(np.ptp(group.rewards) == 1 for group in groups)
                assert executor.num_flat_rejected == 0
                await play.advance(executor, version + 1)
            stats = executor.take_stats().values()
        reasons = {settled.prompt_id: (settled.kind, settled.rejected) for settled in play.rejected}
        assert reasons.pop("0:1") == ("not accepted", "not accepted by should_accept")
        assert set(reasons.values()) == {("equal rewards", "all rewards are equal: 0")}
        assert stats["sampling/rejected_groups"] == len(reasons) and stats["sampling/kept_flat_groups"] == 0
        assert stats["sampling/drawn_groups"] - len(reasons) >= 9
        assert stats["rollout/rejected_share"] > 0 and not any("equal" in name for name in stats)
        assert play.warnings == []

    run(body)


def test_a_run_whose_prompts_are_all_solved_goes_on_after_the_bound_and_says_so_once() -> None:
    async def body() -> None:
        # The first group is kept after 0.8 s, so the run would give up if those rejected before were no progress.
        play = make(eta=0, batch=2, running=1, batch_timeout_s=0.7)
        play.dynamic = dynamic(play, batches=5, num_rejected=1)  # as a checkpoint says

        async def score(completions: Sequence[str], row: Row) -> list[float]:
            await asyncio.sleep(0.1 if int(row.answer) < 8 else 0)
            return [1.0] * len(completions)

        play.score = score
        async with play.executor() as executor:
            for version in range(3):
                assert len(await executor.prepare_batch()) == 2
                await play.advance(executor, version + 1)
            stats = executor.take_stats().values()
        assert [settled.kind for settled in play.rejected] == ["equal rewards"] * (7 + 8 + 8)
        assert (stats["sampling/drawn_groups"], stats["sampling/kept_flat_groups"]) == (29, 6)
        assert len(play.warnings) == 1 and "8 groups of equal rewards were rejected for one step, as many as" in play.warnings[0]

    run(body)


def test_a_curriculum_hears_of_a_group_once_it_is_trained_on_or_refused() -> None:
    async def body() -> None:
        play = make(eta=0, batch=2, running=4, rows=ROWS[:8])
        play.stream = PromptStream(ListDataset(ROWS[:8]), seed=0, shuffle=False, curriculum=CurriculumConfig(leave_at=1.0))
        play.dynamic, play.score = dynamic(play, batches=10), odd_rows_differ
        async with play.executor() as executor:
            trained = [group.prompt_id for group in await executor.prepare_batch()]
            state = play.stream.state().curriculum
            assert state is not None
            refused = [settled.prompt_id for settled in play.rejected]
            assert state.means == {int(name[2:]): 0.5 for name in trained} | {int(name[2:]): 0.0 for name in refused}
            stats = executor.take_stats().values()
        assert stats["curriculum/hard_prompts"] == len(refused) and stats["curriculum/unseen_prompts"] == 8 - len(trained) - len(refused)

    run(body)


def test_a_filter_that_raises_rejects_its_group_with_the_error() -> None:
    def accept(group: Group) -> bool:
        if group.prompt_id == "0:2":
            raise KeyError("score")
        return True

    async def body() -> None:
        place = f"{Path(__file__).relative_to(Path.cwd())}, line {accept.__code__.co_firstlineno + 2}"
        play = make()
        play.accept = accept
        async with play.executor() as executor:
            for version in range(3):
                await executor.prepare_batch()
                await play.advance(executor, version + 1)
        again = Settled("0:2", f"should_accept raised KeyError: 'score' at {place}", "code failed", drawn_again=True)
        assert play.rejected == [again, again, replace(again, rejected=f"{again.rejected} (the last of 3 tries)", drawn_again=False)]

    run(body)


def test_a_filter_that_always_raises_or_always_refuses_ends_the_run() -> None:
    def raises(_: Group) -> bool:
        raise KeyError("score")

    async def never_called(_: Group) -> bool:
        return True

    def panics(_: Group) -> bool:
        raise Panic("out of range")

    async def body() -> None:
        cases: list[tuple[Callable[[Group], object], type[Exception], str]] = [
            (raises, CodeError, "should_accept raised KeyError"), (lambda _: False, DeadlineError, "were rejected"),
            (lambda _: None, CodeError, "should_accept must return True or False, got None"),
            (lambda _: np.ones(2), CodeError, "should_accept must return True or False, got array"),
            (lambda _: "no", CodeError, "should_accept must return True or False, got 'no'"),
            (never_called, CodeError, "should_accept must not be an async function"),
            (panics, CodeError, "should_accept raised Panic: out of range"),
            (lambda _: sys.exit(3), CodeError, "should_accept raised SystemExit: 3")]
        for accept, kind, sentence in cases:
            play = make(batch_timeout_s=0.2 if kind is DeadlineError else 60.0, max_failures_in_a_row=5)
            play.accept = accept
            async with play.executor() as executor:
                with pytest.raises(kind, match=sentence):
                    await executor.prepare_batch()

    run(body)


@pytest.mark.parametrize(("answer", "why"), [
    ((), "must return 2 trajectories, one for each sample, got 0"), (("no trajectory",), "got 1"), (None, "got None"),
    (("one", "two"), "2 of 2 samples cannot be trained on; the first: malformed: the workflow returned 'one' .str. in the place of"),
])
def test_a_workflow_that_gives_no_trajectories_fails_its_group(answer: object, why: str) -> None:
    async def workflow(_: Episode) -> object:
        return answer

    async def body() -> None:
        play = make(max_failures_in_a_row=3)
        play.workflow = workflow
        async with play.executor() as executor:
            with pytest.raises(CodeError, match=why):
                await executor.prepare_batch()

    run(body)


class Unspeakable(Exception):  # noqa: N818
    def __str__(self) -> str:
        raise KeyError("no text")


def speechless(_: Episode) -> None:
    raise Unspeakable


async def generator(_: Episode):
    yield 1


@pytest.mark.parametrize(("workflow", "why"), [
    (lambda _: [], "must be an async function, but calling it gave .. .list.$"), (generator, "must be an async function"),
    (lambda _: sys.exit(3), "the first with CodeError: SystemExit: 3 at .*line"), (lambda: None, "takes 0 positional arguments"),
    (speechless, "the first with Unspeakable: it cannot say what is wrong"),
])
def test_what_is_no_workflow_at_all_ends_the_run_in_a_sentence(workflow: Callable, why: str) -> None:
    async def body() -> None:
        play = make(max_failures_in_a_row=3)
        play.workflow = workflow
        async with play.executor() as executor:
            with pytest.raises(CodeError, match=why):
                await executor.prepare_batch()

    run(body)


@pytest.mark.parametrize(("error", "why"), [
    (SystemExit(3), "CodeError: SystemExit: 3"), (Unspeakable(), "Unspeakable: it cannot say what is wrong"),
    (RecursionError("deep"), "RecursionError: deep"),
    (ValueError("\ud800\n" + "x" * 10**6), "ValueError: \\ud800 " + "x" * 486), (MemoryError(), "MemoryError"),
    (ExceptionGroup("of a task group", [KeyError("turns"), EngineError("cancelled")]), "KeyError: 'turns'"),
    (ExceptionGroup("of a task group", [EngineError("engine 0 died")]), "EngineError: engine 0 died"),
])
def test_whatever_a_workflow_raises_fails_its_group_alone_and_its_prompt_is_drawn_again(error: BaseException, why: str) -> None:
    tries = Counter[str]()

    async def workflow(episode: Episode) -> list[Trajectory]:
        tries[episode.row.answer] += 1
        if episode.row.answer == "1" and tries["1"] == 1:
            raise error
        return await single_turn(episode)

    async def body() -> None:
        play = make()
        play.workflow = workflow
        async with play.executor() as executor:
            groups = await executor.prepare_batch()
            await play.advance(executor, 1)
            groups += await executor.prepare_batch()
        assert "0:1" in [group.prompt_id for group in groups]
        (settled,) = play.rejected
        said, _, place = str(settled.rejected).partition(" at ")
        assert (settled.prompt_id, said, settled.drawn_again) == ("0:1", why, True)
        assert ("test_executor.py, line " in place) == (not isinstance(error, ExceptionGroup)), "those in the group were never raised"
        assert settled.kind == ("engine failed" if "engine 0" in why else "code failed")

    run(body)


def changed(**changes: object) -> Callable[[list[Trajectory]], list[Trajectory]]:
    return lambda group: [replace(group[0], **changes), *group[1:]]


@pytest.mark.parametrize(("spoil", "why"), [
    (changed(tokens=[3, 4, 999, 0]), "wrong tokens: token 2 has the id 999, which is not in the vocabulary of 54 tokens"),
    (changed(rollout_logprobs=[0, 0, np.nan, -0.5]), "wrong logprobs: generated token 2 has the log-probability nan"),
    (changed(versions=[-1, -1, 38, 38]), "wrong versions: generated token 2 is of version 38, where engines served 0 to 0"),
    (changed(versions=[-1, -1, -3, -3]), "wrong versions: generated token 2 is of version -3"),
    (changed(reward="good"), "reward failed: 'good' (str) is not a number"), (changed(reward=None), "reward failed: None"),
    (changed(reward=1e308), "reward failed: 1e+308 is not a number within"),
    (changed(tokens=[1]), "malformed: Trajectory.loss_mask must have shape"),
    (lambda group: [None, *group[1:]], "malformed: the workflow returned None"),
])
def test_a_wrong_trajectory_is_left_out_alone_and_no_prompt_is_lost(spoil: Callable, why: str) -> None:
    async def workflow(episode: Episode) -> list[Trajectory]:
        group = await single_turn(episode)
        return spoil(group) if episode.row.answer == "1" else group

    async def body() -> None:
        play = make(group_size=3, running=3)
        play.workflow = workflow
        async with play.executor() as executor:
            groups = {group.prompt_id: group for group in await executor.prepare_batch()}
            stats = executor.take_stats().values()
        assert [t.unusable for t in groups["0:1"].trajectories[1:]] == [None, None]
        assert groups["0:1"].trajectories[0].reason.startswith(why)
        assert play.rejected == []
        kind = why.partition(":")[0].replace(" ", "_")
        assert stats[f"rollout/unusable_{kind}_share"] == stats["rollout/unusable_share"] > 0

    run(body)


def test_a_workflow_that_blocks_is_ended_there_and_its_prompt_drawn_again() -> None:
    tries = Counter[str]()

    def block() -> None:
        time.sleep(20)

    async def workflow(episode: Episode) -> list[Trajectory]:
        tries[episode.row.answer] += 1
        if episode.row.answer == "1" and tries["1"] == 1:
            block()
        return await single_turn(episode)

    async def body() -> None:
        play = make(blocked_timeout_s=0.3)  # episode_timeout_s may be an hour, as it grows with the tokens of an answer
        play.workflow = workflow
        async with play.executor() as executor:
            await executor.prepare_batch()
        (settled,) = play.rejected  # and nothing that ran beside it
        assert (settled.prompt_id, settled.kind, settled.drawn_again) == ("0:1", "code failed", True)
        assert "it held up the whole process for" in settled.rejected and "in block; await there" in settled.rejected

    run(body)


def test_a_filter_that_blocks_is_ended_there_long_before_the_deadline_of_episodes() -> None:
    asked: list[str] = []

    def accept(group: Group) -> bool:
        asked.append(group.prompt_id)
        if len(asked) == 1:
            time.sleep(20)
        return True

    async def body() -> None:
        play = make(blocked_timeout_s=0.3, episode_timeout_s=4111)
        play.accept = accept
        async with play.executor() as executor:
            await executor.prepare_batch()
        (settled,) = play.rejected
        assert settled.kind == "code failed" and "should_accept raised CodeError: it held up the whole process for" in settled.rejected

    run(body)


def test_a_prompt_that_cannot_be_asked_is_rejected_at_once_whatever_the_tokenizer_says() -> None:
    async def body() -> None:
        play = make(rows=(ROWS[0], Row("\ud800", "1"), *ROWS[2:]))
        async with play.executor() as executor:
            await executor.prepare_batch()
        (settled,) = play.rejected
        assert (settled.prompt_id, settled.kind, settled.drawn_again) == ("0:1", "prompt refused", False)

    run(body)


@pytest.mark.parametrize("wrong", [FailedReward("it raised"), None, "good", np.ones(2), float("inf"), 1e308])
def test_one_wrong_reward_in_twenty_costs_its_sample_and_no_prompt(wrong: object) -> None:
    """Groups of eight, of which a third have a wrong reward; once, each of them was lost with its prompt."""
    rows = tuple(Row(f"{i}>", str(i)) for i in range(200))
    chance = random.Random(7)

    async def score(completions: Sequence[str], row: Row) -> list:
        return [wrong if chance.random() < 0.05 else float(i % 2) for i in range(len(completions))]

    async def body() -> None:
        play = make(batch=20, running=40, group_size=8, rows=rows, last=10)
        play.score = score
        trained: list[str] = []
        left_out = 0
        async with play.executor() as executor:
            for version in range(10):
                groups = await executor.prepare_batch()
                trained += [group.prompt_id for group in groups]
                left_out += sum(8 - len(group.usable) for group in groups)
                await play.advance(executor, version + 1)
        assert sorted(trained) == sorted(f"0:{i}" for i in range(200))  # a whole epoch
        assert play.rejected == []
        assert 50 < left_out < 110
        (warning,) = play.warnings or ["samples cannot be trained on: reward failed The first, of prompt"]
        assert "samples cannot be trained on: reward failed" in warning and "The first, of prompt" in warning

    run(body)


def test_a_prompt_whose_samples_always_fail_is_drawn_again_so_often_and_then_recorded_with_its_reason() -> None:
    async def score(completions: Sequence[str], row: Row) -> list[float]:
        return [FailedReward("it raised") if row.answer == "1" else 1.0] * len(completions)

    async def body() -> None:
        play = make(last=3, max_retries=2)
        play.score = score
        trained: list[str] = []
        async with play.executor() as executor:
            for version in range(3):
                trained += [group.prompt_id for group in await executor.prepare_batch()]
                await play.advance(executor, version + 1)
        assert sorted(trained) == [f"0:{i}" for i in (0, 2, 3, 4, 5, 6, 7, 8, 9)]
        why = "2 of 2 samples cannot be trained on; the first: reward failed: it raised"
        again = Settled("0:1", why, "reward failed", drawn_again=True)
        assert play.rejected == [again, again, Settled("0:1", f"{why} (the last of 3 tries)", "reward failed")]

    run(body)


def test_a_workflow_that_lets_a_cancellation_escape_fails_its_group() -> None:
    async def workflow(_: Episode) -> list[Trajectory]:
        inner = asyncio.create_task(asyncio.sleep(10))
        inner.cancel()
        await inner
        return []

    async def body() -> None:
        play = make(max_failures_in_a_row=3)
        play.workflow = workflow
        async with play.executor() as executor:
            with pytest.raises(CodeError, match="let a cancellation of its own escape"):
                await executor.prepare_batch()

    run(body)


def reward_error(*_: object) -> Awaitable[list[float]]:
    raise CodeError("the reward mine:score raised ValueError: no number")


def workflow_error(_: Episode) -> Awaitable[list[Trajectory]]:
    raise KeyError("turns")


def test_failures_in_a_row_stop_the_run_and_tell_whose_they_are() -> None:
    async def stopped(play: Play) -> Exception:
        async with play.executor() as executor:
            with pytest.raises((CodeError, RolloutError)) as caught:
                await executor.prepare_batch()
        assert len(play.rejected) >= 4
        return caught.value

    async def body() -> None:
        theirs = make()
        theirs.score = reward_error
        error = await stopped(theirs)
        assert (type(error), error.exit_code) == (CodeError, 2)
        assert "groups of rollouts failed; the first with CodeError: the reward mine:score raised ValueError" in str(error)
        theirs = make()
        theirs.workflow = workflow_error
        error = await stopped(theirs)
        assert (type(error), error.exit_code) == (CodeError, 2)
        for ours in (EngineError("engine 0 cannot be reached"), DeadlineError("waiting for engine 0 passed its deadline")):
            error = await stopped(make(engine=Engine(error=ours)))
            assert (type(error), error.exit_code) == (RolloutError, 1)
            assert str(ours) in str(error)
            assert error.__cause__ is ours

    run(body)


def test_failures_that_are_not_in_a_row_do_not_stop_the_run() -> None:
    async def body() -> None:
        play = make(running=1, max_retries=0)

        async def score(completions: Sequence[str], row: Row) -> list[float]:
            if int(row.answer) % 4:
                raise CodeError("not this one")
            return [1.0] * len(completions)

        play.score = score
        async with play.executor() as executor:
            for version in range(3):
                assert len(await executor.prepare_batch()) == 3
                await play.advance(executor, version + 1)

    run(body)


def test_a_late_group_is_rejected_with_its_deadline() -> None:
    async def body() -> None:
        play = make(episode_timeout_s=0.2, engine=Engine(slow=frozenset({"0>"})), max_retries=0)
        async with play.executor() as executor:
            await executor.prepare_batch()
            await play.advance(executor, 1)
            await until(lambda: play.rejected)
        (settled,) = play.rejected
        assert (settled.prompt_id, settled.kind) == ("0:0", "timed out")
        assert settled.rejected == "DeadlineError: waiting for group 0:0 passed its deadline of 0.2 s"

    run(body)


def test_the_wait_for_rewards_of_others_is_no_fault_of_a_group() -> None:
    one_at_a_time = asyncio.Semaphore(1)

    async def score(completions: Sequence[str], row: Row) -> list[float]:
        async with one_at_a_time:
            await asyncio.sleep(0.1)
            return [1.0] * len(completions)

    async def body() -> None:
        play = make(episode_timeout_s=0.4, last=2)  # the last of six waits for half a second
        play.score = score
        async with play.executor() as executor:
            for version in range(2):
                await executor.prepare_batch()
                await play.advance(executor, version + 1)
        assert play.rejected == []

    run(body)


def scores(*rewards: float) -> Callable[[Sequence[str], Row], Awaitable[list[float]]]:
    """The reward of prompt 1; every other sample has 1."""
    async def score(completions: Sequence[str], row: Row) -> list[float]:
        return list(rewards) if row.answer == "1" else [1.0] * len(completions)

    return score


def test_samples_whose_reward_failed_are_left_out_and_the_rest_of_their_group_is_trained_on() -> None:
    async def body() -> None:
        play = make(group_size=4, running=3)
        play.score = scores(1.0, FailedReward("it hangs"), float("nan"), 0.0)
        async with play.executor() as executor:
            groups = {group.prompt_id: group for group in await executor.prepare_batch()}
        mixed = groups["0:1"]
        assert len(mixed.trajectories) == 4
        assert [t.reward for t in mixed.usable] == [1.0, 0.0]
        reasons = ["reward failed: it hangs", "reward failed: nan is not a number within ±1e+12"]
        assert play.unusable == [("0:1", reasons)]
        assert play.rejected == []

    run(body)


def test_a_group_with_one_sample_left_is_no_group() -> None:
    async def body() -> None:
        play = make(group_size=4, running=3, max_retries=0)
        play.score = scores(1.0, *[FailedReward("it hangs")] * 3)
        async with play.executor() as executor:
            groups = await executor.prepare_batch()
            assert "0:1" not in [group.prompt_id for group in groups]
        reason = "3 of 4 samples cannot be trained on; the first: reward failed: it hangs"
        assert play.rejected == [Settled("0:1", reason, "reward failed")]

    run(body)


def test_episodes_are_counted_and_not_their_trajectories() -> None:
    async def workflow(episode: Episode) -> list[Trajectory]:
        group = await single_turn(episode)
        pieces = [replace(t, episode=number) for number, t in enumerate(group) for _ in range(3)]
        broken = {"0:1": (1, 2), "0:2": (1, 5)}.get(f"0:{episode.row.answer}", ())
        return [replace(t, reason="too long: 9 tokens") if at in broken else t for at, t in enumerate(pieces)]

    async def body() -> None:
        play = make(group_size=3, running=3, max_retries=0)
        play.workflow = workflow
        async with play.executor() as executor:
            groups = {group.prompt_id: group for group in await executor.prepare_batch()}
            assert "0:2" not in groups
            assert [len(groups["0:1"].usable_episodes), len(groups["0:1"].usable), len(groups["0:1"].trajectories)] == [2, 6, 9]
        assert play.unusable == [("0:1", ["too long: 9 tokens"])]
        assert play.rejected == [Settled("0:2", "2 of 3 samples cannot be trained on; the first: too long: 9 tokens", "too long")]

    run(body)


def test_a_trajectory_that_is_too_long_to_train_on_is_left_out_with_its_reason() -> None:
    async def workflow(episode: Episode) -> list[Trajectory]:
        group = await single_turn(episode)
        longer = replace(group[0], **{name: np.append(getattr(group[0], name), value) for name, value in [
            ("tokens", 5), ("loss_mask", True), ("rollout_logprobs", -0.5), ("versions", 0)]})
        return [longer, *group[1:]] if episode.row.answer == "1" else [longer] * 3 if episode.row.answer == "2" else group

    async def body() -> None:
        play = make(group_size=3, running=3, max_retries=0)
        play.workflow = workflow
        play.checks = TrajectoryChecks(context=3)
        async with play.executor() as executor:
            groups = {group.prompt_id: group for group in await executor.prepare_batch()}
        reason = "too long: a row of 4 tokens exceeds the model's context of 3"
        assert [t.reason for t in groups["0:1"].trajectories] == [reason, "stop", "stop"]
        assert play.rejected == [
            Settled("0:2", f"3 of 3 samples cannot be trained on; the first: {reason}", "too long")]

    run(body)


@pytest.mark.parametrize(("error", "kind"), [
    (EngineError("engine 0 died"), "engine failed"), (DeadlineError("waiting for x"), "timed out"),
    (WorkerError("reward 0 does not start"), "reward failed"), (KeyError("turns"), "code failed"),
    (RefusedError("too many tokens"), "engine failed"), (TooLongError("90 tokens"), "too long")])
def test_a_group_that_failed_is_drawn_again_a_bounded_number_of_times(error: Exception, kind: str) -> None:
    async def play_it(failures: int) -> tuple[Play, list[str]]:
        play, tries = make(max_retries=2, max_failures_in_a_row=99, last=2), Counter[str]()

        async def workflow(episode: Episode) -> list[Trajectory]:
            tries[episode.row.answer] += 1
            if episode.row.answer == "1" and tries["1"] <= failures:
                raise error
            return await single_turn(episode)

        play.workflow = workflow
        trained = []
        async with play.executor() as executor:
            for version in range(2):
                trained += [group.prompt_id for group in await executor.prepare_batch()]
                await play.advance(executor, version + 1)
        return play, trained

    async def body() -> None:
        play, trained = await play_it(failures=2)
        assert sorted(trained) == [f"0:{i}" for i in range(6)]
        told = describe_at(error) if kind == "code failed" else describe(error)
        assert play.rejected == [Settled("0:1", told, kind, drawn_again=True)] * 2
        play, trained = await play_it(failures=3)
        assert sorted(trained) == [f"0:{i}" for i in (0, 2, 3, 4, 5, 6)]
        assert [settled.drawn_again for settled in play.rejected] == [True, True, False]
        assert play.rejected[-1].rejected == f"{told} (the last of 3 tries)"

    run(body)


def test_an_evaluation_plays_again_what_failed_for_a_reason_of_ours_and_counts_a_failed_reward_as_a_failure() -> None:
    tries = Counter[str]()

    async def score(completions: Sequence[str], row: Row) -> list[float]:
        tries[row.answer] += 1
        if (row.answer == "1" and tries["1"] == 1) or row.answer == "2":
            raise EngineError("unlucky")
        return [FailedReward("it hangs") if row.answer == "3" else 1.0]

    async def body() -> None:
        play = make(max_retries=1)
        play.score = score
        groups = await play.executor().rollout_batch(ROWS[:5], group_size=1, sampling=Sampling(4, temperature=0))
        assert [group.rejected for group in groups] == [
            None, None, "EngineError: unlucky", "1 of 1 samples cannot be trained on; the first: reward failed: it hangs", None]
        assert (tries["1"], tries["2"], tries["3"]) == (2, 2, 1)
        assert [t.reason for t in groups[3].trajectories] == ["reward failed: it hangs"], "its answer can be read"

    run(body)


def test_a_wait_without_any_group_has_a_deadline() -> None:
    async def body() -> None:
        play = make(batch_timeout_s=0.05, engine=Engine(slow=frozenset(str(row.prompt) for row in ROWS)))
        async with play.executor() as executor:
            with pytest.raises(DeadlineError, match="no group of rollouts was finished and accepted"):
                await executor.prepare_batch()

    run(body)


def test_no_wake_up_is_lost_after_a_publish() -> None:
    async def body() -> None:
        # At eta = 0 the engines stand still until each publish, so one lost wake-up would hang the run.
        play = make(eta=0, batch=2, running=2)
        async with play.executor() as executor:
            for version in range(200):
                assert len(await executor.prepare_batch()) == 2
                assert executor.in_flight == ()
                await play.advance(executor, version + 1)

    run(body)


def test_nothing_is_drawn_that_no_step_would_train_on() -> None:
    async def body() -> None:
        play = make(eta=3, running=50, last=2)
        async with play.executor() as executor:
            for version in range(2):
                await executor.prepare_batch()
                await play.advance(executor, version + 1)
            assert executor.in_flight == ()
        assert play.stream.state().position == 6

    run(body)


@pytest.mark.parametrize("seed", range(20))
def test_every_drawn_prompt_is_trained_rejected_or_in_flight(seed: int) -> None:
    chance = random.Random(seed)

    async def body() -> None:
        eta, batch = chance.randrange(3), chance.randrange(1, 5)
        play = make(
            eta=eta, batch=batch, running=chance.randrange(1, 12), on_stale=chance.choice(["wait", "requeue", "keep"]),
            engine=Engine(seed=seed), rows=tuple(Row(f"{i}>", str(i)) for i in range(2000)), max_failures_in_a_row=1000)
        fate = {str(i): chance.random() for i in range(2000)}

        async def score(completions: Sequence[str], row: Row) -> list[float]:
            if fate[row.answer] < 0.1:
                raise EngineError("unlucky")
            if 0.1 <= fate[row.answer] < 0.2:
                await asyncio.sleep(0.003)
            return [1.0] * len(completions)

        play.score = score
        play.accept = lambda group: fate[group.prompt_id.split(":")[1]] < 0.9
        trained: list[str] = []

        def check(executor: RolloutExecutor, training: list[str]) -> None:
            state = play.stream.state()
            drawn = {f"0:{i}" for i in range(state.position)}
            rejected = [s.prompt_id for s in play.rejected if not s.drawn_again]
            settled = [*trained, *rejected, *executor.in_flight, *training, *state.returned]
            assert sorted(settled) == sorted(drawn)

        async with play.executor() as executor:
            for version in range(12):
                groups = await executor.prepare_batch()
                check(executor, [group.prompt_id for group in groups])
                await asyncio.sleep(0)
                trained += [group.prompt_id for group in groups]
                await play.advance(executor, version + 1)
                check(executor, [])

    run(body)


def test_leaving_cancels_what_runs() -> None:
    async def body() -> None:
        play = make(engine=Engine(slow=frozenset(str(row.prompt) for row in ROWS)))
        async with play.executor():
            await until(lambda: play.engine.running == 6)
        assert play.engine.running == 0

    run(body)


def test_a_given_batch_is_played_past_the_gate_in_order_with_failures_as_data() -> None:
    async def score(completions: Sequence[str], row: Row) -> list[float]:
        if row.answer == "4":
            raise CodeError("not this one")
        return [float(row.answer)] * len(completions)

    async def body() -> None:
        play = make(last=0, running=3)
        play.score = score
        groups = await play.executor().rollout_batch(ROWS[:10], group_size=1, sampling=Sampling(4, temperature=0))
        assert [group.trajectories[0].reward if group.trajectories else None for group in groups] == [0, 1, 2, 3, None, 5, 6, 7, 8, 9]
        assert groups[4].rejected == "CodeError: not this one"
        assert play.engine.most_running <= 3
        assert play.stream.state().position == 0

    run(body)


def test_thousands_of_episodes_may_wait_for_their_environments_at_the_same_time() -> None:
    waiting = most = 0

    async def patient(episode: Episode) -> list[Trajectory]:
        nonlocal waiting, most

        async def play() -> None:
            nonlocal waiting, most
            waiting += 1
            most = max(most, waiting)
            await asyncio.sleep(1.0)
            waiting -= 1

        async with asyncio.TaskGroup() as tasks:
            for _ in range(episode.group_size):
                tasks.create_task(play())
        return await single_turn(episode)

    async def body() -> None:
        play = make(batch=500, running=500, eta=0, group_size=4, rows=tuple(Row(f"{i}>", str(i)) for i in range(600)))
        play.workflow = patient
        start = time.monotonic()
        async with play.executor() as executor:
            assert len(await executor.prepare_batch()) == 500
        assert most == 2000 and time.monotonic() - start < 20

    run(body)


def test_a_workflow_that_panics_fails_its_own_group() -> None:
    async def panics(episode: Episode) -> Sequence[Trajectory]:
        if episode.row.prompt == "0>":
            raise Panic("out of range")
        return await single_turn(episode)

    async def body() -> None:
        play = make(max_retries=0)
        play.workflow = panics
        async with play.executor() as executor:
            await executor.prepare_batch()
        (settled,) = play.rejected
        assert settled.prompt_id == "0:0" and "Panic: out of range at" in settled.rejected

    run(body)


@pytest.mark.parametrize("leaves", [False, True])
def test_a_workflow_that_swallows_its_cancellation_is_named_and_left_behind(leaves: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(player, "UNWIND_S", 0.1)
    going = True

    async def retries(episode: Episode) -> Sequence[Trajectory]:
        while going and (leaves or episode.row.prompt == "0>"):
            with suppress(BaseException):
                await asyncio.sleep(60)
        return await single_turn(episode)

    async def body() -> None:
        nonlocal going
        play = make(max_retries=0, episode_timeout_s=60.0 if leaves else 0.2)
        play.workflow = retries
        async with asyncio.timeout(10):
            async with play.executor():
                await (asyncio.sleep(0.1) if leaves else until(lambda: bool(play.rejected)))
        place = f"{Path(__file__).relative_to(Path.cwd())}, line {retries.__code__.co_firstlineno + 3}"
        assert any(f"was cancelled and goes on, a task at {place}" in warning for warning in play.warnings)
        assert leaves or "passed its deadline of 0.2 s" in play.rejected[0].rejected
        going = False
        left = {task for task in asyncio.all_tasks() if task.get_coro().__qualname__.startswith("GroupPlayer")}
        for task in left:
            task.cancel()
        await asyncio.wait(left)

    run(body)


def test_a_workflow_that_changes_the_working_directory_is_told_and_it_is_changed_back(tmp_path: Path) -> None:
    here = Path.cwd()

    async def moves(episode: Episode) -> Sequence[Trajectory]:
        os.chdir(tmp_path)
        return await single_turn(episode)

    async def body() -> None:
        play = make()
        play.workflow = moves
        async with play.executor() as executor:
            await executor.prepare_batch()
            assert Path.cwd() == here
        assert "has changed the working directory, which is the run's, too, so it was changed back" in play.warnings[0]

    try:
        run(body)
    finally:
        os.chdir(here)
