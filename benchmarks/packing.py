"""Training on skewed lengths: packed rows against padded batches, and shared prompts against repeated ones.

Packing: one whole training step (forward, backward, AdamW) on sequences of lognormal(4.0, 0.9) tokens, clipped to 16..512, through
`ModelTrainer` with packed rows and no shared prefixes, against the same model under transformers' sdpa attention in random-order batches of
8 with padding. Both score every token but the first of each sequence, and must come to the same loss. The 27M model computes in bfloat16
autocast, the tiny one in float32. Sharing: our step on groups of 8 answers to one prompt, with `share_prefix` on against off.
Figures are seconds per step, alternating, on one process with --threads threads.

    python benchmarks/packing.py [--quick] [--repeats 5] [--threads 1]
"""

import argparse
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from measure import emit, take_turns
from torch.nn.functional import cross_entropy

from engine import build
from offbeat.algorithms.adam import adam_params
from offbeat.algorithms.objectives import CROSS_ENTROPY
from offbeat.config.dist import DistConfig
from offbeat.config.root import Config
from offbeat.config.train import OptimizerConfig
from offbeat.data.batch import Batch, SharedPrompts
from offbeat.data.packing import plan_microbatches
from offbeat.model.load import load_causal_lm
from offbeat.sync.links import MeetingPlace
from offbeat.sync.mesh import ProcessGroups, host_store, join, leave
from offbeat.trainer.messages import TrainStep
from offbeat.trainer.model_trainer import ModelTrainer

AIM = 1.8
PADDED_BATCH = 8
GROUP_SIZE = 8
OPTIMIZER = OptimizerConfig(lr=1e-4, clip_norm=0.0)
LOSS_TOLERANCE = {"tiny": 1e-4, "27M": 2e-2}
VOCAB_SIZE = 49
"""Token ids are drawn from these in both models, so that the losses are of like size."""

Step = Callable[[], float]


