"""Requests for samples: fair, bounded, carried out once, and ended with an outcome; and what engines say in the service's terms."""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from offbeat.errors import EngineError, RefusedError
from offbeat.inference.sampling import Draws, PromptScore, Sample
from offbeat.inference.sampling import Sampling as EngineSampling
from offbeat.service.checkpoints import CheckpointError
from offbeat.service.errors import FailedError, LostError, OverLimitError, RequestError, TooLargeError, UnknownError
from offbeat.service.futures import Futures
from offbeat.service.ids import sample_request
from offbeat.service.limits import Limits, Usage
from offbeat.service.results import Results
from offbeat.service.samplers import Samplers
from offbeat.service.sampling import SamplingService
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
    num_scored: int = 0
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
        self.num_scored += 1
        drawn = ((), ((4, -3.0),), ((5, -2.5),)) if draws else ()
        return PromptScore((NAN, -1.0, -2.0), Version(0), draws=drawn)


@dataclass
class Setting:
    """What a test's body is given."""

    world: World
    engines: Engines
    sampling: SamplingService
    futures: Futures
    usage: Usage
    ended: dict[int, Outcome] = field(default_factory=dict)

    async def outcome(self, request_id: str, owner: str = "alice") -> Outcome:
        """The outcome of a request, once it has ended."""
        answer = await self.futures.retrieve(request_id, owner, timeout_s=10)
        assert isinstance(answer, Payload)
        return self.ended[int(answer.data)]


def run(tmp_path: Path, body: Callable[[Setting], Awaitable[None]], *, max_in_flight: int = 32, max_queued_tokens: int = 10_000) -> None:
    async def main(store: Store) -> None:
        ended: dict[int, Outcome] = {}

        def encode(outcome: Outcome) -> Payload:
            ended[len(ended)] = outcome
            return Payload("text/plain", str(len(ended) - 1).encode())

        world, engines = World(), Engines()
        usage = Usage(lambda _: Limits(max_queued_tokens=max_queued_tokens))
        futures = Futures(store, Results(tmp_path / "results"), encode=encode, owner_of=lambda _: "alice", usage=usage)
        rows = [SamplerRow(f"{SESSION}:sample:{seq}", SESSION, owner, "base") for seq, owner in enumerate(("alice", "bob"))]
        samplers = Samplers(
            rows, engines=world, base_models=world.base_models, store=store, usage=usage, sessions=world, checkpoints=world, timeout_s=60.0)
        sampling = SamplingService(samplers, engines=engines, futures=futures, usage=usage, max_in_flight=max_in_flight)
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


BOBS = replace(REQUEST, sampling_session_id=f"{SESSION}:sample:1")


def test_owners_take_turns_by_tokens_and_samples_in_flight_are_bounded(tmp_path: Path) -> None:
    async def body(setting: Setting) -> None:
        sampling, engines = setting.sampling, setting.engines
        flood = [sampling.sample(ALICE, replace(REQUEST, seq_id=i, num_samples=2)) for i in range(20)]
        await until(lambda: engines.running == 8)
        late = [sampling.sample(BOB, replace(BOBS, seq_id=i, num_samples=2)) for i in range(5)]
        await until(lambda: engines.running == 12)
        assert [session[-1] for *_, session in engines.asked] == ["0"] * 4 + ["1"] * 2, "who comes late gets a share at once"
        waiting = await setting.futures.retrieve(late[2], "bob", timeout_s=0)
        assert isinstance(waiting, Pending) and waiting.queue_state == "paused_capacity" and "wait" in waiting.reason
        engines.gate.set()
        for request_id in flood:
            await setting.outcome(request_id)
        for request_id in late:
            await setting.outcome(request_id, "bob")
        order = [session[-1] for *_, session in engines.asked]
        assert engines.most == 12 and "".join(order[6:14]).count("1") == 3, "and then they take turns"

    run(tmp_path, body, max_in_flight=8)


def test_a_request_for_many_samples_is_cut_and_its_samples_are_those_of_the_whole(tmp_path: Path) -> None:
    async def body(setting: Setting) -> None:
        engines = setting.engines
        request_id = setting.sampling.sample(ALICE, replace(REQUEST, num_samples=70, seed=5, prompt_logprobs=True))
        engines.gate.set()
        outcome = await setting.outcome(request_id)
        assert isinstance(outcome, Sampled) and len(outcome.sequences) == 70 and outcome.prompt_logprobs is not None
        asked = sorted((n, sampling.first_sample, sampling.seed) for _, sampling, n, _ in engines.asked)
        assert asked == [(6, 64, 5), (32, 0, 5), (32, 32, 5)]
        assert engines.num_scored == 1

    run(tmp_path, body, max_in_flight=128)


