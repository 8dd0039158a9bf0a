"""Many adapters in one training step: against one adapter, against PEFT training one after the other, and against full fine-tuning.

One whole step (forward, backward, clipping, AdamW) in float32 on the same 16 sequences of 32 to 64 tokens, dealt to 1, 4 or 16 adapters of
rank 16 on all linear layers. Ours is `BankTrainer`, all adapters in one pass. PEFT's is transformers' model with as many adapters, each
activated in turn and trained on its sequences, padded, with a fused AdamW of its own. Full fine-tuning is `ModelTrainer`. All come to the
same loss at first. Figures are seconds per step of the tiny and of the 27M model, alternating, on one process with --threads threads.

    python benchmarks/lora.py [--quick] [--repeats 5] [--threads 1] [--parts]

--parts prints instead where a step with 1, 4 and 16 adapters spends its CPU time, as medians of --repeats steps: `products` are those with
the adapters' matrices and the sums of their gradients, `passes` the rest of the forward and backward pass, which is the frozen model's.
"""

import argparse
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import torch
from decode_parts import Clock
from measure import emit, take_turns
from packing import groups_of_one, make_batch, packed_step, timed
from peft import LoraConfig, get_peft_model
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from engine import build
from offbeat.algorithms.adam import AdamParams
from offbeat.config.root import Config
from offbeat.data.batch import Batch
from offbeat.model.lora_routes import EqualRoute, OneRoute, SpanRoute
from offbeat.model.lora_targets import LAYER_KINDS
from offbeat.sync.mesh import ProcessGroups
from offbeat.trainer.bank_trainer import BankTrainer
from offbeat.trainer.messages import NewAdapter, OptimStep

COUNTS = (1, 4, 16)
AIM_OVER_ONE, AIM_OVER_PEFT = 0.9, 3.0
RANK, ALPHA = 16, 32.0
ADAM = AdamParams(lr=1e-4, clip_norm=1.0)
LOSS_TOLERANCE = 1e-4
PARTS = ("passes", "products", "update")

