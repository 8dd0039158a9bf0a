"""Training in an environment that waits: asynchronous against synchronous, with the same model, batch and waits.

The environment (`waiting_turns.py`) takes 4 turns, and 1 s with a spread of 1 s over each. A synchronous step lasts as long as the longest
of its episodes; asynchronous ones tend to the mean over all that run at the same time. Both sides start from the checkpoint of `step.py`,
draw the same prompts, --batch per step with 8 samples each; they differ in `rollout.max_head_offpolicyness`, 0 or 4, and in
`rollout.max_concurrent_rollouts`, which has room for what that allows. A step on older samples teaches less, so the asynchronous side takes
twice as many: what counts is what it has learnt when, not in how many steps.

Figures: episodes that were trained on per second, without the first and the last steps, in which the pipeline fills and empties;
held-out accuracy after all steps, by `offbeat eval`, and the seconds that they took; the share of time in which an engine had a request;
and the mean age of what was trained on, in versions, against the most that is allowed.

    python benchmarks/async_env.py [--quick] [--steps 40] [--batch 32] [--wait 1.0]
"""

import argparse
import json
import os
import shutil
from functools import partial
from pathlib import Path
from statistics import mean

from measure import BENCHMARKS, WORK, emit, take_turns
from step import START, accuracy, offbeat, warm_up

AIM = 3.0
GROUP_SIZE, MOST_BEHIND, TIMES_AS_MANY = 8, 4, 2
RUNS = WORK / "async_env"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smoke run: 12 steps of 8 prompts, waits of 0.2 s")
    parser.add_argument("--steps", type=int, default=40, help="training steps of the synchronous side (default: 40)")
    parser.add_argument("--batch", type=int, default=32, help="prompts per step (default: 32)")
    parser.add_argument("--wait", type=float, default=1.0, help="mean and spread of a wait, in seconds (default: 1)")
    args = parser.parse_args()
    if args.quick:
        args.steps, args.batch, args.wait = 12, 8, 0.2
    if args.steps < 4 * MOST_BEHIND - 4:
        parser.error(f"--steps must be at least {4 * MOST_BEHIND - 4}, so that some are neither the first nor the last")
    warm_up()
    shutil.rmtree(RUNS, ignore_errors=True)
    RUNS.mkdir(parents=True)
    more = TIMES_AS_MANY * args.steps
    sides = {"asynchronous": partial(train, args, MOST_BEHIND, more), "synchronous": partial(train, args, 0, args.steps)}
    results = take_turns(sides, repeats=1, what=f"{more} and {args.steps} steps,")
    ours, peer = results["asynchronous"], results["synchronous"]
    case = f"{MOST_BEHIND} versions behind vs 0"
    emit("async_env", f"episodes, {case}", ours=ours["episodes/s"], peer=peer["episodes/s"], unit="episodes/s", aim=AIM)
    steps = f"{more} steps, {MOST_BEHIND} versions behind, vs {args.steps}, 0 behind"
    emit("async_env", f"held-out accuracy after {steps}", ours=ours["accuracy"], peer=peer["accuracy"], unit="accuracy")
    emit("async_env", f"time of {steps}", ours=ours["seconds"], peer=peer["seconds"], unit="s", less_is_better=True)
    emit("async_env", f"engine busy, {case}", ours=ours["busy"], peer=peer["busy"], unit="share")
    emit("async_env", "mean age of what is trained on vs the most allowed", ours=ours["staleness"], peer=MOST_BEHIND, unit="versions",
         less_is_better=True)


def train(args: argparse.Namespace, most_behind: int, steps: int, turn: int) -> dict[str, float]:
    """`offbeat train` with tokens at most this many versions behind."""
    name = f"behind-{most_behind}-{turn}"
    log = RUNS / f"{name}.jsonl"
    os.environ.update(OFFBEAT_WAITING_LOG=str(log), OFFBEAT_WAITING_MEAN_S=str(args.wait))
    offbeat(
        "train", "--run.dir", RUNS, "--run.name", name, "--run.warm_up", "false", "--run.total_steps", steps, "--model.path", START,
        "--evaluate.every_steps", 0, "--rollout.workflow", f"{BENCHMARKS / 'waiting_turns.py'}:waiting_turns",
        "--rollout.group_size", GROUP_SIZE, "--rollout.consumer_batch_size", args.batch, "--rollout.max_head_offpolicyness", most_behind,
        "--rollout.max_concurrent_rollouts", args.batch * (most_behind + 1))
    rows = [row for row in read(RUNS / name / "metrics.jsonl") if "step/total_s" in row]
    first, last = MOST_BEHIND, len(rows) - MOST_BEHIND - 1
    seen = read(log)
    began, ended = seen[len(seen) // 4], seen[-len(seen) // 4]
    return {
        "episodes/s": (last - first) * args.batch * GROUP_SIZE / (rows[last]["time_s"] - rows[first]["time_s"]),
        "seconds": sum(row["step/total_s"] for row in rows),
        "accuracy": accuracy(RUNS / name / "export"),
        "busy": (ended["busy_s"] - began["busy_s"]) / (ended["total_s"] - began["total_s"]),
        "staleness": mean(row["rollout/staleness_mean_versions"] for row in rows[first:last])}


def read(path: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


if __name__ == "__main__":
    main()