def test_one_token_of_a_neighbour_waits_for_none_of_512_samples(tmp_path: Path) -> None:
    async def body(setting: Setting) -> None:
        setting.sampling.sample(ALICE, replace(REQUEST, num_samples=512))
        await until(lambda: setting.engines.running == 256)
        setting.sampling.sample(BOB, BOBS)
        await until(lambda: setting.engines.running == 257)
        assert [n for _, _, n, session in setting.engines.asked if session == BOBS.sampling_session_id] == [1]

    run(tmp_path, body, max_in_flight=256)


def test_who_is_not_alone_of_late_cannot_fill_the_engines(tmp_path: Path) -> None:
    async def body(setting: Setting) -> None:
        setting.engines.gate.set()
        await setting.outcome(setting.sampling.sample(BOB, BOBS), "bob")
        setting.engines.gate.clear()
        setting.sampling.sample(ALICE, replace(REQUEST, num_samples=512))
        await until(lambda: setting.engines.running == 128)
        for _ in range(20):
            await asyncio.sleep(0)
        assert setting.engines.running == 128, "half, though nobody else has samples in flight"

    run(tmp_path, body, max_in_flight=256)


def test_a_request_whose_part_fails_ends_once_and_asks_for_no_more(tmp_path: Path) -> None:
    async def body(setting: Setting) -> None:
        setting.engines.error = EngineError("it died")
        request_id = setting.sampling.sample(ALICE, replace(REQUEST, num_samples=512))
        await until(lambda: setting.engines.running == 128)
        setting.engines.gate.set()
        outcome = await setting.outcome(request_id)
        assert isinstance(outcome, Failed) and outcome.category == "server"
        await until(lambda: not setting.sampling._tasks)
        assert len(setting.engines.asked) == 4 and len(setting.sampling.failures) == 1
        use = setting.usage.of("alice")
        assert (use.queued_tokens, use.queued_bytes, setting.sampling.standing().jobs) == (0, 0, 0)

    run(tmp_path, body, max_in_flight=128)


def test_samples_with_many_likely_tokens_are_bounded_by_memory(tmp_path: Path) -> None:
    async def body(setting: Setting) -> None:
        setting.engines.context = 4096
        heavy = replace(REQUEST, topk_sample_logprobs=256, max_tokens=64, num_samples=16)  # 6.5 MB each, as two of ordinary length
        setting.sampling.sample(ALICE, heavy)
        await until(lambda: setting.engines.running)
        assert setting.engines.running == 4, "not eight"
        assert setting.usage.of("alice").queued_tokens == 16 * 64 * 64
        assert setting.usage.of("alice").queued_bytes > 16 * 64 * 256 * 8
        with pytest.raises(TooLargeError, match=r"a single sample of this request may take \d+ bytes .* lower max_tokens or topk"):
            setting.sampling.sample(ALICE, replace(heavy, seq_id=1, max_tokens=4000, num_samples=1))
        with pytest.raises(TooLargeError, match="costs 1048576 tokens"):
            setting.sampling.sample(ALICE, replace(heavy, seq_id=2, num_samples=256))

    run(tmp_path, body, max_in_flight=8, max_queued_tokens=2**20 - 1)


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


def refusal(message: str, said: str) -> RefusedError:
    """As the engines' client raises it."""
    error = RefusedError(message)
    error.said = said
    return error


@pytest.mark.parametrize(("error", "message"), [
    (refusal("engine 0 answered /v1/completions with 400: n must be at most 512", "n must be at most 512"), "n must be at most 512"),
    (refusal("engine 0 answered /v1/load_lora_adapter with 400: /srv/a is damaged", "/srv/a is damaged"), "the server cannot do this; its"),
    (EngineError("no engine can serve: engine 0 (http://127.0.0.1:1) cannot be reached"), "the engines could not do this, and the"),
    (CheckpointError("the checkpoint folder abc is damaged; use another one"), "the checkpoint folder abc is damaged; use another one")])
