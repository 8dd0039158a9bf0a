"""However a run ends, it leaves no process and no shared memory behind."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from faults.command import Command
from small_run import ENVIRONMENT, REWARDS, SmallRun, offbeat, start_offbeat
from waiting import wait_until

DRILLS = [pytest.param("local", marks=pytest.mark.drill), pytest.param("ray", marks=pytest.mark.ray)]
WHOLE_RUNS = [pytest.param("local", marks=pytest.mark.whole_run), pytest.param("ray", marks=pytest.mark.ray)]
SHARED_MEMORY = Path("/dev/shm")


@contextmanager
def training(tmp_path: Path, model: str, **changes: str) -> Iterator[tuple[SmallRun, subprocess.Popen[str], list[psutil.Process]]]:
    """A run in the middle of its training, and all processes of its tree; what it leaves is ended after the test."""
    run = SmallRun(tmp_path, model)
    with start_offbeat("train", *run.arguments(run__total_steps="100000", **changes), "--json") as controller:
        wait_until(lambda: len(run.metrics()) > 2 or controller.poll() is not None, timeout_s=120)
        assert controller.poll() is None, controller.communicate()
        tree = psutil.Process(controller.pid).children(recursive=True)
        try:
            yield run, controller, tree
        finally:
            for process in (*alive(tree), controller):
                process.kill()


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [process for process in processes if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]


def shared_memory(processes: list[psutil.Process]) -> set[Path]:
    """Files in shared memory that the processes hold; those of the machine's other processes are not ours to judge."""
    maps = {Path(each.path) for process in alive(processes) for each in process.memory_maps()}
    return {path for path in maps if SHARED_MEMORY in path.parents}


