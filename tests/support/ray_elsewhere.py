"""Starts workers on the Ray cluster at argv[1], with logs in the folder argv[2], and prints as JSON what came of it; see test_ray.py."""

import asyncio
import json
import sys
from pathlib import Path

from offbeat.errors import DeadlineError
from offbeat.workers.ray import RayLauncher
from offbeat.workers.worker import WorkerSpec


async def main(address: str, log_dir: Path) -> dict[str, object]:
    specs = [WorkerSpec(f"rank {rank}", "handlers:Echo", log_dir / f"rank-{rank}.log") for rank in range(4)]
    many = [WorkerSpec(f"engine {index}", "handlers:Echo", log_dir / "e.log", threads=2, num_devices=index % 2) for index in range(3)]
    found: dict[str, object] = {}
    async with RayLauncher(address=address, num_cpus=1, start_timeout_s=60, stop_timeout_s=20) as launcher:
        try:
            await launcher.reserve(many, timeout_s=1)
        except DeadlineError as exc:
            found["no room"] = str(exc)
        await launcher.reserve(specs, timeout_s=30)
        workers = await asyncio.gather(*(launcher.start(spec, timeout_s=60) for spec in specs))
        await asyncio.gather(*(worker.call("say", f"hello from {worker.name}".encode(), timeout_s=30) for worker in workers))
        found["nodes"] = [(await worker.call("env", b"OFFBEAT_TEST_NODE", timeout_s=30)).decode() for worker in workers]
        found["shares"] = [worker.disk is None for worker in workers]
        found["marked"] = len(list(log_dir.glob(".seen-*")))
    found["logs"] = [spec.log.read_text() for spec in specs if spec.log]
    found["left"] = [path.name for path in log_dir.iterdir() if path.suffix != ".log"]
    return found


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(sys.argv[1], Path(sys.argv[2])))))
