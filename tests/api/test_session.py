"""A run on a thread: callbacks, ends that are asked for, and a process that is as before. `test_training` does the same with real runs."""

import asyncio
import logging
import os
import signal
import threading
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from offbeat.aio import ASKED_TO_STOP, listener, run_interruptible
from offbeat.api.session import Ending, Step, run_alone
from offbeat.config.load import load_config
from offbeat.errors import ConfigError
from offbeat.telemetry.console import Console
from offbeat.telemetry.log import set_up_logging
from waiting import wait_until

CONFIG = load_config(None)
_DEADLINE_S = 20


def steps_until_asked(console: Console, *, most: int = 10**9, on_step: Callable[[int], None] = lambda _step: None) -> list[str]:
    """Make steps until asked to end, or until `most`, and return how it was asked."""
    asked: list[str] = []

    async def main() -> None:
        listener.get()(asyncio.get_running_loop(), asked.append)
        console.start("steps", most)
        for step in range(1, most + 1):
            console.update(step, {"reward/mean": step / 10})
            on_step(step)
            await asyncio.sleep(0)
            if asked:
                return

    asyncio.run(asyncio.wait_for(main(), _DEADLINE_S))
    return asked


def test_every_step_is_told_on_the_thread_that_waits() -> None:
    told: list[Step] = []
    threads: set[int] = set()

    def tell(step: Step) -> None:
        told.append(step)
        threads.add(threading.get_ident())

    assert run_alone(lambda console: steps_until_asked(console, most=3), CONFIG, callbacks=[tell]) == []
    assert [(step.number, step.total_steps, step.metrics["reward/mean"]) for step in told] == [(1, 3, 0.1), (2, 3, 0.2), (3, 3, 0.3)]
    assert threads == {threading.get_ident()} and told[0].folder == Path("runs/run")


def test_it_works_while_an_event_loop_runs() -> None:
    async def cell() -> list[str]:
        return run_alone(lambda console: steps_until_asked(console, most=2), CONFIG)

    assert asyncio.run(cell()) == []


def test_a_callback_can_stop_the_run_once() -> None:
    def stop(step: Step) -> None:
        step.stop()
        step.stop()

    assert run_alone(steps_until_asked, CONFIG, callbacks=[stop]) == ["a callback asked to stop, so this step is the last"]


def test_a_callback_that_exits_ends_the_program_only_when_the_run_has_ended() -> None:
    ended: list[list[str]] = []

    def leave(_step: Step) -> None:
        with pytest.raises(ConfigError, match="a run is already in progress"):
            run_alone(steps_until_asked, CONFIG)
        raise SystemExit(3)

    with pytest.raises(SystemExit) as left:
        run_alone(lambda console: ended.append(steps_until_asked(console)), CONFIG, callbacks=[leave])
    assert left.value.code == 3 and ended == [["a callback has failed, so this step is the last"]]
    assert run_alone(lambda console: steps_until_asked(console, most=1), CONFIG) == []


def test_what_a_callback_raises_comes_when_the_run_has_ended_well() -> None:
    ended: list[list[str]] = []

    def fail(step: Step) -> None:
        raise ZeroDivisionError(f"step {step.number}")

    with pytest.raises(ZeroDivisionError, match="step 1"):
        run_alone(lambda console: ended.append(steps_until_asked(console)), CONFIG, callbacks=[fail])
    assert ended == [["a callback has failed, so this step is the last"]]


def test_what_the_run_raises_comes_out() -> None:
    def fail(console: Console) -> None:
        raise ConfigError("no")

    with pytest.raises(ConfigError, match="no"):
        run_alone(fail, CONFIG)
    assert run_alone(lambda console: 3, CONFIG) == 3, "the next run is not refused"


def test_an_interrupt_is_heard_after_the_step_and_a_second_one_at_once() -> None:
    heard = threading.Event()

    def once(console: Console) -> list[str]:
        return steps_until_asked(console, on_step=lambda step: os.kill(os.getpid(), signal.SIGINT) if step == 2 else None)

    assert run_alone(once, CONFIG) == ["stopping after this step; interrupt again to stop at once"]

    def cancelled(console: Console) -> None:
        async def main() -> None:
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.wait_for(asyncio.Event().wait(), _DEADLINE_S)

        try:
            run_interruptible(main())
        finally:
            heard.set()

    with pytest.raises(KeyboardInterrupt):
        run_alone(cancelled, CONFIG)
    assert heard.is_set()


