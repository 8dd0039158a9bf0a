"""Requests for samples: fair, bounded, carried out once, and ended with an outcome; and what engines say in the service's terms."""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest

from offbeat.errors import EngineError, RefusedError
from offbeat.inference.sampling import Draws, PromptScore, Sample
from offbeat.inference.sampling import Sampling as EngineSampling
from offbeat.service.errors import OverLimitError, UnknownError
from offbeat.service.futures import Futures
from offbeat.service.limits import Limits, Usage
from offbeat.service.results import Results
from offbeat.service.samplers import Samplers
from offbeat.service.sampling import Sampling, draws_of, engine_sampling, sampled
from offbeat.service.store import Store
from offbeat.service.tables import SamplerRow
from offbeat.service.types import Failed, Outcome, Payload, Pending, Sampled, SampleRequest
from offbeat.telemetry.log import current_request
from offbeat.types import Version
from sampler_world import ALICE, BOB, PATH, SESSION, World
from waiting import until

NAN = math.nan
REQUEST = SampleRequest(f"{SESSION}:sample:0", 0, prompt=(5, 6, 7), max_tokens=4)


@dataclass
class Engines:
    """Answers each sample with its prompt once `gate` is open, and remembers in which order it was asked."""

    context: int = 16
    end_token_ids: tuple[int, ...] = (2, 9)
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    asked: list[tuple[str, EngineSampling, int, str]] = field(default_factory=list)
    running: int = 0
    most: int = 0
    error: Exception | None = None

    async def sample(self, adapter: str, prompt: tuple[int, ...], sampling: EngineSampling, n: int, session: str) -> list[Sample]:
        self.asked.append((adapter, sampling, n, session))
        self.running += n
        self.most = max(self.most, self.running)
        await self.gate.wait()
        self.running -= n
        if self.error is not None:
            raise self.error
        return [Sample(prompt, (-0.5,) * len(prompt), (Version(0),) * len(prompt), "", "length")] * n

    async def score(
        self, adapter: str, tokens: tuple[int, ...], top_k: int, targets: tuple[tuple[int, ...], ...] | None, draws: Draws | None,
    ) -> PromptScore:
        drawn = ((), ((4, -3.0),), ((5, -2.5),)) if draws else ()
        return PromptScore((NAN, -1.0, -2.0), Version(0), draws=drawn)


@dataclass
class Setting:
    """What a test's body is given."""

    world: World
    engines: Engines
    sampling: Sampling
    futures: Futures
    usage: Usage
    ended: dict[int, Outcome] = field(default_factory=dict)

    async def outcome(self, request_id: str, owner: str = "alice") -> Outcome:
        """The outcome of a request, once it has ended."""
        answer = await self.futures.retrieve(request_id, owner, timeout_s=10)
        assert isinstance(answer, Payload)
        return self.ended[int(answer.data)]


def run(tmp_path: Path, body: Callable[[Setting], Awaitable[None]], *, max_in_flight: int = 8, max_queued_tokens: int = 10_000) -> None:
    async def main(store: Store) -> None:
        ended: dict[int, Outcome] = {}

        def encode(outcome: Outcome) -> Payload:
            ended[len(ended)] = outcome
            return Payload("text/plain", str(len(ended) - 1).encode())

        world, engines = World(), Engines()
        usage = Usage(lambda _: Limits(max_queued_tokens=max_queued_tokens))
        futures = Futures(store, Results(tmp_path / "results"), encode=encode, owner_of=lambda _: "alice")
        rows = [SamplerRow(f"{SESSION}:sample:{seq}", SESSION, owner, "base") for seq, owner in enumerate(("alice", "bob"))]
        samplers = Samplers(rows, engines=world, store=store, usage=usage, sessions=world, checkpoints=world, timeout_s=60.0)
        sampling = Sampling(samplers, engines=engines, futures=futures, usage=usage, max_in_flight=max_in_flight)
        try:
            await body(Setting(world, engines, sampling, futures, usage, ended))
        finally:
            await sampling.close()

    with closing(Store.open(f"sqlite:///{tmp_path / 'db'}")) as store:
        asyncio.run(main(store))


