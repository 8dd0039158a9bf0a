"""What ranks with weights in shards take up when they publish: each gets the tensors that it writes, against rank 0 getting all of them.

R processes hold a model in R shards over gloo, as a run with `train.parallel.shard = R` has them, and bring the weights in bfloat16 to who
writes them, in three ways:

    dealt     each rank gets whole tensors, about 1/R of the bytes (`offbeat.trainer.weight_exchange`), as publishes do
    rank 0    rank 0 is dealt all of them, as for exports and broadcasts
    gathered  every rank gathers each tensor in float32, and rank 0 keeps a copy of all, as releases did before

Of each it says the most bytes of tensors that live on a rank meanwhile, beside its shards, and the time of the slowest rank. Memory is
counted, and does not depend on what else the machine does; times do.

    python benchmarks/publish_ranks.py [--quick] [--model FOLDER] [--ranks 4] [--repeats 3]

The model is SmolLM2-135M of `make smollm2`, or the 27M of random weights where that is not there.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from forked_ranks import run_ranks
from measure import ROOT, emit, note
from torch.distributed.tensor import DTensor

from engine import build
from offbeat.config.root import Config
from offbeat.sync.mesh import MeshShape, ProcessGroups
from offbeat.trainer.memory import LiveBytes
from offbeat.trainer.model_trainer import ModelTrainer
from offbeat.trainer.state import full_state
from offbeat.trainer.weight_exchange import WeightExchange

SMOLLM2 = ROOT / ".models" / "smollm2-135m-instruct"
WAYS = ("dealt", "rank 0", "gathered")

Costs = dict[str, list[tuple[int, float]]]
"""Bytes and seconds of each time that a rank went each way."""


class OwnBytes(LiveBytes):
    """Tensors of this rank alone; one in shards looks as large as the whole."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smoke run: the tiny model on two ranks, once")
    parser.add_argument("--model", default="", help="a model folder")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3, help="of each way, after one that warms up (default: 3)")
    options = parser.parse_args()
    if options.quick:
        options.model, options.ranks, options.repeats = str(build("tiny")), 2, 1
    model = options.model or str(SMOLLM2 if SMOLLM2.exists() else build("27M"))
    answers = run_ranks(partial(compare, model=model, num_repeats=options.repeats), shape=MeshShape(1, shard=options.ranks))
    found, total = [costs for costs, _ in answers], answers[0][1]
    case = f"{Path(model).name} of {total / 1e6:.0f} MB, {options.ranks} ranks"
    ours = [figures(found, way) for way in WAYS]
    for way, (size, seconds) in zip(WAYS[1:], ours[1:], strict=True):
        emit("publish_ranks", f"{case}: memory of the rank with most, dealt vs {way}", ours=ours[0][0], peer=size, unit="bytes",
             less_is_better=True)
        emit("publish_ranks", f"{case}: time, dealt vs {way}", ours=ours[0][1], peer=seconds, unit="s", less_is_better=True)


def figures(found: list[Costs], way: str) -> tuple[int, float]:
    """The most bytes of any rank, and the median of the slowest rank's seconds."""
    rounds = list(zip(*(costs[way] for costs in found), strict=True))
    note(f"{way}: " + "; ".join(", ".join(f"{size / 1e6:.1f} MB {seconds:.2f} s" for size, seconds in ranks) for ranks in rounds))
    return max(size for ranks in rounds for size, _ in ranks), statistics.median(max(seconds for _, seconds in ranks) for ranks in rounds)


def compare(groups: ProcessGroups, *, model: str, num_repeats: int) -> tuple[Costs, int]:
    """Go all ways in turns; returns what this rank saw, and the size of all weights as they are published."""
    config = Config.model_validate({"model": {"path": model}, "train": {"num_ranks": groups.world, "parallel": {"shard": groups.world}}})
    trainer = ModelTrainer.build(model, config=config.for_ranks, groups=groups)
    exchange = WeightExchange.of(trainer.model, groups)  # pyright: ignore[reportArgumentType]
    assert exchange is not None, "the weights are in shards"
    ways: dict[str, Callable[[], object]] = {
        "dealt": lambda: exchange.state("bfloat16", range(groups.world)), "rank 0": lambda: exchange.state("bfloat16", [0]),
        "gathered": lambda: full_state(trainer.model, dtype="bfloat16", keep=groups.rank == 0)}
    costs: Costs = {way: [] for way in WAYS}
    for number in range(num_repeats + 1):
        for way, act in ways.items():
            with groups.sync.region("publish"):
                cost = measured(trainer, act)
            if number:
                costs[way].append(cost)
    return costs, exchange.num_bytes("bfloat16")


def measured(trainer: ModelTrainer, act: Callable[[], object]) -> tuple[int, float]:
    """Bytes and seconds of one time."""
    live = OwnBytes()
    for parameter in trainer.model.parameters():
        held = parameter.detach()
        assert isinstance(held, DTensor), "every weight is in shards"
        live.ignore(held.to_local())
    start = time.perf_counter()
    with live:
        act()
    return live.peak, time.perf_counter() - start


if __name__ == "__main__":
    main()
