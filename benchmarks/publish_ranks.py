"""What ranks with weights in shards take up while they publish: the version written by all of them, against rank 0 writing all of it.

R ranks hold a model in R shards, as a run with `train.parallel.shard = R` has them, and publish it in bfloat16 to a folder. Of each rank it
says the bytes of the file that it wrote, and by how much its memory rose above what it had before, as the system counts it (VmHWM). The
peer is an export of the same weights, which rank 0 writes alone. That an exchange moves no more than a rank's share is counted in
tests/trainer/test_parts.py.

    python benchmarks/publish_ranks.py [--quick] [--model FOLDER] [--ranks 4] [--publishes 3]

Needs Linux. The model is SmolLM2-135M of `make smollm2`, or the 27M of random weights where that is not there.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from measure import ROOT, WORK, emit, note

from engine import build
from offbeat.config.root import Config
from offbeat.process.child import Child
from offbeat.ranks.ranks import WorkerRanks
from offbeat.ranks.trainers import Trainers
from offbeat.workers.local import LocalLauncher

SMOLLM2 = ROOT / ".models" / "smollm2-135m-instruct"
CANARY = tuple(range(3, 19))


@dataclass(frozen=True)
class Cost:
    """One write of all weights: seconds, and bytes by which each rank's memory rose."""

    seconds: float
    rises: tuple[int, ...]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smoke run: the tiny model on two ranks, one publish")
    parser.add_argument("--model", default="", help="a model folder")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--publishes", type=int, default=3, help="of each kind, after one that warms up (default: 3)")
    options = parser.parse_args()
    if options.quick:
        options.model, options.ranks, options.publishes = str(build("tiny")), 2, 1
    model = options.model or str(SMOLLM2 if SMOLLM2.exists() else build("27M"))
    asyncio.run(measure(model, num_ranks=options.ranks, num_publishes=options.publishes))


async def measure(model: str, *, num_ranks: int, num_publishes: int) -> None:
    """Publish and export in turns."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as shm:
        config = Config.model_validate({
            "run": {"dir": shm, "name": "publish"}, "model": {"path": model, "dtype": "bfloat16"},
            "train": {"num_ranks": num_ranks, "threads": 1, "parallel": {"shard": num_ranks}},
            "weights": {"stage_timeout_s": 300}, "dist": {"sync_timeout_s": 300}, "cluster": {"start_timeout_s": 400}})
        async with LocalLauncher(stop_timeout_s=5) as launcher:
            ranks = await WorkerRanks.start(launcher, config, model=model, build=None, log_dir=WORK)
            trainers = Trainers(ranks, config)
            processes = [worker.pid for worker in ranks.workers if isinstance(worker, Child)]
            together, alone, sizes, total = list[Cost](), list[Cost](), [0], 0
            for version in range(num_publishes + 1):
                folder = config.weights_dir / f"v{version:08d}"
                written = await cost(processes, lambda: trainers.write_weights(version, folder, canary=CANARY))  # noqa: B023
                exported = await cost(processes, lambda: trainers.export(folder.with_name("export"), tokenizer=model))  # noqa: B023
                sizes = [file.stat().st_size for file in folder.glob("*.safetensors")]
                total = sum(file.stat().st_size for file in folder.with_name("export").glob("*.safetensors"))
                if version:
                    together.append(written)
                    alone.append(exported)
                    note(f"by all {written}, by rank 0 {exported}, files {sizes}")
    case = f"{Path(model).name}, {num_ranks} ranks"
    emit("publish_ranks", f"{case}: largest file, by all vs rank 0", ours=max(sizes), peer=total, unit="bytes", less_is_better=True)
    emit("publish_ranks", f"{case}: rise of memory, of the rank with most, by all vs rank 0", ours=highest(together), peer=highest(alone),
         unit="bytes", less_is_better=True)
    emit("publish_ranks", f"{case}: time, by all vs rank 0", ours=statistics.median(one.seconds for one in together),
         peer=statistics.median(one.seconds for one in alone), unit="s", less_is_better=True)


def highest(costs: Sequence[Cost]) -> float:
    """The median over publishes of what the rank with the largest rise took."""
    return statistics.median(max(cost.rises) for cost in costs)


async def cost(processes: Sequence[int], act: Callable[[], Awaitable[object]]) -> Cost:
    """Let the ranks do something, and look at their memory."""
    for pid in processes:
        Path(f"/proc/{pid}/clear_refs").write_text("5")  # the high-water mark begins anew
    before = [resident(pid, "VmRSS") for pid in processes]
    start = time.perf_counter()
    await act()
    seconds = time.perf_counter() - start
    return Cost(seconds, tuple(resident(pid, "VmHWM") - had for pid, had in zip(processes, before, strict=True)))


def resident(pid: int, name: str) -> int:
    """Bytes that /proc says of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


if __name__ == "__main__":
    main()
