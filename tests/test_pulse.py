"""A thread that computes, waits or comes further is alive; one that does nothing of that hangs."""

import queue
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace

import pytest

from offbeat.pulse import LOOK_S, MARGIN_S, Hang, Signs, Stillness, Vigil, current, in_collective, on_progress, progress, waiting, work
from waiting import wait_until

STILL = Signs(steps=3, cpu_s=1.0, helpers_s=2.0, moved=100)
HERE = ("a.py:1 in f: g()",)


def looks(stillness: Stillness, signs: Signs, seconds: float) -> bool:
    """Look at the same signs for some seconds; whether the patience has ended."""
    return [stillness.look(signs, LOOK_S) for _ in range(round(seconds / LOOK_S))][-1]


@pytest.mark.parametrize("sign", [
    Signs(4, 1.0, 2.0, 100), Signs(3, 1.01, 2.0, 100), Signs(3, 1.0, 2.1, 100), Signs(3, 1.0, 2.0, 101),
    Signs(3, 1.0, 2.0, 100, on_disk=True)])
def test_every_sign_of_life_starts_the_patience_anew(sign: Signs) -> None:
    stillness = Stillness(2.0)
    assert not stillness.look(STILL, LOOK_S)
    assert not looks(stillness, STILL, 1.75)
    assert not stillness.look(sign, LOOK_S)
    assert stillness.still_s == 0.0
    assert not looks(stillness, sign if not sign.on_disk else STILL, 1.75)
    assert stillness.look(sign if not sign.on_disk else STILL, LOOK_S)


def test_what_libraries_do_at_rest_is_no_sign_of_life() -> None:
    stillness = Stillness(1.0)
    stillness.look(STILL, LOOK_S)
    for i in range(1, 5):
        still = stillness.look(Signs(3, 1.0 + i * 0.001, 2.0 + i * 0.01, 100), LOOK_S)
    assert still


def test_a_clock_that_went_on_while_the_process_was_stopped_is_not_believed() -> None:
    stillness = Stillness(5.0)
    stillness.look(STILL, LOOK_S)
    assert not stillness.look(STILL, 600.0)
    assert stillness.still_s == 2 * LOOK_S


def test_a_thread_hangs_when_two_stacks_are_the_same_and_neither_is_in_a_wait() -> None:
    stillness = Stillness(1.0)
    stillness.look(STILL, LOOK_S)
    looks(stillness, STILL, 1.0)
    assert not stillness.hangs(HERE, waits=False)
    looks(stillness, STILL, MARGIN_S)
    assert not stillness.hangs(("a.py:2 in f: h()",), waits=False)
    assert not stillness.hangs(HERE, waits=False)
    assert not stillness.hangs(HERE, waits=True)
    assert not stillness.hangs(HERE, waits=False)
    assert stillness.hangs(HERE, waits=False)


def frame_in(file: str, name: str = "wait") -> bool:
    """Whether a thread that is in a function of this file, called from here, is taken to be in a collective."""
    found: list[bool] = []
    names: dict[str, Callable[[Callable[[], object]], None]] = {}
    exec(compile(f"def {name}(look): look()", file, "exec"), names)
    names[name](lambda: found.append(in_collective(sys._getframe(1))))
    return found[0]


def test_frames_of_torch_tell_a_victim_from_a_rank_that_computes_or_writes() -> None:
    assert frame_in("/lib/torch/distributed/distributed_c10d.py")
    assert frame_in("/lib/torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py")
    assert frame_in("/lib/torch/autograd/graph.py", "_engine_run_backward")
    assert frame_in("/lib/torch/nn/parallel/distributed.py", "_pre_forward")
    assert not frame_in("/lib/torch/nn/parallel/distributed.py", "_run_ddp_forward")
    assert not frame_in("/lib/torch/nn/functional.py")
    assert not frame_in("/lib/torch/distributed/checkpoint/filesystem.py")
    assert not frame_in("/home/me/reward.py")
    assert not in_collective(None)


def watched(act: Callable[[], object], *, patience_s: float = 0.5, for_s: float = 2.5) -> tuple[list[Hang], list[str]]:
    """What a vigil says of a thread that does `act` again and again, and its beats."""
    hangs: queue.SimpleQueue[Hang] = queue.SimpleQueue()
    beats: list[str] = []
    ended = threading.Event()

    def run() -> None:
        with work("train_step"):
            progress("backward")
            while not ended.is_set():
                act()

    vigil = Vigil(SimpleNamespace(beat=beats.append, hangs=hangs.put), patience_s=patience_s)
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    with suppress(TimeoutError):
        wait_until(lambda: not hangs.empty(), timeout_s=for_s)
    ended.set()
    thread.join(10)
    vigil.close()
    found = []
    with suppress(queue.Empty):
        while True:
            found.append(hangs.get_nowait())
    return found, beats


def doze() -> None:
    time.sleep(4)


def test_a_thread_that_sleeps_is_found_and_shown() -> None:
    (hang, *_), beats = watched(doze, for_s=60)  # on a machine so busy that nobody hears of the first, it sleeps once more
    assert hang.where == "'train_step' (backward)"
    assert 0.5 <= hang.still_s < 4
    assert hang.stack[-1].endswith("in doze: time.sleep(4)")
    assert hang.text("rank 1").startswith(f"rank 1 hangs in 'train_step' (backward): for {hang.still_s:.1f} s it has computed nothing")
    assert f", and stands at {hang.stack[-1]}\n  rank 1, innermost call last:\n" in hang.text("rank 1")
    assert set(beats) == {"'train_step' (backward)"}
    assert current() is None


def wait_for_others() -> None:
    with waiting():
        time.sleep(1)


def test_a_thread_that_waits_is_not() -> None:
    assert watched(wait_for_others)[0] == []


def compute() -> None:
    end = time.thread_time() + 2 * LOOK_S * 0.01
    while time.thread_time() < end:
        pass


def come_further() -> None:
    progress("forward")
    time.sleep(0.001)


@pytest.mark.parametrize("act", [compute, come_further])
def test_a_thread_that_computes_or_comes_further_shows_signs_of_life_at_every_look(act: Callable[[], object]) -> None:
    """A look is made whenever the thread has acted again, so that a busy machine makes no difference."""
    ended, num_acts = threading.Event(), [0]

    def run() -> None:
        with work("train_step"):
            while not ended.is_set():
                act()
                num_acts[0] += 1

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        stillness = Stillness(0.5)
        for _ in range(12):
            seen = num_acts[0]
            wait_until(lambda seen=seen: num_acts[0] > seen + 1, timeout_s=60)
            now = current()
            assert now is not None and not stillness.look(now.signs(), LOOK_S) and stillness.still_s == 0
    finally:
        ended.set()
        thread.join()


def test_drills_hear_of_every_place_and_work_ends_with_its_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offbeat.pulse._strikes", [])
    seen: list[str] = []
    on_progress(seen.append)
    progress("outside of any work")
    with work("save") as _, waiting():
        progress("write_checkpoint")
        now = current()
        assert now is not None and now.text == "'save' (write_checkpoint)" and now.waits
    assert seen == ["outside of any work", "write_checkpoint"] and current() is None