def test_a_request_that_is_sent_again_is_sampled_once_and_belongs_to_its_owner(tmp_path: Path) -> None:
    async def body(setting: Setting) -> None:
        sampling = setting.sampling
        first = sampling.sample(ALICE, replace(REQUEST, seq_id=10**17, num_samples=3))
        assert first == f"{SESSION}:sample:0:{10**17}"
        assert sampling.sample(ALICE, replace(REQUEST, seq_id=10**17, num_samples=3)) == first
        assert setting.usage.of("alice").queued_tokens == 3 + 3 * 4 == sampling.standing().tokens
        with pytest.raises(UnknownError, match="there is no sampler"):
            sampling.sample(BOB, REQUEST)
        setting.engines.gate.set()
        outcome = await setting.outcome(first)
        assert isinstance(outcome, Sampled) and len(outcome.sequences) == 3 and len(setting.engines.asked) == 1
        assert sampling.sample(ALICE, replace(REQUEST, seq_id=10**17)) == first, "also once it has ended"
        assert (setting.usage.of("alice").queued_tokens, sampling.standing().jobs) == (0, 0) and len(setting.engines.asked) == 1

    run(tmp_path, body)


def test_owners_take_turns_by_tokens_and_samples_in_flight_are_bounded(tmp_path: Path) -> None:
    async def body(setting: Setting) -> None:
        sampling, engines = setting.sampling, setting.engines
        flood = [sampling.sample(ALICE, replace(REQUEST, seq_id=i, num_samples=2)) for i in range(20)]
        bobs = replace(REQUEST, sampling_session_id=f"{SESSION}:sample:1", num_samples=2)
        late = [sampling.sample(BOB, replace(bobs, seq_id=i)) for i in range(5)]
        waiting = await setting.futures.retrieve(late[0], "bob", timeout_s=0)
        assert isinstance(waiting, Pending) and waiting.queue_state == "paused_capacity" and "wait" in waiting.reason
        engines.gate.set()
        for request_id in flood:
            await setting.outcome(request_id)
        for request_id in late:
            await setting.outcome(request_id, "bob")
        order = [session[-1] for *_, session in engines.asked]
        assert engines.most == 8 and order.index("1") == 4, "eight were in flight before bob came"
        assert sum(owner == "1" for owner in order[4:14]) == 5, "then they take turns"

    run(tmp_path, body)


def test_an_owner_with_too_much_under_way_is_put_off_and_others_are_not(tmp_path: Path) -> None:
    async def body(setting: Setting) -> None:
        sampling = setting.sampling
        sampling.sample(ALICE, REQUEST)
        with pytest.raises(OverLimitError, match="may have 10"):
            sampling.sample(ALICE, replace(REQUEST, seq_id=1))
        sampling.sample(BOB, replace(REQUEST, sampling_session_id=f"{SESSION}:sample:1"))
        setting.engines.gate.set()
        await setting.outcome(f"{SESSION}:sample:0:0")
        again = sampling.sample(ALICE, replace(REQUEST, seq_id=1))
        assert isinstance(await setting.outcome(again), Sampled)

    run(tmp_path, body, max_queued_tokens=10)


@pytest.mark.parametrize(("error", "category"), [
    (RefusedError("the engine cannot do that"), "user"), (EngineError("no engine can serve"), "server"), (KeyError("bug"), "server")])
def test_whatever_goes_wrong_is_an_outcome(tmp_path: Path, error: Exception, category: str) -> None:
    async def body(setting: Setting) -> None:
        setting.engines.error = error
        setting.engines.gate.set()
        outcome = await setting.outcome(setting.sampling.sample(ALICE, replace(REQUEST, prompt_logprobs=True)))
        assert isinstance(outcome, Failed) and outcome.category == category and "'bug'" not in outcome.message
        assert setting.usage.of("alice").queued_tokens == 0

    run(tmp_path, body)


