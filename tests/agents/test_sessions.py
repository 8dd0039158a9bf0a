"""Sessions: who records where, and calls that are repeated, given up or late, in any order."""

import asyncio
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chats import CHATML, words
from offbeat.agents import sessions
from offbeat.agents.recorder import Recorder
from offbeat.agents.sessions import Attempt, ProxySessions, SealedError, Session, SharedCall, UnknownKeyError
from offbeat.chat.messages import ChatRequest, Message
from offbeat.chat.parsing import AnswerParser
from offbeat.chat.rendering import Renderer
from offbeat.errors import EngineError, RefusedError
from offbeat.inference.sampling import Sample, Sampling

RENDERER = Renderer(words(CHATML))
PARSER = AnswerParser(RENDERER)
REQUEST = ChatRequest((Message("user", "hello"),))
ATTEMPT = Attempt(b"1")


def recorder() -> Recorder:
    return Recorder(RENDERER, PARSER, sampling=Sampling(max_new_tokens=64))


class Engine:
    """Answers when it is told to. Each log-probability is used once, so that it identifies its answer."""

    def __init__(self) -> None:
        self.waiting: list[asyncio.Future[str]] = []
        self.num_samples = 0

    async def __call__(self, prompt: tuple[int, ...], sampling: Sampling, *, n: int, session: str = "") -> list[Sample]:
        future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.waiting.append(future)
        ids = tuple(RENDERER.tokenizer.encode(await future + "<|im_end|>"))
        self.num_samples += 1
        return [Sample(ids, (-self.num_samples / 1024,) * len(ids), (0,) * len(ids), "", "stop")]


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def answered(session: Session, engine: Engine, attempt: Attempt = ATTEMPT) -> SharedCall:
    """Play a call that its client reads."""
    call = session.enter(REQUEST, attempt)
    await settle()
    if engine.waiting:
        engine.waiting.pop().set_result("ok")
    await call.task
    session.mark_read(call)
    session.leave(call)
    return call


def logprobs(trajectories) -> Counter:
    """Count what is trained, by the log-probability that all tokens of an answer share."""
    found: Counter = Counter()
    for trajectory in trajectories:
        edges = np.flatnonzero(np.diff([0, *trajectory.loss_mask.astype(int), 0])).reshape(-1, 2)
        found.update(float(trajectory.rollout_logprobs[start]) for start, _ in edges)
    return found


def running(body, **options) -> None:
    async def main() -> None:
        engine, opened = Engine(), ProxySessions(**options)
        await body(opened, opened.open(recorder(), engine), engine)
        opened.close_all()

    asyncio.run(main())


class Program:
    """Calls from several places at once, gives up, tries again, and remembers what it has read."""

    def __init__(self, draw, session: Session, engine: Engine) -> None:
        self.draw, self.session, self.engine = draw, session, engine
        self.open: list[tuple[SharedCall, ChatRequest, Attempt]] = []
        self.given_up: list[tuple[ChatRequest, Attempt]] = []
        self.chats: list[tuple[Message, ...]] = [REQUEST.messages]
        self.has_read: set[float] = set()

    async def step(self) -> None:
        what = self.draw(st.sampled_from(["call", "call", "answer", "answer", "read", "read", "give_up", "again", "fail"]))
        getattr(self, what)()
        await settle()

    def call(self) -> None:
        chat = self.draw(st.sampled_from(self.chats))
        request = ChatRequest(chat)
        name = self.draw(st.sampled_from(["", "", f"name {len(self.open)}"]))
        self._enter(request, Attempt(repr(chat).encode(), name))

    def again(self) -> None:
        if self.given_up:
            request, attempt = self.given_up.pop()
            self._enter(request, Attempt(attempt.body, attempt.idempotency, self.draw(st.booleans())))

    def answer(self) -> None:
        if self.engine.waiting:
            self._an_engine().set_result(self.draw(st.sampled_from(["ok", "go on", "hello"])))

    def fail(self) -> None:
        if self.engine.waiting:
            self._an_engine().set_exception(EngineError("it died"))

    def _read(self, call: SharedCall) -> None:
        [reply] = call.task.result().replies
        self.session.mark_read(call)
        self.has_read.update(node.sample.logprobs[0] for node in call.turn.nodes)
        self.chats.append((*call.turn.request.messages, reply.message, Message("user", "and?")))

    def read(self) -> None:
        done = [entry for entry in self.open if entry[0].task.done()]
        if done:
            entry = self.draw(st.sampled_from(done))
            self.open.remove(entry)
            if entry[0].task.exception() is None:
                self._read(entry[0])
            self.session.leave(entry[0])

    def give_up(self) -> None:
        if self.open:
            call, request, attempt = self.open.pop(self.draw(st.integers(0, len(self.open) - 1)))
            self.session.leave(call)
            self.given_up.append((request, attempt))

    def _enter(self, request: ChatRequest, attempt: Attempt) -> None:
        self.open.append((self.session.enter(request, attempt), request, attempt))

    def _an_engine(self) -> "asyncio.Future[str]":
        return self.engine.waiting.pop(self.draw(st.integers(0, len(self.engine.waiting) - 1)))


