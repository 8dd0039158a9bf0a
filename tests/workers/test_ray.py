"""Clusters of three raylets: room for all workers or none, runs on machines that do not see their folder, and raylets that die."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from ray.cluster_utils import Cluster

from small_run import ENVIRONMENT, SmallRun
from waiting import wait_until

SUPPORT = Path(__file__).parents[1] / "support"
HIDDEN_RUN = """
mount -t tmpfs none "$1"
"$2" -m ray.scripts.scripts start --address="$3" --num-cpus=2 --object-store-memory=134217728 --block > "$1/ray.log" 2>&1 &
ray=$!
shift 3
"$@" &
run=$!
trap 'kill -INT $run' TERM
wait $run; wait $run
code=$?
kill $ray
wait $ray
exit $code
"""
"""A node of two cores and a run that share a disk, which no other node sees."""
HIDDEN = 'mount -t tmpfs none "$1" && shift && exec "$@"'
"""Run in a mount namespace of its own, this gives a program a folder that no other process sees, as on another machine."""


def can_hide() -> bool:
    return subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode == 0


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Two cores on each of three nodes."""
    path = os.pathsep.join(filter(None, (str(SUPPORT), os.environ.get("PYTHONPATH"))))
    made = Cluster()
    try:
        for index in range(3):
            made.add_node(
                num_cpus=2, object_store_memory=1 << 27, include_dashboard=False,
                env_vars={"PYTHONPATH": path, "OFFBEAT_TEST_NODE": f"node {index}"})
        yield made
    finally:
        made.shutdown()