def test_sigterm_is_heard_after_the_step_unless_the_program_handles_it_itself() -> None:
    own: list[int] = []

    def once(console: Console, *, most: int = 10**9) -> list[str]:
        return steps_until_asked(console, most=most, on_step=lambda step: os.kill(os.getpid(), signal.SIGTERM) if step == 2 else None)

    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert run_alone(once, CONFIG) == [ASKED_TO_STOP]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, "a program that goes on can be ended as before"

    def handle(number: int, _frame: object) -> None:
        own.append(number)

    signal.signal(signal.SIGTERM, handle)
    try:
        assert run_alone(lambda console: once(console, most=4), CONFIG) == []
        assert signal.getsignal(signal.SIGTERM) is handle and own == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def test_a_run_on_another_thread_than_the_main_one_leaves_signals_alone() -> None:
    found: list[list[str]] = []
    thread = threading.Thread(target=lambda: found.append(run_alone(lambda console: steps_until_asked(console, most=2), CONFIG)))
    thread.start()
    thread.join(_DEADLINE_S)
    assert found == [[]] and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_what_is_asked_between_two_parts_of_a_run_is_heard_by_the_next() -> None:
    for asked in ("early", "between"):
        ending, heard = Ending(), []
        if asked == "early":
            ending.ask("early")
        loop = asyncio.new_event_loop()
        ending.attach(loop, heard.append)
        loop.close()
        if asked == "between":
            ending.ask("between")
            assert not heard
        with closing(asyncio.new_event_loop()) as following:
            ending.attach(following, heard.append)
        ending.after_step("again")
        assert heard == [asked]


def test_a_stop_by_a_callback_is_no_signal_so_one_while_the_report_is_written_changes_nothing() -> None:
    ending = Ending()
    with closing(asyncio.new_event_loop()) as loop:
        ending.attach(loop, print)
        ending.after_step("a callback asked to stop")
    ending.ask("first")
    with pytest.raises(KeyboardInterrupt):
        ending.ask("second")


def test_a_signal_while_the_report_is_written_changes_nothing_and_a_second_one_ends_the_call() -> None:
    written = []

    def work(console: Console, *, signals: Sequence[signal.Signals]) -> str:
        asked = steps_until_asked(console, most=2)
        for number in signals:
            os.kill(os.getpid(), number)
        heard.wait(_DEADLINE_S if len(signals) > 1 else 0)
        written.append(signals)
        return f"written, asked {len(asked)} times before"

    for number in (signal.SIGINT, signal.SIGTERM):
        heard = threading.Event()
        assert run_alone(partial(work, signals=[number]), CONFIG) == "written, asked 0 times before"
        with pytest.raises(KeyboardInterrupt):
            run_alone(partial(work, signals=[number, signal.SIGINT if number == signal.SIGTERM else signal.SIGTERM]), CONFIG)
        assert len(written) == 1, "the call did not wait for the report"
        heard.set()
        wait_until(lambda: len(written) == 2, timeout_s=_DEADLINE_S)
        written.clear()


def test_sigterm_that_comes_once_more_from_a_batch_script_is_one_request() -> None:
    def work(console: Console) -> list[str]:
        def twice(step: int) -> None:
            if step in (2, 3):
                os.kill(os.getpid(), signal.SIGTERM)

        return steps_until_asked(console, on_step=twice)

    assert run_alone(work, CONFIG) == [ASKED_TO_STOP]


def test_the_process_is_afterwards_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    root, umask = logging.getLogger(), os.umask(0o022)
    handler = logging.FileHandler(tmp_path / "own.log")
    root.addHandler(handler)
    before = list(root.handlers)

    def change(console: Console) -> None:
        set_up_logging(tmp_path / "run.log")
        os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")
        (tmp_path / "private").touch()
        logging.getLogger("offbeat").info("of the run")

    try:
        run_alone(change, CONFIG)
        root.warning("of the program")
        (tmp_path / "public").touch()
    finally:
        os.umask(umask)
    assert root.handlers == before
    assert (os.environ["OMP_NUM_THREADS"], os.environ.get("MKL_NUM_THREADS")) == ("3", None)
    assert [oct((tmp_path / name).stat().st_mode)[-3:] for name in ("private", "public")] == ["600", "644"]
    assert "of the program" in (tmp_path / "own.log").read_text() and "of the run" in (tmp_path / "run.log").read_text()


def test_two_runs_in_one_process_and_other_modes_are_refused() -> None:
    def inner(console: Console) -> None:
        run_alone(lambda console: None, CONFIG)

    with pytest.raises(ConfigError, match="a run is already in progress in this process"):
        run_alone(inner, CONFIG)
    with pytest.raises(ConfigError, match=r"run\.mode must be 'controller' in a Python program, got 'spmd'"):
        run_alone(lambda console: None, load_config(None, values={"run.mode": "spmd"}))


def test_progress_is_shown_only_where_it_is_wanted(capsys: pytest.CaptureFixture[str]) -> None:
    run_alone(lambda console: steps_until_asked(console, most=1), CONFIG)
    assert capsys.readouterr().out == ""
    run_alone(lambda console: steps_until_asked(console, most=1), CONFIG, progress=True)
    assert "step 1/1" in capsys.readouterr().out
