"""Our trainer against a plain training loop of transformers, on sequences of equal length, where packing rows gains nothing.

One whole step (forward, backward, AdamW) in float32 on 16 sequences of 64 tokens, all but the first scored: `ModelTrainer`, against
`AutoModelForCausalLM` with torch's cross entropy and fused AdamW, as a tutorial has it. Both come to the same loss at first. Figures are
CPU seconds per step of the tiny, the 27M and the SmolLM2 model, in turns, on one thread.

    python benchmarks/plain_loop.py [--quick] [--repeats 3] [--model .models/smollm2-135m-instruct]
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from measure import ROOT, emit, take_turns
from packing import LOSS_TOLERANCE, OPTIMIZER, Step, groups_of_one, make_batch, packed_step
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from engine import build
from offbeat.data.batch import Batch

AIM = 1.1
NUM_SEQUENCES, LENGTH = 16, 64
STEPS = {"tiny": 10, "27M": 2, "SmolLM2-135M": 1}
"""Models, and the steps that are timed together."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smoke run: the tiny model, one round")
    parser.add_argument("--repeats", type=int, default=3, help="rounds; the median counts (default: 3)")
    parser.add_argument("--model", type=Path, default=ROOT / ".models" / "smollm2-135m-instruct")
    args = parser.parse_args()
    torch.set_num_threads(1)
    names = ["tiny"] if args.quick else list(STEPS)
    ones = np.ones(NUM_SEQUENCES, np.int64)
    batch = make_batch(LENGTH * ones, ones, np.arange(NUM_SEQUENCES), shared=0 * ones)
    with groups_of_one() as groups:
        for name in names:
            folder = args.model if name == "SmolLM2-135M" else build(name)
            ours = packed_step("tiny", folder, batch, groups=groups, share_prefix=False)  # "tiny" is for float32
            sides = {"ours": ours, "plain": plain_step(folder, batch)}
            losses = {side: step() for side, step in sides.items()}  # also the warm-up
            assert np.ptp(list(losses.values())) < LOSS_TOLERANCE["tiny"], f"the steps compute different losses: {losses}"
            seconds = take_turns(
                {side: timed(step, STEPS[name]) for side, step in sides.items()}, repeats=1 if args.quick else args.repeats, what=name)
            emit("plain_loop", f"{name} vs a plain loop", ours=seconds["ours"]["CPU-s"], peer=seconds["plain"]["CPU-s"], unit="CPU-s/step",
                 aim=AIM, less_is_better=True)


def plain_step(folder: Path, batch: Batch) -> Step:
    """The usual step; returns the loss."""
    net = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(net.parameters(), lr=OPTIMIZER.lr, betas=(OPTIMIZER.beta1, OPTIMIZER.beta2), weight_decay=0.0, fused=True)
    tokens = torch.tensor(batch.tokens.astype(np.int64)).view(NUM_SEQUENCES, LENGTH)

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        logits = net(input_ids=tokens, use_cache=False).logits
        loss = cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def timed(step: Step, count: int) -> Callable[[int], dict[str, float]]:
    """A side of `take_turns`."""

    def run(_round: int) -> dict[str, float]:
        start = time.process_time()
        for _ in range(count):
            step()
        return {"CPU-s": (time.process_time() - start) / count}

    return run


if __name__ == "__main__":
    main()
