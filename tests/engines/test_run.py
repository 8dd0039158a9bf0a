"""A run on vLLM: it publishes with proofs, heals an engine that dies, saves when its job is ended, and leaves nothing however it ends."""

import os
import signal
from pathlib import Path

import psutil
import pytest

from contract import WITH_VLLM, Models
from offbeat.data.trajectory import PROMPT_VERSION
from small_run import REWARDS, SmallRun, offbeat, start_offbeat
from waiting import wait_until

pytestmark = [pytest.mark.timeout(400), pytest.mark.skipif(not WITH_VLLM, reason="make test-vllm runs it")]
START_TIMEOUT_S = 200.0
VLLM = {
    "inference__engine": "vllm", "inference__start_timeout_s": "200", "inference__max_running": "16", "inference__heal_timeout_s": "200"}


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [process for process in processes if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]


def shared_memory(processes: list[psutil.Process]) -> set[Path]:
    """Files in shared memory that the processes hold."""
    maps = {Path(each.path) for process in alive(processes) for each in process.memory_maps()}
    return {path for path in maps if Path("/dev/shm") in path.parents}


def test_a_run_publishes_with_proofs_heals_a_dead_server_and_leaves_nothing_when_it_is_killed(tmp_path: Path, models: Models) -> None:
    run = SmallRun(tmp_path, models.folder())
    with start_offbeat("train", *run.arguments(**VLLM, run__total_steps="100000"), "--json") as controller:
        wait_until(lambda: len(run.metrics()) > 2 or controller.poll() is not None, timeout_s=START_TIMEOUT_S)
        assert controller.poll() is None, controller.communicate()
        tree = psutil.Process(controller.pid).children(recursive=True)
        try:
            versions = {version for row in run.groups(2) for sample in row["trajectories"] for version in sample["versions"]}
            assert versions <= {PROMPT_VERSION, 0, 1, 2} and versions & {0, 1}, versions
            assert all(event["canary_gap"] < 1e-3 and not event["quarantined"] for event in run.events("publish"))
            os.kill(next(each for each in tree if "VLLM::EngineCore" in " ".join(each.cmdline())).pid, signal.SIGKILL)
            wait_until(lambda: run.events("healed"), timeout_s=START_TIMEOUT_S)
            steps = len(run.metrics())
            wait_until(lambda: len(run.metrics()) > steps + 1, timeout_s=60)
            tree = psutil.Process(controller.pid).children(recursive=True)
            held = shared_memory(tree)
            assert held, "vLLM's processes share memory"
            controller.kill()
            wait_until(lambda: not alive(tree), timeout_s=10)
            assert not [path for path in held if path.exists()]
        finally:
            for process in (*alive(tree), controller):
                process.kill()


@pytest.mark.whole_run
def test_sigterm_to_all_processes_of_a_job_leaves_the_server_to_the_run_which_saves(tmp_path: Path, models: Models) -> None:
    run = SmallRun(tmp_path, models.folder())
    slow = {"rollout__reward": f"{REWARDS}:slow"}
    with start_offbeat("train", *run.arguments(**VLLM, **slow, run__total_steps="100000"), "--json") as controller:
        wait_until(lambda: len(run.metrics()) > 1 or controller.poll() is not None, timeout_s=START_TIMEOUT_S)
        assert controller.poll() is None, controller.communicate()
        tree = psutil.Process(controller.pid).children(recursive=True)
        assert any("VLLM::EngineCore" in " ".join(each.cmdline()) for each in tree)
        quarantined = len(run.events("quarantine"))
        try:
            for process in (*tree, psutil.Process(controller.pid)):
                process.terminate()
            _, stderr = controller.communicate(timeout=90)
            assert (controller.returncode, stderr) == (130, "")
            wait_until(lambda: not alive(tree), timeout_s=30)
        finally:
            for process in (*alive(tree), controller):
                process.kill()
    assert run.events("checkpoint")[-1]["global_step"] == run.metrics()[-1]["global_step"]
    assert run.events("quarantine")[quarantined:] == [] == run.events("failed")


@pytest.mark.parametrize("lora", [{}, {"model__lora__rank": "4"}], ids=["whole", "adapter"])
def test_a_run_whose_server_sleeps_while_the_rank_trains(tmp_path: Path, models: Models, lora: dict[str, str]) -> None:
    run = SmallRun(tmp_path, models.folder())
    patient = {"inference__probe_timeout_s": "120", "weights__switch_timeout_s": "120"}
    arguments = run.arguments(**VLLM, **patient, **lora, cluster__take_turns="true", run__total_steps="4")
    done = offbeat("train", *arguments, "--json", timeout_s=380)
    assert done.returncode == 0, done.stderr
    publishes = run.events("publish")
    assert [event["version"] for event in publishes] == [0, 1, 2, 3, 4]
    assert all(event["canary_gap"] < 1e-3 and not event["quarantined"] for event in publishes)
    assert len(run.events("slept")) == 4 and not run.events("engine_failed")
    assert all(row["rollout/staleness_max_versions"] <= 1 and row["turns/asleep_s"] > 0 for row in run.metrics())


@pytest.mark.whole_run
def test_a_run_publishes_only_changes_between_whole_versions(tmp_path: Path, models: Models) -> None:
    run = SmallRun(tmp_path, models.folder())
    changes = {
        "weights__whole_every_versions": "4", "weights__channel": "collective", "model__dtype": "bfloat16", "train__optimizer__lr": "1e-6"}
    done = offbeat("train", *run.arguments(**VLLM, **changes, run__total_steps="5"), "--json", timeout_s=380)
    assert done.returncode == 0, done.stderr
    publishes = run.events("publish")
    assert [event["version"] for event in publishes] == list(range(6))
    assert not any(event["quarantined"] or event["inconclusive"] for event in publishes)
    sizes = [event["num_bytes"] for event in publishes]
    assert sizes[0] == sizes[4] and all(size < sizes[0] / 4 for size in (*sizes[1:4], sizes[5]))
    assert not list((run.folder / "weights").glob("v*")), "nothing is written"


@pytest.mark.parametrize(("form", "settings"), [
    ("int8", {}),
    ("int4", {"model__dtype": "auto", "weights__channel": "collective", "weights__whole_every_versions": "3"}),
    ("fp8", {"model__dtype": "auto", "model__lora__rank": "4", "model__quantization": "int8"}),
], ids=["int8", "int4-changes", "fp8-adapter"])
def test_a_run_whose_server_rounds_weights_proves_each_version_and_shows_the_difference(
    tmp_path: Path, models: Models, form: str, settings: dict[str, str],
) -> None:
    run = SmallRun(tmp_path, models.folder())
    done = offbeat("train", *run.arguments(
        **VLLM, **settings, inference__quantization=form, rollout__max_head_offpolicyness="0", run__total_steps="3"), "--json",
        timeout_s=390)
    assert done.returncode == 0, done.stderr
    publishes = run.events("publish")
    assert [event["version"] for event in publishes] == [0, 1, 2, 3]
    assert not any(event["quarantined"] or event["inconclusive"] for event in publishes)
    gaps = [row["policy/logprob_gap_mean"] for row in run.metrics() if row.get("policy/logprob_gap_mean")]
    assert gaps and min(gaps) > 1e-4, "of samples of the newest version, which float32 has to 1e-6"
    assert any(f"rounded to {form}" in event["text"] and "corrects for it" in event["text"] for event in run.events("advice"))
