"""The cost of a run's journal, and of a checkpoint for every step instead: the quick start's steps, paired, medians of several runs.

    python benchmarks/journal.py [--steps 60] [--times 3] [--kinds none journal] [CONFIG]

Runs alternate between no journal, a journal, and a checkpoint for every step. For each it prints seconds per step, CPU-seconds of all
processes and of the journal's thread per step, and the bytes of the journal per step and of a checkpoint. The last lines have the shares of
a step: of the journal's thread, and what each kind takes more than the run without a journal before it, median and range of the pairs. A
model of Hugging Face is named by its example, `examples/smollm2_arithmetic.toml` after `make smollm2`.
"""

import argparse
import json
import resource
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from offbeat.telemetry.jsonl import read_json_lines

EXAMPLE = Path(__file__).parents[1] / "examples" / "sort_digits.toml"
KINDS = {
    "none": ("--checkpoint.journal", "false", "--checkpoint.every_steps", "0"),
    "journal": ("--checkpoint.journal", "true", "--checkpoint.every_steps", "0"),
    "checkpoints": ("--checkpoint.journal", "false", "--checkpoint.every_steps", "1"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", nargs="?", default=str(EXAMPLE))
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    args = parser.parse_args()
    found: dict[str, list[dict[str, Any]]] = {kind: [] for kind in args.kinds}
    for _ in range(args.times):
        for kind in args.kinds:
            found[kind].append(measure(kind, args.config, steps=args.steps))
            print(kind, json.dumps(found[kind][-1]), flush=True)
    for kind, runs in found.items():
        print(kind, json.dumps({name: median(run[name] for run in runs) for name in runs[0]}))
    for kind, runs in found.items():
        if kind == "journal":
            print(f"the journal's thread: {median(run['thread_cpu_s'] / run['step_s'] for run in runs):.2%} of a step's time")
        if kind != "none" and "none" in found:
            for name in ("step_s", "cpu_s"):
                more = sorted(run[name] / without[name] - 1 for run, without in zip(runs, found["none"], strict=True))
                print(f"{kind}: {median(more):+.2%} of {name}, {more[0]:+.2%} to {more[-1]:+.2%}")


def measure(kind: str, config: str, *, steps: int) -> dict[str, Any]:
    """Do one run, and return its figures per step."""
    root = Path(tempfile.mkdtemp(prefix="journal-"))
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    try:
        subprocess.run(
            [sys.executable, "-m", "offbeat", "train", config, "--run.dir", str(root), "--name", "run", "--run.total_steps", str(steps),
             "--run.warm_up", "false", "--evaluate.every_steps", "0", "--checkpoint.every_minutes", "0", "--checkpoint.export", "false",
             *KINDS[kind]], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        rows = [row for row in read_json_lines(root / "run" / "metrics.jsonl") if row["global_step"]]
        written = [event for event in read_json_lines(root / "run" / "events.jsonl") if event["kind"] == "journal_written"]
        thread = written[-1] if written else {"num_bytes": 0, "cpu_s": 0.0}
        saved = sum(path.stat().st_size for path in (root / "run" / "checkpoints" / f"step-{steps:08d}").rglob("*") if path.is_file())
        times = [event["time_s"] for event in read_json_lines(root / "run" / "events.jsonl") if event["kind"] == "publish"]
        return {
            "step_s": round((times[-1] - times[3]) / (len(times) - 4), 4), "train_s": round(median(row["step/train_s"] for row in rows), 4),
            "cpu_s": round((after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) / steps, 4),
            "thread_cpu_s": round(thread["cpu_s"] / steps, 5), "journal_bytes": thread["num_bytes"] // steps, "checkpoint_bytes": saved}
    finally:
        shutil.rmtree(root)


if __name__ == "__main__":
    main()