@settings(max_examples=100)
@given(data=st.data(), num_steps=st.integers(1, 40))
def test_what_a_program_has_read_is_trained_exactly_once_however_it_calls(data, num_steps):
    async def body(_: ProxySessions, session: Session, engine: Engine) -> None:
        program = Program(data.draw, session, engine)
        for _step in range(num_steps):
            await program.step()
        trajectories = session.chains(1.0, episode=0)
        assert logprobs(trajectories) == Counter(program.has_read)
        assert not any(trajectory.unusable for trajectory in trajectories)

    running(body)


def test_a_retry_is_told_the_same_answer_and_a_new_call_another():
    async def body(_: ProxySessions, session: Session, engine: Engine) -> None:
        first = await answered(session, engine)
        assert await answered(session, engine, Attempt(b"1", is_retry=True)) is first
        assert await answered(session, engine) is not first
        assert await answered(session, engine, Attempt(b"2", is_retry=True)) is not first
        named = await answered(session, engine, Attempt(b"1", "name"))
        assert await answered(session, engine, Attempt(b"1", "name")) is named
        assert await answered(session, engine, Attempt(b"1", "other name", is_retry=True)) not in (first, named)
        assert engine.num_samples == session.num_turns == 5

    running(body)


@pytest.mark.parametrize("sibling", ["waits", "was read"])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_failed_call_that_is_tried_again_is_not_told_the_answer_of_an_equal_one(sibling, order):
    async def body(_: ProxySessions, session: Session, engine: Engine) -> None:
        calls = [session.enter(REQUEST, Attempt(b"1")) for _ in range(2)]
        await settle()
        lucky, unlucky = (calls[i] for i in order)
        ends = [engine.waiting[i] for i in order]
        ends[1].set_exception(EngineError("it died"))
        await settle()
        session.leave(unlucky)
        if sibling == "was read":
            ends[0].set_result("ok")
            await lucky.task
            session.mark_read(lucky)
            session.leave(lucky)
        again = session.enter(REQUEST, Attempt(b"1", is_retry=True))
        assert again not in calls
        assert session.enter(REQUEST, Attempt(b"1", is_retry=True)) is again, "which may be tried again in its turn"
        await settle()
        engine.waiting[-1].set_result("ok")
        await again.task
        session.mark_read(again)
        if sibling == "waits":
            ends[0].set_result("ok")
            await lucky.task
            session.mark_read(lucky)
        assert session.num_turns == engine.num_samples == 2
        assert logprobs(session.chains(1.0, episode=0)) == Counter({-1 / 1024: 1, -2 / 1024: 1})

    running(body)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_call_that_was_given_up_is_joined_again_rather_than_an_equal_one_whose_client_waits(order):
    async def body(_: ProxySessions, session: Session, engine: Engine) -> None:
        calls = [session.enter(REQUEST, Attempt(b"1")) for _ in range(2)]
        given_up, waiting = (calls[i] for i in order)
        session.leave(given_up)
        assert session.enter(REQUEST, Attempt(b"1", is_retry=True)) is given_up
        assert given_up.num_clients == waiting.num_clients == 1

    running(body)


