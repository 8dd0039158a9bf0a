"""The engine's thread: idle without spinning, commands between steps, and a stated end when it fails."""

import threading
import time

import pytest

from offbeat.engine.loader import load_engine
from offbeat.engine.loop import EngineLoop
from offbeat.engine.options import EngineOptions
from offbeat.engine.request import Event, Output, Request, SamplingParams
from offbeat.engine.versions import VersionSource
from offbeat.errors import EngineError, ModelError, RefusedError
from offbeat.sync.platform import current_platform


class Inbox:
    """Collects events from the engine's thread."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._arrived = threading.Condition()

    def deliver(self, events: list[Event]) -> None:
        with self._arrived:
            self.events += events
            self._arrived.notify_all()

    def wait(self, count: int) -> list[Event]:
        with self._arrived:
            assert self._arrived.wait_for(lambda: len(self.events) >= count, timeout=60)
            return list(self.events)


@pytest.fixture
def inbox():
    return Inbox()


@pytest.fixture
def loop(model_folder, inbox):
    loop = EngineLoop(load_engine(EngineOptions(model=model_folder("qwen3"), max_running=8)), deliver=inbox.deliver)
    loop.start()
    yield loop
    loop.stop()


def request(name: str, *, tokens: int = 5, **more) -> Request:
    return Request(id=name, prompt=[5, 6, 7], params=SamplingParams(max_new_tokens=tokens, ignore_eos=True), **more)


def test_submitted_requests_are_answered(loop, inbox):
    for i in range(20):
        loop.submit(request(str(i)))
    events = inbox.wait(20)
    assert {event.request_id for event in events} == {str(i) for i in range(20)}
    assert all(isinstance(event.result, Output) and len(event.result.token_ids) == 5 for event in events)


def test_a_refusal_comes_as_an_event(loop, inbox):
    loop.submit(request("bad", n=99))
    (event,) = inbox.wait(1)
    assert event.request_id == "bad" and isinstance(event.result, RefusedError)


def test_an_idle_engine_takes_no_steps(loop, inbox, monkeypatch):
    loop.submit(request("a"))
    inbox.wait(1)
    rounds = []
    step = loop.engine.step
    monkeypatch.setattr(loop.engine, "step", lambda: rounds.append(1) or step())
    time.sleep(0.2)
    assert len(rounds) <= 1


def test_an_idle_engine_gives_back_the_memory_of_its_samples_once(loop, inbox, monkeypatch):
    monkeypatch.setattr("offbeat.engine.cache._SMALL_BYTES", 0)
    monkeypatch.setattr("offbeat.engine.cache.SHRINKS_AFTER_S", 0.05)
    given_back = threading.Semaphore(0)
    monkeypatch.setattr(type(current_platform), "return_memory", lambda _: given_back.release())
    loop.submit(request("a"))
    inbox.wait(1)
    assert given_back.acquire(timeout=60)
    assert loop.call(lambda: loop.engine.shrinks_at_s).result(60) is None
    assert not given_back.acquire(timeout=0.2), "nothing else is free"


def test_calls_run_between_steps_and_return_results_or_errors(loop):
    assert loop.call(lambda: threading.current_thread().name).result(60) == "offbeat-engine"
    with pytest.raises(ZeroDivisionError):
        loop.call(lambda: 1 // 0).result(60)


def test_a_waiter_that_gives_up_does_not_hurt_the_engine(loop, inbox, model_folder):
    loop.submit(request("a", tokens=150))
    loop.hold_version(1, VersionSource(model_folder("qwen3", 1)))
    draining = loop.call(lambda: loop.engine.switch(1, "drain"))
    assert not draining.cancel() and not draining.result(60).cancel()
    inbox.wait(1)
    assert draining.result(60).result(60) >= 0 and loop.error is None


def test_stage_and_switch_while_a_request_runs(loop, inbox, model_folder, slow_down):
    let_go = slow_down(loop.engine)
    loop.submit(request("a", tokens=150))
    loop.hold_version(1, VersionSource(model_folder("qwen3", 1)))
    loop.hold_version(1, VersionSource(model_folder("qwen3", 1)))
    with pytest.raises(ModelError):
        loop.hold_version(2, VersionSource(model_folder("llama")))
    switched = loop.call(lambda: loop.engine.switch(1, "recompute")).result(60)
    let_go.set()
    assert switched.result(60) < 30
    (event,) = inbox.wait(1)
    assert event.result.versions == sorted(event.result.versions) and event.result.versions[-1] == 1


def test_pause_abort_delivers_what_there_is(loop, inbox, slow_down):
    slow_down(loop.engine)
    loop.submit(request("a", tokens=150))
    loop.pause("abort").result(60)
    (event,) = inbox.wait(1)
    assert event.result.finish_reason == "abort"


def test_when_the_engine_fails_everything_pending_fails_and_says_why(loop, inbox, model_folder, slow_down):
    slow_down(loop.engine)
    loop.submit(request("running", tokens=150))
    loop.hold_version(1, VersionSource(model_folder("qwen3", 1)))
    draining = loop.call(lambda: loop.engine.switch(1, "drain")).result(60)
    loop.submit(request("waiting"))

    def broken(*_step, **_options):
        raise RuntimeError("out of luck")

    loop.engine._forward.decode = broken
    events = inbox.wait(2)
    assert {event.request_id for event in events} == {"running", "waiting"}
    assert all(isinstance(event.result, EngineError) and "out of luck" in str(event.result) for event in events)
    with pytest.raises(EngineError, match="out of luck"):
        draining.result(60)
    assert "RuntimeError: out of luck" in str(loop.error)
    loop.submit(request("late"))
    assert "out of luck" in str(inbox.wait(3)[-1].result)
    with pytest.raises(EngineError, match="out of luck"):
        loop.call(lambda: 1).result(60)


def test_stopping_fails_what_is_in_flight(loop, inbox, slow_down):
    slow_down(loop.engine)
    loop.submit(request("a", tokens=150))
    loop.call(lambda: None).result(60)
    loop.stop()
    (event,) = inbox.wait(1)
    assert "the engine was stopped" in str(event.result)
