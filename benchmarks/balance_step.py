"""Training two ranks on skewed lengths with `rollout.balance_batch` on and off, in turns: what balancing gains, predicted and measured.

    .venv/bin/python benchmarks/balance_step.py [--quick] [--repeats 7]

Each step is a group per prompt, one answer each, of lognormal(4.0, 0.9) tokens clipped to 16..512, in the order of their lengths, as
rollouts arrive; dealt in that order the second rank gets the long ones. Two sets of two ranks, one thread per rank, take turns with
the same batches and must come to the same losses. Prints one JSON line: median seconds per step of each, the gain measured on the wall
clock, the gain that the fitted cost model predicts, the seconds that ranks lose to the busiest one, and how even the predicted loads are.
"""

import argparse
import asyncio
import json
import time
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import median

import numpy as np
from measure import WORK, note

from engine import build
from offbeat.algorithms.objectives import policy_loss
from offbeat.config.algorithms import AlgorithmConfig
from offbeat.config.load import load_config
from offbeat.data.batch import Batch
from offbeat.ranks.ranks import WorkerRanks
from offbeat.ranks.trainers import Trainers
from offbeat.workers.local import LocalLauncher

NUM_RANKS = 2
WARM_UP = 2
VOCAB_SIZE = 49


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smoke run: fewer sequences, two rounds")
    parser.add_argument("--repeats", type=int, default=7, help="measured steps of each side (default: 7)")
    args = parser.parse_args()
    print(json.dumps(asyncio.run(compare(num_groups=32 if args.quick else 192, repeats=2 if args.quick else args.repeats))), flush=True)


async def compare(*, num_groups: int, repeats: int) -> dict[str, float | str]:
    """The figures of both sides."""
    folder = build("tiny")
    seen: dict[bool, list[dict[str, float]]] = {True: [], False: []}
    async with AsyncExitStack() as stack:
        launcher = await stack.enter_async_context(LocalLauncher(stop_timeout_s=5.0))
        sides = {balance: await start(launcher, folder, balance=balance) for balance in seen}
        for step in range(WARM_UP + repeats):
            batch = sorted_batch(num_groups, seed=step)
            for balance, group in sides.items():
                begin = time.perf_counter()
                metrics = await group.train_step(batch)
                metrics["s"] = time.perf_counter() - begin
                seen[balance].append(metrics)
                note(f"step {step} {'balanced' if balance else 'in order'}: {metrics['s']:.3f} s, lost {metrics['balance/lost_s']:.3f} s")
            on, off = (seen[balance][-1]["train/loss"] for balance in (True, False))
            assert abs(on - off) < 1e-4 * abs(off), f"the two sides compute different losses: {on} and {off}"
    return figures(seen[True][WARM_UP:], seen[False][WARM_UP:])


def figures(on: list[dict[str, float]], off: list[dict[str, float]]) -> dict[str, float | str]:
    """One line from the measured steps of both sides."""
    middle = {name: (median(step[name] for step in on), median(step[name] for step in off)) for name in on[0]}
    seconds = middle["s"]
    return {
        "benchmark": "balance_step", "case": f"{NUM_RANKS} ranks, tiny",
        "balanced_s": round(seconds[0], 4), "in_order_s": round(seconds[1], 4),
        "measured_gain": round(seconds[1] / seconds[0], 3), "predicted_gain": round(middle["balance/predicted_gain"][0], 3),
        "lost_balanced_s": round(middle["balance/lost_s"][0], 4), "lost_in_order_s": round(middle["balance/lost_s"][1], 4),
        "gap": round(middle["balance/gap"][0], 6), "cov_before": round(middle["balance/cov_before"][0], 4),
        "cov_after": round(middle["balance/cov_after"][0], 6)}


async def start(launcher: LocalLauncher, folder: Path, *, balance: bool) -> Trainers:
    """Two ranks of the tiny model."""
    config = load_config(None, [
        ("model.path", str(folder)), ("train.num_ranks", str(NUM_RANKS)), ("train.threads", "1"),
        ("train.max_tokens_per_microbatch", "4096"), ("train.optimizer.lr", "1e-4"), ("rollout.balance_batch", str(balance).lower())])
    log_dir = WORK / f"balance-{'on' if balance else 'off'}"
    log_dir.mkdir(parents=True, exist_ok=True)
    ranks = await WorkerRanks.start(launcher, config.for_ranks, model=str(folder), build=None, log_dir=log_dir)
    trainers = Trainers(ranks, config.for_ranks)
    await trainers.restart_optimizer(config.train.optimizer, total_steps=1000)
    return trainers


def sorted_batch(num_groups: int, *, seed: int) -> Batch:
    """Random sequences from the shortest to the longest; all tokens but the first are scored."""
    rng = np.random.default_rng(seed)
    lengths = np.sort(rng.lognormal(4.0, 0.9, num_groups).astype(np.int64).clip(16, 512))
    mask = np.concatenate([np.arange(length) > 0 for length in lengths])
    columns = {
        "rollout_logprobs": np.full(len(mask), -np.log(VOCAB_SIZE)), "loss_weights": mask / mask.sum(),
        "advantages": np.repeat(rng.standard_normal(num_groups), lengths)}
    return Batch.of_next_tokens(
        rng.integers(3, VOCAB_SIZE, len(mask)), mask, lengths=lengths, columns=columns, losses=(policy_loss(AlgorithmConfig()),))


if __name__ == "__main__":
    main()
