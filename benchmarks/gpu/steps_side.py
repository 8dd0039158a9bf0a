"""What the sides of `steps.py` have in common. Standard library, torch and psutil only, because TRL's environment imports it too.

A side answers the job {"steps": n} with the seconds of each of n training steps, the largest amount of memory that it held during them, and
the norm of the last step's gradient before clipping. Between jobs it holds no more on the device than weights and moments.
"""

import json
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measure import answer_jobs, claim_stdout


def read_work() -> dict[str, Any]:
    """Return what `steps.make_work` wrote, from the file that the command names."""
    return json.loads(Path(sys.argv[1]).read_text())


def answer_steps(step: Callable[[], float], *, on_cpu: bool) -> None:
    """Answer jobs until stdin closes; `step` makes a training step and returns the norm of its gradient."""
    def run(job: dict[str, Any]) -> dict[str, Any]:
        begin_turn(on_cpu=on_cpu)
        seconds, norm = [], 0.0
        for _ in range(job["steps"]):
            began_s = now_s(on_cpu=on_cpu)
            norm = step()
            seconds.append(now_s(on_cpu=on_cpu) - began_s)
        return end_turn(seconds, norm, on_cpu=on_cpu)

    answer_jobs(claim_stdout(), run)


def now_s(*, on_cpu: bool) -> float:
    """Return the time at which the device has done all that it was told to do."""
    if not on_cpu:
        torch.accelerator.synchronize()  # noqa: TID251 - TRL's environment has no Offbeat
    return time.perf_counter()


def begin_turn(*, on_cpu: bool) -> None:
    """Look for the largest amount of memory from now on."""
    if not on_cpu:
        torch.accelerator.reset_peak_memory_stats()


def end_turn(seconds: list[float], norm: float, *, on_cpu: bool) -> dict[str, Any]:
    """Return the answer to a job, and give the device back what the other sides may need in their turns."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 if on_cpu else torch.accelerator.max_memory_allocated()
    if not on_cpu:
        torch.accelerator.empty_cache()
    return {"seconds": seconds, "peak_bytes": peak, "grad_norm": norm}