def elsewhere(cluster: Cluster, folder: Path, *before: str) -> dict[str, object]:
    program = [sys.executable, str(SUPPORT / "ray_elsewhere.py"), cluster.address, str(folder)]
    done = subprocess.run([*before, *program], capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.ray
def test_ranks_are_packed_onto_machines_and_logs_come_back_from_those_apart(cluster: Cluster, tmp_path: Path) -> None:
    hidden = can_hide()
    found = elsewhere(cluster, tmp_path, *(("unshare", "-m", "sh", "-c", HIDDEN, "sh", str(tmp_path)) if hidden else ()))
    assert found["no room"] == (
        "Ray found no room for engine 0 to engine 2 within 1 s: asked for 2 times 2 CPU, 2 CPU and 1 GPU, all at once, while the cluster"
        " has 3 machines (3 of 2 CPU), with 6 CPU free; add machines, lower the numbers of processes, devices or threads, or raise"
        " cluster.start_timeout_s or inference.start_timeout_s")
    nodes = found["nodes"]
    assert isinstance(nodes, list) and nodes[0] == nodes[1] != nodes[2] == nodes[3]
    assert found["shares"] == [not hidden] * 4 and found["marked"] == 1
    logs = found["logs"]
    assert isinstance(logs, list)
    assert all(log.count(f"hello from rank {rank}\n") == 1 for rank, log in enumerate(logs))
    assert found["left"] == []


@pytest.mark.ray
def test_a_run_whose_engine_sees_none_of_its_files_goes_on_when_the_engines_machine_dies_and_another_comes(
    tmp_path: Path, model_dir: str,
) -> None:
    if not can_hide():
        pytest.skip("this user may not mount")
    run = SmallRun(tmp_path, model_dir)
    settings = run.arguments(run__total_steps="100000", cluster__launcher="ray", train__threads="2", inference__probe_timeout_s="5")
    cluster = Cluster()
    hidden = None
    try:
        cluster.add_node(num_cpus=0, object_store_memory=1 << 27, include_dashboard=False)
        first = cluster.add_node(num_cpus=1, object_store_memory=1 << 27)
        hidden = subprocess.Popen(
            ["unshare", "-m", "sh", "-c", HIDDEN_RUN, "sh", str(tmp_path), sys.executable, cluster.address, sys.executable, "-m", "offbeat",
             "train", "/dev/null", *settings[1:], "--cluster.ray_address", cluster.address],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ | ENVIRONMENT, start_new_session=True)
        seen = SmallRun(Path("/proc", str(hidden.pid), "root", *tmp_path.parts[1:]), model_dir)  # the folder as that process sees it
        wait_until(lambda: hidden.poll() is not None or (seen.folder.exists() and len(seen.metrics()) > 1), timeout_s=100)
        assert hidden.poll() is None, hidden.communicate()[0]
        assert seen.events("broadcasts") and (seen.folder / "logs" / "engine-0.log").exists() and not run.folder.exists()
        cluster.remove_node(first, allow_graceful=False)
        cluster.add_node(num_cpus=1, object_store_memory=1 << 27)
        wait_until(lambda: hidden.poll() is not None or bool(seen.events("healed")), timeout_s=100)
        assert hidden.poll() is None, hidden.communicate()[0]
        steps = len(seen.metrics())
        wait_until(lambda: len(seen.metrics()) > steps + 1, timeout_s=60)
        hidden.terminate()
        output, _ = hidden.communicate(timeout=60)
        assert hidden.returncode == 130, output
    finally:
        if hidden is not None and hidden.poll() is None:
            os.killpg(hidden.pid, signal.SIGKILL)
        cluster.shutdown()


def alive(cluster: Cluster) -> set[str]:
    return {node["NodeID"] for node in cluster.global_state.node_table() if node["Alive"]}


class Machine:
    """A node of one core that has a folder of its own where the others have theirs."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        """Start it and wait until it has joined: nodes that start at the same moment would take the same names of sockets."""
        before = alive(cluster)
        self._process = psutil.Popen(
            ["unshare", "-m", "sh", "-c", HIDDEN, "sh", str(folder), sys.executable, "-m", "ray.scripts.scripts", "start",
             f"--address={cluster.address}", "--num-cpus=1", "--object-store-memory=134217728", "--block"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=os.environ | ENVIRONMENT, start_new_session=True)
        wait_until(lambda: alive(cluster) - before, timeout_s=100)

    def runs(self, worker: str) -> bool:
        """Whether this worker of a run lives here."""
        return any(worker in process.cmdline() for process in self._tree())

    def die(self) -> None:
        """Be gone at once."""
        tree = self._tree()
        for process in tree:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(tree, timeout=30)

    def _tree(self) -> list[psutil.Process]:
        try:
            return [process for process in (self._process, *self._process.children(recursive=True)) if process.is_running()]
        except psutil.NoSuchProcess:
            return []


@pytest.mark.ray
@pytest.mark.timeout(480)  # five raylets and two runs start, one after another
def test_a_lora_run_whose_ranks_and_engine_share_no_disk_is_resumed_when_their_machines_have_died(tmp_path: Path, model_dir: str) -> None:
    if not can_hide():
        pytest.skip("this user may not mount")
    cluster, machines, runs, output = Cluster(), [], [], tmp_path.with_name(f"{tmp_path.name}.txt")
    holder = subprocess.Popen(["unshare", "-m", "sh", "-c", HIDDEN, "sh", str(tmp_path), "cat"], stdin=subprocess.PIPE)
    seen = SmallRun(Path("/proc", str(holder.pid), "root", *tmp_path.parts[1:]), model_dir)  # the run's folder, as the controller sees it

    def add() -> None:
        machines.append(Machine(cluster, tmp_path))

    def kill_that_of(worker: str) -> None:
        machine = next(machine for machine in machines if machine.runs(worker))
        machine.die()
        machines.remove(machine)

    def start(**changes: str) -> subprocess.Popen[bytes]:
        settings = SmallRun(tmp_path, model_dir).arguments(
            cluster__launcher="ray", cluster__ray_address=cluster.address, cluster__scratch_dir=str(tmp_path / "scratch"),
            train__num_ranks="2", model__lora__rank="4", checkpoint__every_steps="2", inference__probe_timeout_s="5", **changes)
        runs.append(subprocess.Popen(
            ["nsenter", "-m", "-t", str(holder.pid), sys.executable, "-m", "offbeat", "train", "/dev/null", *settings[1:]],
            stdout=output.open("w"), stderr=subprocess.STDOUT, env=os.environ | ENVIRONMENT, start_new_session=True))
        return runs[-1]

    def wait_for(condition: Callable[[], object], run: subprocess.Popen[bytes]) -> None:
        wait_until(lambda: run.poll() is not None or condition(), timeout_s=150)
        assert run.poll() is None, output.read_text()

    def saved() -> list[str]:
        return sorted(path.parent.name for path in seen.folder.glob("checkpoints/step-*/complete.json"))

    try:
        cluster.add_node(num_cpus=0, object_store_memory=1 << 27, include_dashboard=False)
        for _ in range(3):
            add()
        first = start(run__total_steps="100000")
        wait_for(saved, first)
        assert seen.events("travels")[0]["text"].startswith("rank 0, rank 1 and engine 0 do not see the run's folder")
        assert {path.name for path in (seen.folder / "checkpoints" / saved()[-1] / "ranks").iterdir()} >= {".metadata", "__0_0.distcp"}
        kill_that_of("engine 0")
        add()
        wait_for(lambda: seen.events("healed"), first)
        steps = len(seen.metrics())
        wait_for(lambda: len(seen.metrics()) > steps + 2, first)
        kill_that_of("rank 1")
        ended, said = first.wait(timeout=60), output.read_text()
        assert ended == 1 and re.search("offbeat: rank 1 (died|cannot be reached)", said), said  # Ray may not know yet which of them it is
        newest, done = saved()[-1], len(seen.metrics())
        add()
        second = start(run__total_steps=str(done + 2))
        assert second.wait(timeout=150) == 0, output.read_text()
        assert seen.events("resumed")[-1]["global_step"] == int(newest.partition("-")[2])
        assert len(seen.metrics()) == done + 2 and saved()[-1] == f"step-{done + 2:08d}"
        export = {path.relative_to(seen.folder / "export").as_posix() for path in (seen.folder / "export").rglob("*")}
        assert export >= {"model.safetensors", "config.json", "tokenizer.json", "adapter/adapter_model.safetensors"}
        versions = list((seen.folder / "weights").iterdir())
        assert versions and all((version / "adapter_model.safetensors").exists() for version in versions)
        assert not list(seen.folder.rglob(".*arriving")) and not (seen.root / "scratch").exists()
        assert [path.name for path in tmp_path.iterdir()] == ["empty.toml"]  # written by the test: nothing has left a machine's own folder
    finally:
        for process in (*runs, holder):
            if process.poll() is None:
                process.kill()
        for machine in machines:
            machine.die()
        cluster.shutdown()