Step = Callable[[], float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smoke run: the tiny model, two rounds")
    parser.add_argument("--repeats", type=int, default=5, help="rounds; the median counts (default: 5)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default: 1)")
    parser.add_argument("--parts", action="store_true", help="print the parts of our step instead")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    measure = partial(print_parts, watch_parts()) if args.parts else compare
    with groups_of_one() as groups:
        for model in ["tiny"] if args.quick else ["tiny", "27M"]:
            measure(model, groups=groups, repeats=2 if args.quick else args.repeats)


def compare(model: str, *, groups: ProcessGroups, repeats: int) -> None:
    """All sides on one model."""
    folder, batch = build(model), ragged_batch(16)
    steps = {"full": packed_step("tiny", folder, batch, groups=groups, share_prefix=False)}  # "tiny" is for float32
    for count in COUNTS:
        steps[f"ours {count}"] = our_step(folder, batch, count, groups=groups)
        steps[f"PEFT {count}"] = peft_step(folder, batch, count)
    losses = {name: step() for name, step in steps.items()}  # also the warm-up
    assert np.ptp(list(losses.values())) < LOSS_TOLERANCE, f"the steps compute different losses: {losses}"
    sides = {name: timed(step) for name, step in steps.items()}
    seconds = take_turns(sides, repeats=repeats, what=f"{model}, {batch.num_tokens} tokens,")
    report({name: figures["s"] for name, figures in seconds.items()}, model)


def watch_parts() -> Clock:
    """Return a clock that times the parts of our steps from now on."""
    clock = Clock()
    for kind in (OneRoute, EqualRoute, SpanRoute):
        for name in ("multiply", "add_product", "add_outer"):
            clock.watch(kind, name, "products")
    for name, part in (("forward_backward", "passes"), ("optim_step", "update")):
        clock.watch(BankTrainer, name, part)
    return clock


def print_parts(clock: Clock, model: str, *, groups: ProcessGroups, repeats: int) -> None:
    """Print the parts of our step in milliseconds, a row each, with a column for each number of adapters."""
    folder, batch, columns = build(model), ragged_batch(16), []
    for count in COUNTS:
        step, seen = our_step(folder, batch, count, groups=groups), []
        for _ in range(repeats + 1):
            clock.spent.clear()
            step()
            seen.append(dict(clock.spent) | {"passes": clock.spent["passes"] - clock.spent["products"]})
        columns.append({part: median(each[part] for each in seen[1:]) for part in PARTS})
    print(f"| {model} | " + " | ".join(f"{count} adapters" for count in COUNTS) + " |\n" + "|---" * (len(COUNTS) + 1) + "|")
    for part in PARTS:
        print(f"| {part} | " + " | ".join(f"{1e3 * each[part]:.1f} ms" for each in columns) + " |", flush=True)


def report(seconds: dict[str, float], model: str) -> None:
    """All comparisons of one run."""
    last = COUNTS[-1]
    for count in COUNTS[1:]:
        emit("lora", f"{model} {count} adapters vs 1", ours=seconds[f"ours {count}"], peer=seconds["ours 1"], unit="s/step",
             aim=AIM_OVER_ONE if count == last else None, less_is_better=True)
    for count in COUNTS:
        emit("lora", f"{model} {count} adapters vs PEFT, one at a time", ours=seconds[f"ours {count}"], peer=seconds[f"PEFT {count}"],
             unit="s/step", aim=AIM_OVER_PEFT if count == last else None, less_is_better=True)
    for count in COUNTS:
        emit("lora", f"{model} {count} adapters vs full fine-tuning", ours=seconds[f"ours {count}"], peer=seconds["full"], unit="s/step",
             less_is_better=True)


def our_step(folder: Path, batch: Batch, count: int, *, groups: ProcessGroups) -> Step:
    """All adapters in one pass; returns the loss."""
    config = Config.model_validate({"model": {"lora": {"rank": RANK}}})
    trainer = BankTrainer.build_empty(str(folder), config=config.for_ranks, groups=groups)
    for i in range(count):
        trainer.add(NewAdapter(f"tenant-{i}", RANK, ALPHA, i, LAYER_KINDS))
    own = replace(batch, adapters=trainer.names, sequences={**batch.sequences, "adapter_ids": np.arange(len(batch)) % count})

    def step() -> float:
        losses = trainer.forward_backward(own).losses
        trainer.optim_step(OptimStep(dict.fromkeys(trainer.names, ADAM)))
        return float(losses.sum())

    return step


def peft_step(folder: Path, batch: Batch, count: int) -> Step:
    """One adapter after the other; returns the loss."""
    config = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear")
    net = get_peft_model(AutoModelForCausalLM.from_pretrained(folder), config, adapter_name="tenant-0").train()
    for i in range(1, count):
        net.add_adapter(f"tenant-{i}", config)
    own = {i: [p for name, p in net.named_parameters() if f".tenant-{i}." in name] for i in range(count)}
    optimizers = {
        i: torch.optim.AdamW(parameters, lr=ADAM.lr, betas=(ADAM.beta1, ADAM.beta2), weight_decay=ADAM.weight_decay, fused=True)
        for i, parameters in own.items()}
    sequences = np.split(batch.tokens.astype(np.int64), batch.offsets[1:-1])
    scored = batch.num_targets
    padded = {i: pad(sequences[i::count]) for i in range(count)}

    def step() -> float:
        total = 0.0
        for i, (tokens, mask) in padded.items():
            net.set_adapter(f"tenant-{i}")
            logits = net(input_ids=tokens, attention_mask=mask.long(), use_cache=False).logits
            targets = torch.where(mask, tokens, -100)[:, 1:]
            loss = cross_entropy(logits[:, :-1].flatten(0, 1), targets.flatten(), reduction="sum") / scored
            loss.backward()
            torch.nn.utils.clip_grad_norm_(own[i], ADAM.clip_norm)
            optimizers[i].step()
            optimizers[i].zero_grad(set_to_none=True)
            total += loss.item()
        return total

    return step


def pad(sequences: list[np.ndarray]) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and mask, [n, longest]."""
    width = max(map(len, sequences))
    tokens = torch.tensor(np.stack([np.pad(sequence, (0, width - len(sequence))) for sequence in sequences]))
    return tokens, torch.arange(width) < torch.tensor([len(sequence) for sequence in sequences])[:, None]


def ragged_batch(count: int) -> Batch:
    """Random sequences; all tokens but the first are scored."""
    lengths = np.random.default_rng(0).integers(32, 65, count)
    return make_batch(lengths, np.ones_like(lengths), np.arange(count), shared=np.zeros_like(lengths))


if __name__ == "__main__":
    main()
