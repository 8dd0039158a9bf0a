"""Run a function of a test module in several rank processes that share one store; used by the tests of dist, trainer and checkpoint.

As a script it is a parent of ranks: it has imported what ranks import, and forks one for each `start` that it reads, so that a rank begins
at once and not with five seconds of imports. In every other way a rank is a process of its own. There are two parents, for even and for
odd ranks, whose strings have different hashes: what depends on the order of a set differs between neighbours in every run.
"""

import atexit
import gc
import importlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from functools import cache
from pathlib import Path

from offbeat.config.dist import DistConfig
from offbeat.process.serving import die_with_parent
from offbeat.sync.links import MeetingPlace
from offbeat.sync.mesh import connect_store, host_store, join, leave
from waiting import wait_until

CONFIG = DistConfig(init_timeout_s=60, answer_timeout_s=3, collective_timeout_s=60)
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
NUM_PARENTS = 2


def run_ranks(function, *, world, argument=None, check=True, rank_0_hosts=False):
    """Call `function(groups, argument)` in `world` processes; return what each gave, by rank, or its error text if not `check`."""
    store = None if rank_0_hosts else host_store(60)
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder) / f"{rank}.json" for rank in range(world)]
        parents = [_parent(rank % NUM_PARENTS) for rank in range(world)]
        started = []
        try:
            for rank, (parent, output) in enumerate(zip(parents, outputs, strict=True)):
                call = [function.__code__.co_filename, function.__name__, rank, world, store.port if store else 0, argument, str(output)]
                started.append((parent, parent.ask("start", call, os.environ | ENVIRONMENT, str(output.with_suffix(".log")))))
            wait_until(lambda: all(parent.ask("has_ended", pid) for parent, pid in started), timeout_s=180)
        finally:
            codes = [parent.ask("end", pid) for parent, pid in started]
        errors = [output.with_suffix(".log").read_text() for output in outputs]
        if check:
            for rank, code in enumerate(codes):
                assert code == 0, f"rank {rank} failed:\n{errors[rank][-3000:]}"
        return [json.loads(output.read_text()) if output.exists() else errors[rank] for rank, output in enumerate(outputs)]


class _Parent:
    """The near end of a parent, which ends at the end of its input, and so with this process."""

    def __init__(self, number):
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=os.environ | ENVIRONMENT | {"PYTHONHASHSEED": str(number)})
        atexit.register(self._process.communicate)

    def ask(self, *request):
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())


_parent = cache(_Parent)


def run_alone(function, *, argument=None):
    """Call `function(groups, argument)` in this process, as the only rank."""
    groups = join(rank=0, world=1, place=MeetingPlace(host_store(60)), config=CONFIG)
    try:
        return function(groups, argument)
    finally:
        leave()


def meet(rank, port, folder):
    """The store of this run's ranks; without a port, rank 0 hosts it and writes its port into `folder`."""
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


def play(file, name, rank, world, port, argument, output):
    """Be a rank."""
    spec = importlib.util.spec_from_file_location("test_module", file)
    module = importlib.util.module_from_spec(spec)
    sys.modules["test_module"] = module
    spec.loader.exec_module(module)
    store = meet(rank, port, Path(output).parent)
    groups = join(rank=rank, world=world, place=MeetingPlace(store), config=CONFIG)
    result = getattr(module, name)(groups, argument)
    Path(output).write_text(json.dumps(result))
    leave()


def main():
    """Be a parent. It returns at the end of its input, and a rank when it has been played: it ends as a script does."""
    gc.disable()
    for name in ("offbeat.trainer.worker", "hypothesis", "pytest"):
        importlib.import_module(name)
    gc.freeze()
    gc.enable()
    assert threading.active_count() == 1, "a fork takes no thread along"
    children = set()
    for line in sys.stdin:
        verb, *arguments = json.loads(line)
        if verb == "start":
            call, environment, log = arguments
            parent = os.getpid()
            if (pid := os.fork()) == 0:
                die_with_parent(parent)
                _take(environment, log)
                play(*call)
                return
            children.add(answer := pid)
        elif verb == "has_ended":
            answer = _has_ended(*arguments)
        else:
            children.remove(*arguments)
            answer = _end(*arguments)
        print(json.dumps(answer), flush=True)
    for pid in children:
        _end(pid)


def _take(environment, log):
    """Give this rank an environment of its own, nothing to read, and a file to write to."""
    os.environ.clear()
    os.environ.update(environment)
    for descriptor, (path, flags) in enumerate([(os.devnull, os.O_RDONLY), (log, os.O_WRONLY | os.O_CREAT), (log, os.O_WRONLY)]):
        os.dup2(os.open(path, flags | os.O_APPEND), descriptor)


def _has_ended(pid):
    """Without collecting it: its peers read from what is left of it how it ended."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None


def _end(pid):
    """Kill a rank, if it has not ended, and return its exit code, or its signal as a negative number."""
    os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


if __name__ == "__main__":
    main()
