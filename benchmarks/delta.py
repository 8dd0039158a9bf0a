"""Deltas: the share of bf16 weights that a training step changes, by learning rate, and the bytes that writing only those saves.

A pretrained model (SmolLM2-135M of `make smollm2`, or another folder) takes AdamW steps in float32 with the trainer's optimizer and its
default settings, on the project's own pages as text. Its weights come from a bfloat16 checkpoint, and so lie where bfloat16 has a number,
from which a small step rounds back; after many steps they lie anywhere between two. So they are first moved by up to half of the distance
between two, at random. What counts is the median over the steps after the first two, in which Adam steps by its full learning rate
everywhere.

    python benchmarks/delta.py [--quick] [--model FOLDER] [--rates 1e-6 3e-6 1e-5] [--steps 8] [--tokens 256]

Prints one JSON line for each rate: `changed_share` of the weights, `bytes` of the changes against `whole_bytes`, the `share_of_bytes`, and
seconds to find the changes and to apply them. Every version is rebuilt from the one before and compared bit for bit.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from measure import ROOT, WORK, note
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoTokenizer, PreTrainedModel

from engine import build
from offbeat.algorithms.adam import adam_params
from offbeat.config.train import OptimizerConfig
from offbeat.model.changes_io import read_weights, write_changes
from offbeat.model.hf_io import write_safetensors
from offbeat.model.load import load_causal_lm
from offbeat.trainer.optim import build_optimizer, set_params

SMOLLM2 = ROOT / ".models" / "smollm2-135m-instruct"
NUM_WARM = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="", help="a model folder (default: SmolLM2, or the 27M of random weights where it is not there)")
    parser.add_argument("--rates", nargs="+", type=float, default=[1e-6, 3e-6, 1e-5])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=256, help="tokens of a step (default: 256)")
    parser.add_argument("--quick", action="store_true", help="a smoke run: the tiny model, four steps")
    options = parser.parse_args()
    if options.quick:
        options.model, options.steps = str(build("tiny")), NUM_WARM + 2
    model = options.model or str(SMOLLM2 if SMOLLM2.exists() else build("27M"))
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else WORK) as folder:
        for rate in options.rates:
            figures = measure(model, Path(folder), rate=rate, num_steps=options.steps, num_tokens=options.tokens)
            print(json.dumps({"benchmark": "delta", "model": Path(model).name, "lr": rate, **figures}), flush=True)


def measure(folder: str, work: Path, *, rate: float, num_steps: int, num_tokens: int) -> dict[str, float | bool]:
    """Train, and write each step's version as its changes."""
    model = load_causal_lm(folder, attention="sdpa")
    between_numbers(model)
    optimizer, config = build_optimizer(model), OptimizerConfig(lr=rate, schedule="constant", warmup_steps=0)
    texts = batches(folder, num_tokens, vocab_size=model.config.vocab_size)
    before, base = published(model), work / f"whole-{rate:g}"
    write_safetensors(before, base, config_from=model)
    whole_bytes = sum(tensor.nbytes for tensor in before.values())
    changed, sizes, seconds, exact = [], [], {"find": [], "apply": []}, True
    for step in range(num_steps):
        train(model, optimizer, next(texts), config, step)
        after, version = published(model), work / f"v{step}-{rate:g}"
        start = time.perf_counter()
        num_bytes = write_changes(after, version, since=before, base=base)
        seconds["find"].append(time.perf_counter() - start)
        found = after
        if num_bytes:
            start, held = time.perf_counter(), {base: before}.get
            found = read_weights(version, held=held)
            seconds["apply"].append(time.perf_counter() - start)
        exact = exact and all(torch.equal(bits(found[name]), bits(tensor)) for name, tensor in after.items())
        changed.append(sum(int((bits(after[name]) != bits(before[name])).sum()) for name in after) / sum(t.numel() for t in after.values()))
        sizes.append(num_bytes or whole_bytes)
        note(f"lr {rate:g}, step {step + 1}: {changed[-1]:.3%} of the weights changed, {sizes[-1] / whole_bytes:.1%} of the bytes")
        before, base = after, version
    share, size = statistics.median(changed[NUM_WARM:]), statistics.median(sizes[NUM_WARM:])
    return {
        "changed_share": round(share, 5), "bytes": int(size), "whole_bytes": whole_bytes, "share_of_bytes": round(size / whole_bytes, 4),
        "find_s": round(statistics.median(seconds["find"]), 3), "apply_s": round(statistics.median(seconds["apply"] or [0.0]), 3),
        "exact": exact}


@torch.no_grad()
def between_numbers(model: PreTrainedModel) -> None:
    """Move each weight by up to half of the distance between two numbers of bfloat16."""
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        here = parameter.to(torch.bfloat16)
        above = (here.view(torch.int16) + 1).view(torch.bfloat16)
        distance = (above.float() - here.float()).abs()
        parameter.add_((torch.rand(parameter.shape, generator=generator) - 0.5) * distance)


def published(model: PreTrainedModel) -> dict[str, Tensor]:
    """The weights as a trainer publishes them."""
    return {name: parameter.detach().to(torch.bfloat16) for name, parameter in model.named_parameters()}


def batches(folder: str, num_tokens: int, *, vocab_size: int) -> Iterator[Tensor]:
    """Endless stretches of text, [1, num_tokens] int64."""
    text = "\n\n".join(page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs").glob("*.md")))
    tokens = torch.tensor(AutoTokenizer.from_pretrained(folder)(text[:400_000])["input_ids"]) if folder == str(SMOLLM2) else torch.randint(
        vocab_size, (100_000,), generator=torch.Generator().manual_seed(0))
    while True:
        for start in range(0, len(tokens) - num_tokens, num_tokens):
            yield tokens[None, start : start + num_tokens]


def train(model: PreTrainedModel, optimizer: torch.optim.Optimizer, tokens: Tensor, config: OptimizerConfig, step: int) -> None:
    """One step on the next tokens of a text."""
    logits = model(input_ids=tokens).logits
    cross_entropy(logits[0, :-1].float(), tokens[0, 1:]).backward()
    params = adam_params(step, config=config, total_steps=1 << 30)
    if params.clip_norm:
        torch.nn.utils.clip_grad_norm_(model.parameters(), params.clip_norm)
    set_params(optimizer, params)
    optimizer.step()
    optimizer.zero_grad()


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.int16)


if __name__ == "__main__":
    main()
