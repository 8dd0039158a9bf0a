"""Run a function of a test module in several rank processes that share one store; used by the tests of dist, trainer and checkpoint.

As a script it is one of those processes: `ranks.py FILE FUNCTION RANK WORLD PORT ARGUMENT OUTPUT`, with port 0 to have rank 0 host the
store and write its port beside the output.
"""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from offbeat.config.dist import DistConfig
from offbeat.sync.mesh import connect_store, host_store, join, leave
from waiting import wait_until

CONFIG = DistConfig(init_timeout_s=60, answer_timeout_s=3, collective_timeout_s=60)
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}


def run_ranks(function, *, world, argument=None, check=True, rank_0_hosts=False):
    """Call `function(groups, argument)` in `world` processes; return what each gave, by rank, or its error text if not `check`."""
    store = None if rank_0_hosts else host_store(60)
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder) / f"{rank}.json" for rank in range(world)]
        processes = [
            subprocess.Popen(
                [sys.executable, __file__, function.__code__.co_filename, function.__name__,
                 str(rank), str(world), str(store.port if store else 0), json.dumps(argument), str(output)],
                env=os.environ | ENVIRONMENT, stderr=output.with_suffix(".log").open("w"))
            for rank, output in enumerate(outputs)]
        try:
            wait_until(lambda: all(map(_has_ended, processes)), timeout_s=180)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        errors = [output.with_suffix(".log").read_text() for output in outputs]
        if check:
            for rank, process in enumerate(processes):
                assert process.returncode == 0, f"rank {rank} failed:\n{errors[rank][-3000:]}"
        return [json.loads(output.read_text()) if output.exists() else errors[rank] for rank, output in enumerate(outputs)]


def _has_ended(process):
    """Without collecting it: its peers read from what is left of it how it ended."""
    return process.returncode is not None or os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None


def run_alone(function, *, argument=None):
    """Call `function(groups, argument)` in this process, as the only rank."""
    groups = join(rank=0, world=1, store=host_store(60), config=CONFIG)
    try:
        return function(groups, argument)
    finally:
        leave()


def meet(rank, port, folder):
    """The store of this run's ranks."""
    if port:
        return connect_store("127.0.0.1", port, timeout_s=60)
    note = folder / "port"
    if rank == 0:
        store = host_store(60)
        (folder / "port.part").write_text(str(store.port))
        (folder / "port.part").rename(note)
        return store
    wait_until(note.exists, timeout_s=60)
    return connect_store("127.0.0.1", int(note.read_text()), timeout_s=60)


def main():
    file, name, rank, world, port, argument, output = sys.argv[1:]
    spec = importlib.util.spec_from_file_location("test_module", file)
    module = importlib.util.module_from_spec(spec)
    sys.modules["test_module"] = module
    spec.loader.exec_module(module)
    store = meet(int(rank), int(port), Path(output).parent)
    groups = join(rank=int(rank), world=int(world), store=store, config=CONFIG)
    result = getattr(module, name)(groups, json.loads(argument))
    Path(output).write_text(json.dumps(result))
    leave()


if __name__ == "__main__":
    main()
