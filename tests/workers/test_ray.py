"""Clusters of three raylets: room for all workers or none, logs from machines that do not see the run's folder, and a raylet that dies."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

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