def main() -> None:
    sizes, repeats = read_arguments(__doc__)
    with groups_of_one() as groups:
        for model, count in sizes.items():
            folder = build(model)
            compare_packing(model, folder, skewed_batch(count), groups=groups, repeats=repeats)
            compare_sharing(model, folder, grouped_batch(count // GROUP_SIZE), groups=groups, repeats=repeats)


def read_arguments(text: str | None) -> tuple[dict[str, int], int]:
    """Number of sequences by model, and rounds, as the command says; also sets the number of threads."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smoke run: the tiny model, fewer sequences, two rounds")
    parser.add_argument("--repeats", type=int, default=5, help="rounds; the median counts (default: 5)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default: 1)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    return ({"tiny": 32}, 2) if args.quick else ({"tiny": 128, "27M": 32}, args.repeats)


def compare_packing(model: str, folder: Path, batch: Batch, *, groups: ProcessGroups, repeats: int) -> None:
    """Packed against padded."""
    packed = packed_step(model, folder, batch, groups=groups, share_prefix=False)
    padded = padded_step(model, folder, batch)
    losses = packed(), padded()  # also the warm-up
    assert abs(losses[0] - losses[1]) < LOSS_TOLERANCE[model], f"the two steps compute different losses: {losses}"
    seconds = take_turns({"packed": timed(packed), "padded": timed(padded)}, repeats=repeats, what=f"{model}, {batch.num_tokens} tokens,")
    emit("packing", f"{model} packed vs padded batches of {PADDED_BATCH}", ours=seconds["packed"]["s"], peer=seconds["padded"]["s"],
         unit="s/step", aim=AIM, less_is_better=True)


def compare_sharing(model: str, folder: Path, batch: Batch, *, groups: ProcessGroups, repeats: int) -> None:
    """Prompts once per group against once per answer; both packed."""
    shared = packed_step(model, folder, batch, groups=groups, share_prefix=True)
    repeated = packed_step(model, folder, batch, groups=groups, share_prefix=False)
    losses = shared(), repeated()
    assert abs(losses[0] - losses[1]) < LOSS_TOLERANCE[model], f"the two steps compute different losses: {losses}"
    seconds = take_turns(
        {"shared": timed(shared), "repeated": timed(repeated)}, repeats=repeats, what=f"{model}, {batch.num_tokens} tokens,")
    emit("packing", f"{model} prompts shared by groups of {GROUP_SIZE} vs repeated", ours=seconds["shared"]["s"],
         peer=seconds["repeated"]["s"], unit="s/step", less_is_better=True)


def timed(step: Step) -> Callable[[int], dict[str, float]]:
    """A side of `take_turns`."""

    def run(_round: int) -> dict[str, float]:
        start = time.perf_counter()
        step()
        return {"s": time.perf_counter() - start}

    return run


def packed_step(model: str, folder: Path, batch: Batch, *, groups: ProcessGroups, share_prefix: bool) -> Step:
    """Our training step, planning included; returns the loss."""
    config = Config.model_validate({"train": {"share_prefix": share_prefix, "precision": "bf16_mixed" if model == "27M" else "float32"}})
    trainer = ModelTrainer.build(str(folder), config=config.for_ranks, groups=groups)
    max_tokens = config.train.max_tokens_per_microbatch

    def step() -> float:
        plan = plan_microbatches(batch, num_ranks=1, max_tokens=max_tokens, share_prefix=share_prefix)
        params = adam_params(trainer.step, config=OPTIMIZER, total_steps=1000)
        return trainer.train_step(TrainStep(batch, (tuple(plan.microbatches[0]),), params)).metrics["train/loss"]

    return step


def padded_step(model: str, folder: Path, batch: Batch) -> Step:
    """The usual training step: padded batches, gradients accumulated over all of them; returns the loss."""
    # The same modules, norms included, so that only the layout of tokens differs.
    net = load_causal_lm(str(folder), attention="sdpa").train()
    optimizer = torch.optim.AdamW(net.parameters(), lr=OPTIMIZER.lr, betas=(OPTIMIZER.beta1, OPTIMIZER.beta2), weight_decay=0.0, fused=True)
    sequences = np.split(batch.tokens.astype(np.int64), batch.offsets[1:-1])
    scored = batch.num_targets
    rng = np.random.default_rng(0)

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for indices in np.split(rng.permutation(len(sequences)), range(PADDED_BATCH, len(sequences), PADDED_BATCH)):
            width = max(len(sequences[i]) for i in indices)
            tokens = torch.tensor(np.stack([np.pad(sequences[i], (0, width - len(sequences[i]))) for i in indices]))
            mask = torch.arange(width) < torch.tensor([len(sequences[i]) for i in indices])[:, None]
            with torch.autocast("cpu", torch.bfloat16, enabled=model == "27M"):
                logits = net(input_ids=tokens, attention_mask=mask.long(), use_cache=False).logits
            targets = torch.where(mask, tokens, -100)[:, 1:]
            loss = cross_entropy(logits[:, :-1].float().flatten(0, 1), targets.flatten(), reduction="sum") / scored
            loss.backward()
            total += loss.item()
        optimizer.step()
        return total

    return step


def skewed_batch(count: int) -> Batch:
    """Random sequences of skewed lengths; all tokens but the first are scored."""
    lengths = skewed_lengths(np.random.default_rng(0), count)
    return make_batch(lengths, np.ones_like(lengths), np.arange(count), shared=np.zeros_like(lengths))


def grouped_batch(num_groups: int) -> Batch:
    """Groups of answers to one prompt, both of skewed lengths; the answers are scored."""
    rng = np.random.default_rng(1)
    prompts = np.repeat(skewed_lengths(rng, num_groups), GROUP_SIZE)
    answers = skewed_lengths(rng, len(prompts))
    return make_batch(prompts + answers, prompts, np.arange(len(prompts)) // GROUP_SIZE, shared=prompts)


def make_batch(lengths: np.ndarray, unscored: np.ndarray, group_ids: np.ndarray, *, shared: np.ndarray) -> Batch:
    """Random tokens, of which all after the first `unscored` of each sequence count alike."""
    rng = np.random.default_rng(2)
    prompts = rng.integers(3, VOCAB_SIZE, (group_ids.max() + 1, max(shared.max(), 1)))
    tokens, masks = [], []
    for length, first, group, prefix in zip(lengths, unscored, group_ids, shared, strict=True):
        tokens.append(np.concatenate([prompts[group, :prefix], rng.integers(3, VOCAB_SIZE, length - prefix)]))
        masks.append(np.arange(length) >= first)
    mask = np.concatenate(masks)
    return Batch.of_next_tokens(
        np.concatenate(tokens), mask, lengths=lengths, columns={"loss_weights": mask / mask.sum()}, losses=(CROSS_ENTROPY,),
        shared=SharedPrompts(group_ids, shared))


def skewed_lengths(rng: np.random.Generator, count: int) -> np.ndarray:
    return rng.lognormal(4.0, 0.9, count).astype(np.int64).clip(16, 512)


@contextmanager
def groups_of_one():
    """The process groups of a single rank."""
    store = host_store(30.0)
    yield join(rank=0, world=1, place=MeetingPlace(store), config=DistConfig())
    leave()


if __name__ == "__main__":
    main()
