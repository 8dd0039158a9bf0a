"""What a parent concludes from looks at a child; tests/test_process.py has real ones."""

import os
import subprocess
import sys
from pathlib import Path

from offbeat.child_watch import LOOK_S, ChildWatch, bound_log, cpu_seconds, is_stopped, log_tail, system_view
from offbeat.errors import StuckError


def looks(
    watch: ChildWatch, seconds: float, *, stopped: bool = False, silent: bool = True, cpu_share: float = 0.0,
) -> StuckError | None:
    """What it says after some seconds of looks that are all alike, with a patience of 2 s."""
    for i in range(1, round(seconds / LOOK_S) + 1):
        watch.see(stopped=stopped, silent=silent, cpu_s=1.0 + i * LOOK_S * cpu_share, seconds=LOOK_S)
    return watch.verdict(patience_s=2.0)


def called(method: str) -> ChildWatch:
    watch = ChildWatch("rank 1")
    watch.begin_call(method)
    return watch


def test_a_child_that_is_stopped_for_too_long_is_named_with_what_it_did_last() -> None:
    watch = called("train_step")
    watch.see(stopped=False, silent=False, cpu_s=1.0, seconds=LOOK_S, work="'train_step' (backward)")
    watch.see(stopped=False, silent=False, cpu_s=1.0, seconds=LOOK_S, work="'load_model'")  # of before, and late
    assert looks(watch, 2.0, stopped=True) is None
    assert str(looks(watch, LOOK_S, stopped=True)) == (
        "rank 1 is stopped by a signal (SIGSTOP or a debugger), for 2.2 s in 'train_step' (backward)")


def test_one_that_was_stopped_before_it_is_called_is_named_at_once() -> None:
    watch = called("train_step")
    looks(watch, 60.0, stopped=True)
    watch.begin_call("publish")
    assert str(watch.verdict(patience_s=2.0)).endswith("for 60.0 s in 'publish'")


def test_one_that_goes_on_in_between_has_its_time_anew() -> None:
    watch = called("train_step")
    assert looks(watch, 2.0, stopped=True) is None
    assert looks(watch, LOOK_S, silent=False) is None
    assert looks(watch, 2.0, stopped=True) is None


def test_a_parent_that_was_stopped_itself_does_not_count_that() -> None:
    watch = called("train_step")
    watch.see(stopped=True, silent=True, cpu_s=1.0, seconds=600.0)
    assert watch.verdict(patience_s=2.0) is None


def test_a_silent_child_hangs_unless_it_computes() -> None:
    assert looks(called("save"), 60.0, cpu_share=0.5) is None
    assert looks(called("save"), 60.0, silent=False) is None
    error = looks(called("save"), 2.5)
    assert str(error).startswith("rank 1 hangs in 'save': for 2.2 s it has computed nothing, and native code holds its interpreter")
    watch = called("save")
    looks(watch, 2.5)
    watch.begin_call("publish")
    assert watch.verdict(patience_s=2.0) is None


def test_processes_and_logs_are_described(tmp_path: Path) -> None:
    assert not is_stopped(os.getpid()) and " s of CPU time, with " in system_view(os.getpid())
    (tmp_path / "log").write_text("".join(f"{i}\n" for i in range(30)))
    assert log_tail(tmp_path / "log").splitlines() == [str(i) for i in range(18, 30)]
    assert log_tail(tmp_path / "none") == log_tail(None) == ""


def test_the_beginning_of_a_log_that_grows_without_end_is_dropped(tmp_path: Path) -> None:
    log = tmp_path / "reward-0.log"
    with log.open("ab") as printing:
        for number in range(300_000):
            printing.write(b"line %d\n" % number)
        printing.flush()
        size = log.stat().st_size
        bound_log(log, most_bytes=size)
        assert log.stat().st_size == size
        bound_log(log, most_bytes=size - 1)
        printing.write(b"and more\n")
    lines = log.read_text().splitlines()
    assert lines[0] == f"({size - 2**20} bytes that were printed before were dropped)"
    assert lines[-2:] == ["line 299999", "and more"] and log.stat().st_size < 2**20 + 100
    assert log_tail(log).endswith("line 299999\nand more")


def test_cpu_time_counts_living_descendants_and_is_zero_for_the_dead() -> None:
    before_s = cpu_seconds(os.getpid())
    code = "import time\nwhile time.process_time() < 0.2: pass\nprint(flush=True)\ninput()"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert child.stdout and child.stdout.readline()
        assert cpu_seconds(os.getpid()) >= before_s + 0.15
    finally:
        child.kill()
        child.communicate()
    assert cpu_seconds(child.pid) == 0.0