def test_a_prompt_without_room_and_a_deleted_checkpoint_are_the_users_errors(tmp_path: Path) -> None:
    async def body(setting: Setting) -> None:
        setting.engines.gate.set()
        full = await setting.outcome(setting.sampling.sample(ALICE, replace(REQUEST, prompt=(1,) * 16)))
        assert full == Failed("the prompt has 16 tokens, which leaves no room in the model's context of 16; shorten it", "user")
        named = await setting.sampling.samplers.create(ALICE, session_id=SESSION, seq=5, base_model=None, model_path=PATH)
        assert isinstance(await setting.outcome(setting.sampling.sample(ALICE, replace(REQUEST, sampling_session_id=named))), Sampled)
        assert setting.engines.asked[-1][0] == "t.folder-one@3"
        setting.world.checkpoints.clear()
        gone = await setting.outcome(setting.sampling.sample(ALICE, replace(REQUEST, sampling_session_id=named, seq_id=1)))
        assert isinstance(gone, Failed) and gone.category == "user" and "was deleted" in gone.message
        assert [failure.request_id for failure in setting.sampling.failures] == [f"{named}:1", f"{SESSION}:sample:0:0"]

    run(tmp_path, body)


def test_log_lines_carry_the_id_of_the_call_that_asked_and_of_no_other(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    seen: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            seen.append(f"{current_request.get()} {record.getMessage()}")

    async def body(setting: Setting) -> None:
        setting.engines.error = RefusedError("no")
        for seq in range(3):
            current_request.set(f"call-{seq}")
            setting.sampling.sample(ALICE, replace(REQUEST, seq_id=seq, num_samples=8))
        current_request.set("another")
        setting.engines.gate.set()
        await setting.outcome(f"{SESSION}:sample:0:2")

    logger, listener = logging.getLogger("offbeat.service.sampling"), Listener()
    caplog.set_level(logging.INFO)
    logger.addHandler(listener)
    run(tmp_path, body)
    logger.removeHandler(listener)
    assert seen == [f"call-{seq} {SESSION}:sample:0:{seq} is refused: no" for seq in range(3)]


def test_what_has_not_ended_when_the_server_ends_is_dropped_and_starts_nothing(tmp_path: Path) -> None:
    async def body(setting: Setting) -> None:
        ids = [setting.sampling.sample(ALICE, replace(REQUEST, seq_id=i, num_samples=8)) for i in range(3)]
        await until(lambda: setting.engines.asked)
        await setting.sampling.close()
        assert len(setting.engines.asked) == 1 and not setting.ended
        assert all([isinstance(await setting.futures.retrieve(i, "alice", timeout_s=0), Pending) for i in ids])

    run(tmp_path, body)


@pytest.mark.parametrize(("stop", "expected"), [
    (None, ((), (2, 9), False)), ((), ((), (), True)), (("a", "b"), (("a", "b"), (2, 9), False)), ((7, 9), ((), (2, 9, 7), False))])
def test_stop_rules_reach_engines_as_they_are_meant(stop: tuple | None, expected: tuple) -> None:
    request = replace(REQUEST, stop=stop, seed=3, temperature=0.5, top_k=4, top_p=0.9, topk_sample_logprobs=2)
    sampling = engine_sampling(request, 9, end_token_ids=(2, 9))
    assert (sampling.stop, sampling.stop_token_ids, sampling.ignore_eos) == expected
    assert sampling == replace(
        EngineSampling(9, temperature=0.5, top_p=0.9, top_k=4, seed=3, scaled_logprobs=True, top_logprobs=2), stop=sampling.stop,
        stop_token_ids=sampling.stop_token_ids, ignore_eos=sampling.ignore_eos)


@pytest.mark.parametrize(("asked", "room"), [(None, 13), (4, 4), (500, 13)])
def test_samples_go_on_to_the_end_of_the_context_at_most(tmp_path: Path, asked: int | None, room: int) -> None:
    async def body(setting: Setting) -> None:
        setting.engines.gate.set()
        await setting.outcome(setting.sampling.sample(ALICE, replace(REQUEST, max_tokens=asked)))
        assert setting.engines.asked[0][1].max_new_tokens == room
        assert setting.engines.asked[0][1].stop_token_ids == (2, 9), "the model's end tokens, whatever the engine takes for the end"

    run(tmp_path, body)


SCORE = PromptScore(
    (NAN, -1.0, -2.0), Version(0), top=((), ((6, -1.0), (9, -1.5)), ((7, -2.0),)), target_logprobs=((), (-3.0,), (-4.0, -5.0)))


def test_scores_of_a_prompt_are_laid_out_as_they_were_asked_for() -> None:
    targets = np.array([[-1, -1], [8, -1], [3, 4]])
    request = replace(
        REQUEST, prompt_logprobs=True, topk_prompt_logprobs=2, target_prompt_logprobs=targets, topk_sample_logprobs=3)
    top = (((5, -0.1), (6, -0.2), (7, -0.3)), ((5, -0.1),))
    answer = sampled(request, [Sample((5, 6), (-0.1, -0.2), (0, 0), "", "stop", top_logprobs=top)], SCORE)
    assert answer.prompt_logprobs is not None and answer.topk_prompt is not None
    np.testing.assert_array_equal(answer.prompt_logprobs, np.array([NAN, -1, -2], np.float32))
    np.testing.assert_array_equal(answer.topk_prompt.ids, [[-1, -1], [6, 9], [7, -1]])
    np.testing.assert_array_equal(answer.topk_prompt.logprobs, [[0, 0], [-1, -1.5], [-2, 0]])
    np.testing.assert_array_equal(answer.target_prompt_logprobs, [[0, 0], [-3, 0], [-4, -5]])  # type: ignore[arg-type]
    (sequence,) = answer.sequences
    assert sequence.stop_reason == "stop" and sequence.top is not None and sequence.tokens.dtype == np.int32
    np.testing.assert_array_equal(sequence.top.ids, [[5, 6, 7], [5, -1, -1]])


def test_only_the_last_positions_of_a_prompt_are_scored_if_that_is_asked() -> None:
    answer = sampled(replace(REQUEST, prompt_logprobs=True, topk_prompt_logprobs=1, prompt_logprobs_last_n=1), [], SCORE)
    assert answer.prompt_logprobs is not None and answer.topk_prompt is not None
    np.testing.assert_array_equal(answer.prompt_logprobs, np.array([NAN, NAN, -2], np.float32))
    np.testing.assert_array_equal(answer.topk_prompt.ids, [[-1], [-1], [7]])


def test_nothing_can_be_said_of_a_prompt_of_one_token() -> None:
    targets = np.full((1, 2), -1)
    answer = sampled(
        replace(REQUEST, prompt=(5,), prompt_logprobs=True, topk_prompt_logprobs=2, target_prompt_logprobs=targets), [], None)
    assert answer.prompt_logprobs is not None and answer.topk_prompt is not None
    assert np.isnan(answer.prompt_logprobs).tolist() == [True] and answer.topk_prompt.ids.tolist() == [[-1, -1]]
    assert answer.target_prompt_logprobs is not None and answer.target_prompt_logprobs.tolist() == [[0.0, 0.0]]


def test_alternatives_to_the_tokens_of_a_prompt_are_drawn_at_the_temperature_and_by_the_seed_of_the_call() -> None:
    request = replace(REQUEST, prompt_alt_tokens_k=1, temperature=0.7, seed=-5)
    assert draws_of(request) == Draws(1, 0.7, -5) and draws_of(REQUEST) is None
    assert draws_of(replace(request, seed=None)) != draws_of(replace(request, seed=None))
    score = PromptScore((NAN, -1.0, -2.0), Version(0), draws=((), ((4, -3.0),), ((5, -2.5),)))
    alt = sampled(request, [], score).prompt_alt
    assert alt is not None and alt.ids.tolist() == [[-1], [4], [5]] and alt.logprobs.tolist() == [[0.0], [-3.0], [-2.5]]
    single = sampled(replace(request, prompt=(5,)), [], None).prompt_alt
    assert single is not None and single.ids.tolist() == [[-1]]