def test_clients_hear_what_is_wrong_and_nothing_of_engines_and_folders(tmp_path: Path, error: Exception, message: str) -> None:
    async def body(setting: Setting) -> None:
        setting.engines.error = error
        setting.engines.gate.set()
        outcome = await setting.outcome(setting.sampling.sample(ALICE, REQUEST))
        assert isinstance(outcome, Failed) and outcome.message.startswith(message)
        assert "engine 0" not in outcome.message and "/srv" not in outcome.message and "127.0.0.1" not in outcome.message

    run(tmp_path, body)


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
        ids = [setting.sampling.sample(ALICE, replace(REQUEST, seq_id=i, num_samples=8)) for i in range(6)]
        await until(lambda: setting.engines.asked)
        await setting.sampling.close()
        assert len(setting.engines.asked) == 4 and not setting.ended
        assert all([isinstance(await setting.futures.retrieve(i, "alice", timeout_s=0), Pending) for i in ids])

    run(tmp_path, body)


@pytest.mark.parametrize(("asked", "room"), [(None, 13), (4, 4), (500, 13)])
def test_samples_go_on_to_the_end_of_the_context_at_most(tmp_path: Path, asked: int | None, room: int) -> None:
    async def body(setting: Setting) -> None:
        setting.engines.gate.set()
        await setting.outcome(setting.sampling.sample(ALICE, replace(REQUEST, max_tokens=asked)))
        assert setting.engines.asked[0][1].max_new_tokens == room
        assert setting.engines.asked[0][1].stop_token_ids == (2, 9), "the model's end tokens, whatever the engine takes for the end"

    run(tmp_path, body)


def test_who_asks_is_given_the_samples_or_why_there_are_none(tmp_path: Path) -> None:
    async def body(setting: Setting) -> None:
        setting.engines.gate.set()
        sampled = await setting.sampling.ask(ALICE, replace(REQUEST, num_samples=2))
        assert [sequence.tokens.tolist() for sequence in sampled.sequences] == [[5, 6, 7]] * 2
        assert setting.usage.of("alice").disk_bytes == 0  # nobody else can fetch them, so they are not kept
        with pytest.raises(LostError):
            await setting.outcome(sample_request(REQUEST.sampling_session_id, REQUEST.seq_id))
        setting.engines.error = RefusedError("n must be at most 512")
        with pytest.raises(RequestError, match="n must be at most 512"):
            await setting.sampling.ask(ALICE, replace(REQUEST, seq_id=1))
        setting.engines.error = EngineError("it died")
        with pytest.raises(FailedError, match="the engines could not do this"):
            await setting.sampling.ask(ALICE, replace(REQUEST, seq_id=2))
        with pytest.raises(UnknownError, match="there is no sampler"):
            setting.sampling.ask(BOB, REQUEST)

    run(tmp_path, body)


def test_a_request_that_nobody_waits_for_any_more_frees_what_it_holds(tmp_path: Path) -> None:
    async def body(setting: Setting) -> None:
        sampling, engines = setting.sampling, setting.engines
        runs = sampling.ask(ALICE, replace(REQUEST, num_samples=20))  # in parts of 2, of which 4 run
        await until(lambda: engines.running == 8)
        waits = sampling.ask(ALICE, replace(REQUEST, seq_id=1))
        assert sampling.standing().jobs == 2
        for task in (waits, runs):
            task.cancel()
        await asyncio.wait({runs, waits})
        await until(lambda: not sampling.standing().jobs and not len(setting.futures))
        assert runs.cancelled() and waits.cancelled() and not sampling._tasks and not sampling._in_flight and not len(sampling._queue)
        assert (setting.usage.of("alice").queued_tokens, list(sampling.failures), len(engines.asked)) == (0, [], 4)
        engines.gate.set()
        assert len((await sampling.ask(ALICE, replace(REQUEST, seq_id=2))).sequences) == 1

    run(tmp_path, body, max_in_flight=8)


def test_a_part_that_waits_for_weights_when_its_client_goes_is_never_sampled(tmp_path: Path) -> None:
    async def body(setting: Setting) -> None:
        sampling = setting.sampling
        named = await sampling.samplers.create(ALICE, session_id=SESSION, seq=5, base_model=None, model_path=PATH)
        checkpoints = dict(setting.world.checkpoints)
        setting.world.checkpoints.clear()
        await sampling.samplers.sweep()  # engines let the weights go
        setting.world.checkpoints |= checkpoints
        reads = setting.world.reads
        asked = sampling.ask(ALICE, replace(REQUEST, sampling_session_id=named))
        for _ in range(5):
            await asyncio.sleep(0)
        assert setting.world.reads > reads and not setting.world.pinned, "the weights are being read"
        asked.cancel()
        await until(lambda: not sampling.standing().jobs)
        assert not setting.engines.asked and setting.world.pinned

    run(tmp_path, body)
