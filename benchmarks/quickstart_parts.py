"""Where the time of the quick start goes: seconds of its stages, and CPU seconds of each process in them.

    python benchmarks/quickstart_parts.py [--seed 0] [-- --run.total_steps 20 ...]

Stages are the start of the processes, the supervised warm-up with its evaluations, the steps, and what follows the last one. Steps overlap
with generation, so their own parts are listed, too: seconds in which the loop trained, waited for rollouts, published and evaluated.
"""

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from bisect import bisect_right
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

import psutil
from measure import WORK

LOOK_S = 0.1
ROLES = {"TrainWorker": "trainer", "EngineWorker": "engine", "RewardWorker": "rewards", "quickstart": "controller"}
"""Words of a process's command line, and what it is."""
PARTS = ("train_s", "rollout_wait_s", "publish_s", "evaluate_s")

Curves = dict[tuple[str, int], list[tuple[float, float]]]
"""By role and process id: (wall-clock time, CPU seconds until then), in order."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("settings", nargs="*", help="further settings of the run")
    args = parser.parse_args()
    folder, curves = WORK / "quickstart-parts", defaultdict(list)
    command = [sys.executable, "-m", "offbeat", "quickstart", "--run.dir", folder, "--run.seed", args.seed, *args.settings]
    begin_s, ended = time.time(), threading.Event()
    with subprocess.Popen(
            [str(word) for word in command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            env=os.environ | {"OMP_WAIT_POLICY": "passive"}) as process:
        thread = threading.Thread(target=look, args=(process.pid, curves, ended), daemon=True)
        thread.start()
        process.wait()
    end_s = time.time()
    ended.set()
    thread.join()
    newest = max(folder.glob("**/result.json"), key=lambda path: path.stat().st_mtime).parent
    report(newest, curves, begin_s=begin_s, end_s=end_s)


def look(pid: int, curves: Curves, ended: threading.Event) -> None:
    """Note the CPU seconds of all processes until `ended` is set."""
    root, roles = psutil.Process(pid), {}
    while not ended.wait(LOOK_S):
        with suppress(psutil.NoSuchProcess):
            for process in [root, *root.children(recursive=True)]:
                with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                    used = process.cpu_times()
                    if process.pid not in roles:  # one that has ended has no command line any more
                        words = " ".join(process.cmdline())
                        roles[process.pid] = next((role for word, role in ROLES.items() if word in words), "others")
                    curves[roles[process.pid], process.pid].append((time.time(), used.user + used.system))


def report(folder: Path, curves: Curves, *, begin_s: float, end_s: float) -> None:
    """Print the stages as a table, and the parts of the steps."""
    warm_up = [event for event in rows_of(folder / "events.jsonl") if event["kind"] == "sft_step"]
    rows = rows_of(folder / "metrics.jsonl")
    steps = [row for row in rows if "step/total_s" in row]
    warm_s = warm_up[0]["time_s"] - warm_up[0]["step/total_s"]
    bounds = {"start": warm_s, "warm-up": rows[0]["time_s"], "steps": steps[-1]["time_s"], "end": end_s}
    roles = sorted({role for role, _ in curves})
    print("| | s | " + " | ".join(f"{role}, CPU-s" for role in roles) + " |\n" + "|---" * (len(roles) + 2) + "|")
    for stage, until_s in bounds.items():
        used = [sum(cpu_between(curve, begin_s, until_s) for (of, _), curve in curves.items() if of == role) for role in roles]
        print(f"| {stage} | {until_s - begin_s:.1f} | " + " | ".join(f"{seconds:.1f}" for seconds in used) + " |")
        begin_s = until_s
    trained_s = sum(event["step/total_s"] for event in warm_up)
    print(f"{len(warm_up)} steps of the warm-up, {trained_s:.1f} s; {len(steps)} steps of reinforcement learning: " + ", ".join(
        f"{part} {sum(row.get(f'step/{part}', 0.0) for row in rows):.1f}" for part in PARTS))


def rows_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def cpu_between(curve: list[tuple[float, float]], begin_s: float, end_s: float) -> float:
    """Return the CPU seconds of a process between two moments of wall-clock time."""
    times = [moment for moment, _ in curve]

    def until(moment: float) -> float:
        index = bisect_right(times, moment)
        return curve[index - 1][1] if index else 0.0

    return until(end_s) - until(begin_s)


if __name__ == "__main__":
    main()