def test_each_of_several_failed_calls_that_are_tried_again_is_another():
    async def body(_: ProxySessions, session: Session, engine: Engine) -> None:
        for attempt in (Attempt(b"1"), Attempt(b"1", "name")):
            failed = [session.enter(REQUEST, attempt) for _ in range(1 if attempt.idempotency else 2)]
            await settle()
            for future in engine.waiting:
                future.set_exception(EngineError("it died"))
            engine.waiting.clear()
            await settle()
            for call in failed:
                session.leave(call)
            again = [session.enter(REQUEST, replace(attempt, is_retry=True)) for _ in failed]
            assert len({id(call) for call in (*again, *failed)}) == 2 * len(failed)

    running(body)


def test_a_call_runs_on_for_a_while_without_its_client():
    async def body(_: ProxySessions, session: Session, engine: Engine) -> None:
        call = session.enter(REQUEST, Attempt(b"1"))
        session.leave(call)
        again = session.enter(REQUEST, Attempt(b"1"))
        assert again is call
        await asyncio.sleep(0.1)
        assert not call.task.done()
        session.leave(call)
        await asyncio.wait([call.task], timeout=10)
        assert call.task.cancelled() and session.num_turns == 0
        assert session.enter(REQUEST, Attempt(b"1", is_retry=True)) is not call

    running(body, linger_s=0.05)


def test_old_answers_are_forgotten(monkeypatch):
    async def body(_: ProxySessions, session: Session, engine: Engine) -> None:
        calls = [await answered(session, engine, Attempt(str(i).encode())) for i in range(70)]
        assert len(session._calls) <= 65
        assert session.enter(REQUEST, Attempt(b"69", is_retry=True)) is calls[69]
        assert session.enter(REQUEST, Attempt(b"0", is_retry=True)) is not calls[0]
        monkeypatch.setattr(sessions, "_REMEMBERED_S", -1.0)
        assert session.enter(REQUEST, Attempt(b"68", is_retry=True)) is not calls[68]
        assert len(session._calls) == 3, "those that somebody waits for stay"
        assert len(session.chains(1.0, episode=0)) == 70, "what was recorded stays"

    running(body)


def test_keys_cannot_be_guessed_and_are_known_after_the_end():
    async def body(opened: ProxySessions, session: Session, engine: Engine) -> None:
        others = [opened.open(recorder(), engine) for _ in range(100)]
        assert len({len(other.key) for other in others}) == 1 and len({other.key for other in others}) == 100
        assert len(session.key) > 40 and session.id not in session.key and session.key not in repr(session)
        assert opened.session_of(session.key) is session
        for key in ("", "wrong", session.key[:-1], session.id):
            with pytest.raises(UnknownKeyError):
                opened.session_of(key)
        opened.close(session)
        opened.close(session)
        with pytest.raises(SealedError):
            opened.session_of(session.key)
        with pytest.raises(SealedError):
            session.enter(REQUEST, Attempt(b"1"))

    running(body)


def test_keys_of_ended_sessions_are_forgotten_at_last(monkeypatch):
    async def body(opened: ProxySessions, session: Session, engine: Engine) -> None:
        monkeypatch.setattr(sessions, "_MAX_SEALED", 3)
        opened.close(session)
        for _ in range(3):
            opened.close(opened.open(recorder(), engine))
        with pytest.raises(UnknownKeyError):
            opened.session_of(session.key)

    running(body)


def test_a_shared_key_has_a_bounded_number_of_named_sessions(monkeypatch):
    async def body(opened: ProxySessions, session: Session, engine: Engine) -> None:
        monkeypatch.setattr(sessions, "MAX_NAMED", 2)
        group = opened.open_group(recorder(), engine)
        first = opened.session_of(group.key, "a")
        assert opened.session_of(group.key, "b") is not first and opened.session_of(group.key, "a") is first is group.session("a")
        for name in ("c", "", "x" * 201):
            with pytest.raises(RefusedError):
                opened.session_of(group.key, name)
        assert opened.session_of(session.key, "a") is session
        opened.close(group)
        with pytest.raises(SealedError):
            group.session("new")
        with pytest.raises(SealedError):
            first.enter(REQUEST, Attempt(b"1"))

    running(body)


def test_an_answer_that_comes_with_the_end_is_not_recorded():
    async def body(_: ProxySessions, session: Session, engine: Engine) -> None:
        call = session.enter(REQUEST, Attempt(b"1"))
        await settle()
        engine.waiting.pop().set_result("ok")
        session.seal()
        await settle()
        assert call.task.done() and session.chains(1.0, episode=0) == []

    running(body)
