"""Sixteen adapters are fine-tuned on one base model, in one process: all train in the same passes, and each is published and sampled by
itself while the others go on.

    .venv/bin/python examples/many_adapters.py [--model FOLDER] [--engines 2] [--steps 80]

The base model is a small one that has learnt to copy digits; without --model it is trained first, in half a minute. Every adapter's task is
another function of the digits: add one to each, reverse them, rotate them. Prints a table of each adapter's accuracy before and after.
"""

import argparse
import asyncio
import json
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
from rich.console import Console as Terminal
from rich.table import Table

from offbeat import AdamParams, Sampling, sft_batch
from offbeat.cli.main import main as offbeat
from offbeat.config.load import load_config
from offbeat.data.tokenizer import Tokenizer
from offbeat.runs.adapters import Adapters, open_adapters
from offbeat.telemetry.console import Console
from offbeat.telemetry.record import RunRecord

NUM_DIGITS = 6
BATCH_SIZE = 16
NUM_HELDOUT = 32
RUN = Path("runs/many_adapters")


def shifted(by: int) -> Callable[[str], str]:
    return lambda digits: "".join(str((int(digit) + by) % 10) for digit in digits)


TASKS: dict[str, Callable[[str], str]] = {
    **{f"add-{k}": shifted(k) for k in range(1, 10)},
    "reverse": lambda digits: digits[::-1],
    "rotate-left": lambda digits: digits[1:] + digits[0],
    "rotate-right": lambda digits: digits[-1] + digits[:-1],
    "swap-pairs": lambda digits: "".join(digits[i + 1] + digits[i] for i in range(0, len(digits), 2)),
    "first-only": lambda digits: digits[0] * len(digits),
    "last-only": lambda digits: digits[-1] * len(digits),
    "complement": lambda digits: "".join(str(9 - int(digit)) for digit in digits),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder of the base model (default: train one)")
    parser.add_argument("--engines", type=int, default=2, help="engine processes (default: 2)")
    parser.add_argument("--steps", type=int, default=80, help="training steps of every tenant (default: 80)")
    args = parser.parse_args()
    asyncio.run(run(args.model or train_base(), num_engines=args.engines, steps=args.steps))


def train_base() -> str:
    """A model that copies digits, by `offbeat sft`; its folder."""
    folder = RUN / "base" / "export"
    if not folder.exists():
        RUN.mkdir(parents=True, exist_ok=True)
        rng = random.Random(0)
        rows = [{"prompt": f"{digits}>", "answer": digits} for digits in (draw(rng) for _ in range(20_000))]
        (RUN / "copy.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        settings = {
            "run.dir": RUN, "run.name": "base", "data.path": RUN / "copy.jsonl", "data.heldout_size": 64, "sft.total_steps": 120,
            "sft.batch_size": 128, "rollout.max_new_tokens": NUM_DIGITS + 1, "sft.evaluate_every_steps": 40, "sft.stop_at_accuracy": 0.95}
        overrides = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
        code = offbeat(["sft", "examples/sort_digits.toml", "--data.task", "", *overrides])
        assert code == 0, "the base model could not be trained"
    return str(folder)


async def run(model: str, *, num_engines: int, steps: int) -> None:
    """Train, publish and sample for every tenant."""
    config = load_config(None, [
        ("run.dir", str(RUN)), ("run.name", "adapters"), ("model.path", model), ("model.lora.rank", "8"), ("model.lora.alpha", "16"),
        ("inference.num_engines", str(num_engines))])
    terminal = Terminal()
    with RunRecord(config.run_dir, trace=False, console=Console("plain")) as record:
        async with open_adapters(config, record) as adapters:
            for number, name in enumerate(TASKS):
                await adapters.add(name, seed=number)
            await asyncio.gather(*(adapters.publish(name) for name in TASKS))
            before = await measure_all(adapters)
            rng = random.Random(1)
            for step in range(1, steps + 1):
                batches = {name: sft_batch([example(adapters.tokenizer, name, draw(rng)) for _ in range(BATCH_SIZE)]) for name in TASKS}
                scores = await adapters.forward_backward(batches)
                await adapters.optim_step(dict.fromkeys(TASKS, AdamParams(lr=5e-3, clip_norm=1.0)))
                if step % 10 == 0:
                    losses = [own.losses.sum() for own in scores.values()]
                    terminal.print(f"step {step}/{steps}: mean loss {np.mean(losses):.3f}, {min(losses):.3f} to {max(losses):.3f}")
            reports = await asyncio.gather(*(adapters.publish(name) for name in TASKS))
            after = await measure_all(adapters)
    table = Table("tenant", "before", "after", "published in")
    for name, report in zip(TASKS, reports, strict=True):
        table.add_row(name, f"{before[name]:.2f}", f"{after[name]:.2f}", f"{1000 * report.total_s:.0f} ms")
    terminal.print(table)


async def measure_all(adapters: Adapters) -> dict[str, float]:
    """Every tenant's accuracy on the same prompts, sampled at once from the engines."""
    return dict(zip(TASKS, await asyncio.gather(*(measure(adapters, name) for name in TASKS)), strict=True))


async def measure(adapters: Adapters, name: str) -> float:
    """Share of prompts that the tenant's newest version answers right."""
    rng = random.Random(2)
    heldout = [draw(rng) for _ in range(NUM_HELDOUT)]
    sampling = Sampling(NUM_DIGITS + 1, temperature=0.0)
    answers = await asyncio.gather(*(adapters.sample(name, adapters.tokenizer.encode(f"{digits}>"), sampling) for digits in heldout))
    return float(np.mean([sample.text == TASKS[name](digits) for digits, (sample,) in zip(heldout, answers, strict=True)]))


def example(tokenizer: Tokenizer, name: str, digits: str) -> tuple[np.ndarray, np.ndarray]:
    """Tokens, and which of them are learnt: the answer and its end."""
    prompt, answer = tokenizer.encode(f"{digits}>"), [*tokenizer.encode(TASKS[name](digits)), tokenizer.eos_token_id]
    return np.array([*prompt, *answer], np.int32), np.arange(len(prompt) + len(answer)) >= len(prompt)


def draw(rng: random.Random) -> str:
    return "".join(rng.choice("0123456789") for _ in range(NUM_DIGITS))


if __name__ == "__main__":
    main()