def is_agent_of_ray(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return any(word.endswith(("agent.py", "agent/main.py")) for word in process.cmdline())
    return False


def ranks_of(tree: list[psutil.Process]) -> list[psutil.Process]:
    return [process for process in tree if "trainer.worker" in " ".join(process.cmdline())]


@pytest.mark.parametrize("launcher", WHOLE_RUNS)
def test_nothing_is_left_when_the_controller_is_killed_while_a_rank_is_stopped(launcher: str, tmp_path: Path, model_dir: str) -> None:
    with training(tmp_path, model_dir, cluster__launcher=launcher, train__num_ranks="2") as (_, controller, tree):
        assert len(tree) >= 4  # two ranks, an engine and a reward process; under Ray also its own
        held = shared_memory(tree)
        stopped, waiting = ranks_of(tree)
        os.kill(stopped.pid, signal.SIGSTOP)
        time.sleep(0.5)
        assert waiting.is_running()  # for the other, in a collective or at a sync point
        controller.kill()
        wait_until(lambda: not alive(tree), timeout_s=30)
    assert not [path for path in held if path.exists()]


@pytest.mark.ray
def test_no_agent_of_ray_is_left_when_the_controller_is_killed_while_ray_starts(tmp_path: Path, model_dir: str) -> None:
    arguments = SmallRun(tmp_path, model_dir).arguments(cluster__launcher="ray")
    command = Command([sys.executable, "-m", "offbeat", "train", *arguments], env=ENVIRONMENT, logs=[], patterns={})
    running = threading.Thread(target=command.run, kwargs={"timeout_s": 100.0, "grace_s": 15.0})
    running.start()
    wait_until(lambda: any(map(is_agent_of_ray, command.processes())), timeout_s=90)
    [controller] = [each for each in command.processes() if each.ppid() == os.getpid()]
    controller.kill()
    running.join()
    assert command.left == []


@pytest.mark.parametrize("launcher", WHOLE_RUNS)
def test_nothing_is_left_after_two_interrupts(launcher: str, tmp_path: Path, model_dir: str) -> None:
    with training(tmp_path, model_dir, cluster__launcher=launcher, rollout__reward=f"{REWARDS}:slow") as (_, controller, tree):
        held = shared_memory(tree)
        controller.send_signal(signal.SIGINT)
        assert controller.stdout is not None, "it is piped"
        assert any("press Ctrl-C again" in line for line in controller.stdout), "two signals at once would be one"
        controller.send_signal(signal.SIGINT)
        _, stderr = controller.communicate(timeout=90)
        assert controller.returncode == 130
        assert stderr.endswith("offbeat: interrupted\n") and "Traceback" not in stderr
        wait_until(lambda: not alive(tree), timeout_s=30)
    assert not [path for path in held if path.exists()]


@pytest.mark.drill
def test_sigterm_to_all_processes_of_a_job_saves_in_mid_step_and_leaves_nothing(tmp_path: Path, model_dir: str) -> None:
    with training(tmp_path, model_dir, train__num_ranks="2", rollout__reward=f"{REWARDS}:slow") as (run, controller, tree):
        assert len(tree) >= 4  # two ranks, an engine and a reward process, where most of a step's time goes
        for _ in range(2):  # from the scheduler, and from a batch script that passes its own on
            for process in (*tree, psutil.Process(controller.pid)):
                process.terminate()
        _, stderr = controller.communicate(timeout=90)
        assert (controller.returncode, stderr) == (130, "")
        wait_until(lambda: not alive(tree), timeout_s=30)
    last = run.metrics()[-1]["global_step"]
    assert run.events("checkpoint")[-1]["global_step"] == last
    assert not any(run.events(kind) for kind in ("failed", "quarantine"))
    again = offbeat("train", *run.arguments(run__total_steps=str(last + 1), train__num_ranks="2"), "--json")
    assert again.returncode == 0, again.stderr
    assert run.events("resumed")[-1]["global_step"] == last and run.metrics()[-1]["global_step"] == last + 1


@pytest.mark.ray
def test_an_interrupt_at_the_terminal_reaches_all_processes_and_the_run_saves(tmp_path: Path, model_dir: str) -> None:
    with training(tmp_path, model_dir, cluster__launcher="ray") as (run, controller, tree):
        os.killpg(controller.pid, signal.SIGINT)
        _, stderr = controller.communicate(timeout=90)
        assert (controller.returncode, stderr) == (130, "")
        assert run.events("checkpoint")[-1]["global_step"] == run.metrics()[-1]["global_step"]
        wait_until(lambda: not alive(tree), timeout_s=30)


@pytest.mark.parametrize("launcher", DRILLS)
def test_a_rank_that_dies_ends_the_run_with_its_name_and_nothing_is_left(launcher: str, tmp_path: Path, model_dir: str) -> None:
    with training(tmp_path, model_dir, cluster__launcher=launcher, train__num_ranks="2") as (run, controller, tree):
        rank = ranks_of(tree)[1]
        os.kill(rank.pid, signal.SIGKILL)
        _, stderr = controller.communicate(timeout=90)
        assert controller.returncode == 1
        (named,) = [line for line in stderr.splitlines() if line.startswith("offbeat: ")]
        assert re.match(rf"offbeat: rank \d \(process {rank.pid}\) was killed by SIGKILL (in|before) \w+$", named), stderr
        wait_until(lambda: not alive(tree), timeout_s=30)
    assert named.removeprefix("offbeat: ") in run.events("failed")[-1]["error"]


@pytest.mark.drill
def test_an_engine_that_dies_is_quarantined_and_the_run_goes_on(tmp_path: Path, model_dir: str) -> None:
    with training(tmp_path, model_dir, inference__num_engines="2") as (run, controller, tree):
        engine = next(process for process in tree if "engine.worker" in " ".join(process.cmdline()))
        os.kill(engine.pid, signal.SIGKILL)
        wait_until(lambda: run.events("quarantine"), timeout_s=60)
        steps = len(run.metrics())
        wait_until(lambda: len(run.metrics()) > steps + 3, timeout_s=60)
        controller.send_signal(signal.SIGINT)
        _, stderr = controller.communicate(timeout=90)
        assert (controller.returncode, stderr) == (130, "")
        wait_until(lambda: not alive(tree), timeout_s=30)
    assert run.events("publish")[-1]["version"] > steps
