"""Errors of a training step in bfloat16 against one in float64: of the trainer, and of a plain loop under torch's autocast.

`python tests/precision_errors.py` prints them as a table for the families of `FAMILIES`, in per cent of the float64 step's norm: of the
losses of all targets, of the gradient, and of AdamW's first update. Beside the trainer as it computes on one device it has the trainer
in shards on a single rank, which computes as several devices with shards do.
"""

import tempfile
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import family_table
from families import build
from offbeat.algorithms.adam import AdamParams
from offbeat.data.batch import Batch, LossSpec, SharedPrompts
from offbeat.sync.mesh import ProcessGroups
from offbeat.trainer.messages import OptimStep
from offbeat.trainer.model_trainer import ModelTrainer
from offbeat.trainer.policy import load_policy
from offbeat.trainer.strategies import Sharded, whole_tensor
from offbeat.trainer.trainer import WHOLE
from ranks import run_alone
from train_samples import configure

FAMILIES = ("Llama 3.x", "Mistral", "Qwen3", "Gemma 3", "OLMo 2", "Phi-3")
QUANTITIES = ("loss", "gradient", "update")
NUM_BATCHES = 6
"""Batches, each with a step from the same weights, whose errors are taken together."""

_ADAM = AdamParams(lr=1e-3)
_MAX_TOKENS = 64
"""Of a micro-batch, so that a batch has several."""


@dataclass(frozen=True)
class Step:
    """The losses of all targets [M], and gradients and changes of all weights [W], float64."""

    loss: Tensor
    gradient: Tensor
    update: Tensor


def errors_of(family: str) -> dict[str, dict[str, float]]:
    """Relative errors by quantity, of "autocast" (the plain loop), "device" and "shards"."""
    row = next(each for each in family_table.FAMILIES if each.name == family)
    with tempfile.TemporaryDirectory() as folder:
        build(row, folder)
        batches = [_batch(seed) for seed in range(NUM_BATCHES)]
        exact = [_plain_step(folder, batch, torch.float64) for batch in batches]
        found = {
            "autocast": [_plain_step(folder, batch, torch.bfloat16) for batch in batches],
            "device": run_alone(_trainer_steps(_as_on_one_device, batches), argument=folder),
            "shards": run_alone(_trainer_steps(_in_shards, batches), argument=folder)}
    return {name: _errors(steps, exact) for name, steps in found.items()}


def _errors(steps: list[Step], exact: list[Step]) -> dict[str, float]:
    def norm(quantity: str, *, apart: bool) -> float:
        ours, theirs = (torch.cat([getattr(step, quantity) for step in each]) for each in (steps, exact))
        return float((ours - theirs if apart else theirs).norm())

    return {quantity: norm(quantity, apart=True) / norm(quantity, apart=False) for quantity in QUANTITIES}


def _batch(seed: int) -> Batch:
    """Four groups of three samples, whose advantages have both signs."""
    rng = np.random.default_rng(seed)
    tokens, trained, lengths = [], [], []
    for _ in range(4):
        prompt = rng.integers(2, 64, 6)
        for _ in range(3):
            answer = rng.integers(2, 64, rng.integers(5, 13))
            tokens += [prompt, answer]
            trained += [np.zeros(len(prompt), bool), np.ones(len(answer), bool)]
            lengths.append(len(prompt) + len(answer))
    mask = np.concatenate(trained)
    return Batch.of_next_tokens(
        np.concatenate(tokens).astype(np.int32), mask, lengths=lengths, columns={
            "advantages": np.repeat(rng.standard_normal(len(lengths)), lengths), "loss_weights": mask / mask.sum()},
        losses=(LossSpec("reinforce"),), shared=SharedPrompts(np.repeat(np.arange(4), 3), np.full(12, 6)))


def _plain_step(folder: str, batch: Batch, dtype: torch.dtype) -> Step:
    """A loop over single sequences in float64, or over float32 weights under autocast."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    model.to(torch.float64 if dtype == torch.float64 else torch.float32)
    before, losses = _flat(model.parameters()), []
    for number, (start, stop) in enumerate(pairwise(batch.offsets.tolist())):
        which = np.flatnonzero(batch.target_sequences == number)
        with nullcontext() if dtype == torch.float64 else torch.autocast("cpu", dtype):
            logits = model(input_ids=torch.from_numpy(batch.tokens[None, start:stop]).long(), use_cache=False).logits[0]
        logprobs = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
        picked = logprobs[batch.positions[which] - start, batch.targets[which]]
        factors = torch.from_numpy(batch.columns["loss_weights"][which] * batch.columns["advantages"][which])
        losses.append(-picked * factors)
        losses[-1].sum().backward()
    gradient = _flat(p.grad for p in model.parameters())
    torch.optim.AdamW(model.parameters(), lr=_ADAM.lr, betas=(_ADAM.beta1, _ADAM.beta2), eps=_ADAM.eps, weight_decay=0.0).step()
    return Step(torch.cat(losses).detach().double(), gradient, _flat(model.parameters()) - before)


def _as_on_one_device(folder: str, groups: ProcessGroups) -> ModelTrainer:
    config = configure(folder, precision="bf16_mixed", max_tokens_per_microbatch=_MAX_TOKENS)
    return ModelTrainer.build(folder, config=config.for_ranks, groups=groups)


def _in_shards(folder: str, groups: ProcessGroups) -> ModelTrainer:
    config = configure(folder, precision="bf16_mixed", max_tokens_per_microbatch=_MAX_TOKENS).for_ranks
    model = load_policy(folder, config=config.train)
    return ModelTrainer(model, Sharded(model, groups, "bf16_mixed"), folder=folder, config=config, groups=groups)


def _trainer_steps(build_one: Callable[[str, ProcessGroups], ModelTrainer], batches: list[Batch]) -> Callable[..., list[Step]]:
    def steps(groups: ProcessGroups, folder: str) -> list[Step]:
        return [_trainer_step(build_one(folder, groups), batch) for batch in batches]

    return steps


def _trainer_step(trainer: ModelTrainer, batch: Batch) -> Step:
    before = _flat(trainer.model.parameters())
    scores = trainer.forward_backward(batch)
    losses = -torch.from_numpy(scores.logprobs * batch.columns["loss_weights"] * batch.columns["advantages"]).double()
    gradient = _flat(p.grad for p in trainer.model.parameters())
    trainer.optim_step(OptimStep({WHOLE: _ADAM}))
    return Step(losses, gradient, _flat(trainer.model.parameters()) - before)


def _flat(tensors: Iterable[Tensor | None]) -> Tensor:
    return torch.cat([whole_tensor(tensor.detach()).double().flatten() for tensor in tensors if tensor is not None])


def main() -> None:
    """Print the table."""
    print("| family | " + " | ".join(f"{way}: {', '.join(QUANTITIES)}" for way in ("autocast", "device", "shards")) + " |")
    print("|---" * 4 + "|")
    for family in FAMILIES:
        found = errors_of(family)
        print(f"| {family} | " + " | ".join(", ".join(f"{100 * error:.2f}" for error in each.values()) for each in found.values()) + " |")


if __name__ == "__main__":
    main()
