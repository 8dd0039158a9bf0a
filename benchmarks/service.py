"""The Tinker-compatible service: tokens per second of 1, 4 and 16 tenants that train and sample at once, through the public SDK.

All do the same work in all: 64 sequences are trained in one round and 64 sampled, by one tenant or spread over many; clients run in the
SDK's environment (`make test-tinker` makes it) and are not counted. Wall-clock time includes them; CPU seconds are those of the server with
its trainer and its engine.

    python benchmarks/service.py [--quick] [--repeats 3] [--tenants 1 4 16]
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psutil
from measure import BENCHMARKS, ROOT, WORK, Contestant, contest, emit, take_turns

from engine import ONE_THREAD, build

CLIENT_PYTHON = ROOT / ".venv-tinker" / "bin" / "python"
FOLDER = WORK / "service"
AIM = 0.9
NUM_SEQUENCES = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smoke run: one round of few steps")
    parser.add_argument("--repeats", type=int, default=3, help="rounds; the median counts (default: 3)")
    parser.add_argument("--tenants", type=int, nargs="+", default=[1, 4, 16], help="how many; the first is what others are compared with")
    args = parser.parse_args()
    if not CLIENT_PYTHON.exists():
        sys.exit(f"{CLIENT_PYTHON.parent.parent} is missing; make test-tinker installs it")
    repeats, steps = (1, 3) if args.quick else (args.repeats, 12)
    with serving(str(build("tiny"))) as (server, url):
        clients = Contestant("service_clients", [CLIENT_PYTHON, BENCHMARKS / "service_clients.py", url], env=ONE_THREAD)
        with contest([clients]):

            def side(tenants: int) -> Callable[[int], dict[str, float]]:
                def run(number: int) -> dict[str, float]:
                    before = cpu_s(server)
                    answer = clients.ask({"tenants": tenants, "steps": steps, "sequences": NUM_SEQUENCES // tenants, "seed": number}).values
                    spent = cpu_s(server) - before
                    return {
                        "trained tokens/s": answer["trained"] / answer["train_s"],
                        "sampled tokens/s": answer["sampled"] / answer["sample_s"],
                        "tokens/s": (answer["trained"] + answer["sampled"]) / answer["wall_s"],
                        "tokens/CPU-s": (answer["trained"] + answer["sampled"]) / spent}

                return run

            for tenants in args.tenants:
                clients.ask({"tenants": tenants, "steps": 1, "sequences": NUM_SEQUENCES // tenants, "seed": -1})  # the warm-up
            medians = take_turns({f"{n} tenants": side(n) for n in args.tenants}, repeats=repeats, what="service")
    first, *others = args.tenants
    for tenants in others:
        for unit, value in medians[f"{tenants} tenants"].items():
            aim = AIM if unit in ("tokens/s", "tokens/CPU-s") else None
            emit("service", f"{tenants} tenants vs {first}, {unit}", ours=value, peer=medians[f"{first} tenants"][unit], unit=unit, aim=aim)


@contextmanager
def serving(model: str) -> Iterator[tuple[psutil.Process, str]]:
    """`offbeat serve` on a free port."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    command = [
        sys.executable, "-m", "offbeat", "serve", "--model", model, "--model-name", "offbeat/tiny", "--port", "0",
        "--data-dir", str(FOLDER), "--max-lora-rank", "16"]
    with (WORK / "service.log").open("w") as log:
        process = subprocess.Popen(command, env=os.environ | ONE_THREAD, stdout=subprocess.PIPE, stderr=log, text=True, cwd=FOLDER)
    try:
        assert process.stdout is not None, "is a pipe"
        found = next((match for line in process.stdout if (match := re.search(r"http://[\w.]+:\d+", line))), None)
        if found is None:
            raise RuntimeError(f"the server did not start; see {WORK / 'service.log'}")
        yield psutil.Process(process.pid), found[0]
    finally:
        process.terminate()
        process.communicate()


def cpu_s(server: psutil.Process) -> float:
    """CPU seconds of the server and its workers."""
    times = [process.cpu_times() for process in [server, *server.children(recursive=True)]]
    return sum(each.user + each.system for each in times)


if __name__ == "__main__":
    main()
