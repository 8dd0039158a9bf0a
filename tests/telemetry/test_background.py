"""A sink that is slow, stuck or broken costs the run nothing."""

import logging
import threading
import time

import pytest

from offbeat.telemetry import background
from offbeat.telemetry.background import BackgroundSink

WAIT_S = 30


class Kept:
    """A sink that keeps what it is told; it raises at `fails_at`, and waits for `gate` before each row."""

    def __init__(self, fails_at=None, gate=None):
        self.calls = []
        self.thread = threading.current_thread()
        self._fails_at = fails_at
        self._gate = gate

    def write(self, row):
        if self._gate is not None:
            self._gate.wait(WAIT_S)
        if row["global_step"] == self._fails_at:
            raise OSError("no space left")
        self.calls.append(row["global_step"])

    def write_samples(self, global_step, make):
        self.calls.append((global_step, make()))

    def resume_at(self, global_step):
        self.calls.append(("resume_at", global_step))

    def close(self):
        self.calls.append("close")


def start(sink_of, **options):
    opened, dropped = [], []

    def open_sink():
        opened.append(sink_of())
        return opened[0]

    return BackgroundSink("kept", open_sink, on_drop=lambda name, reason: dropped.append((name, reason)), **options), opened, dropped


def test_all_calls_come_through_in_order_and_in_another_thread():
    sink, opened, dropped = start(Kept)
    sink.resume_at(3)
    for step in (3, 4, 5):
        sink.write({"global_step": step})
    sink.close()
    assert opened[0].calls == [("resume_at", 3), 3, 4, 5, "close"]
    assert opened[0].thread is not threading.current_thread()
    assert dropped == []


def test_a_sink_that_raises_is_reported_once_and_gets_nothing_more(caplog):
    caplog.set_level(logging.WARNING)
    sink, opened, dropped = start(lambda: Kept(fails_at=2))
    for step in (1, 2):
        sink.write({"global_step": step})
    deadline = time.monotonic() + WAIT_S
    while not dropped and time.monotonic() < deadline:
        sink.write({"global_step": 3})
        time.sleep(0.01)
    sink.close()
    assert opened[0].calls == [1]
    assert dropped == [("kept", "OSError: no space left")]
    assert [record.getMessage() for record in caplog.records] == [
        "sink kept gets no more metrics: OSError: no space left; metrics.jsonl has them all"]


def test_a_sink_that_cannot_be_opened_is_reported_at_the_end_at_the_latest():
    sink, _, dropped = start(lambda: 1 / 0)
    sink.close()
    assert dropped == [("kept", "ZeroDivisionError: division by zero")]


def test_a_stuck_sink_holds_up_neither_the_steps_nor_the_end(monkeypatch):
    monkeypatch.setattr(background, "_MAX_WAITING", 5)
    gate = threading.Event()
    sink, _, dropped = start(lambda: Kept(gate=gate))
    for step in range(10):
        sink.write({"global_step": step})
    sink.close()
    assert dropped == [("kept", "it fell 5 rows behind")]
    gate.set()


def test_the_end_waits_for_a_slow_sink_only_so_long():
    gate = threading.Event()
    sink, _, dropped = start(lambda: Kept(gate=gate), close_s=0.05)
    sink.write({"global_step": 1})
    sink.close()
    assert dropped == [("kept", "it was still writing 0.05 s after the end of the run")]
    gate.set()


@pytest.mark.parametrize("ending", [SystemExit, KeyboardInterrupt])
def test_even_an_exit_in_a_sink_does_not_reach_the_run(ending):
    def leave():
        raise ending("bye")

    sink, _, dropped = start(leave)
    sink.close()
    assert dropped == [("kept", f"{ending.__name__}: bye")]
