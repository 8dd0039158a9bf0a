"""The learning rates that "auto" chooses against three others: held-out figures of SmolLM2-135M-Instruct before and after short runs.

Each run is `offbeat sft`, `offbeat dpo` or `offbeat train` with a model, data and a reward, and settings that keep it to one to three
minutes of one core; the learning rate is left open, or is a third of that, or three or ten times it. The data are made
here: sums of two numbers, asked in chats. A seed draws other rows and other samples. Figures are the accuracy of greedy answers to held-out
questions (SFT, GRPO), and the share of held-out pairs of a right and a wrong sum whose right one has gained on the other (DPO; 0.5 before).

    python benchmarks/learning_rates.py [--kinds grpo sft dpo] [--factors 1 0.33 3 10] [--seeds 0 1 2] [--quick] [--resume] [--write-docs]

The model is `.models/smollm2-135m-instruct`, which `make smollm2` makes. Runs are kept in benchmarks/learning_rates.jsonl, a line
each. With --resume it is gone on with, and what is done under the same settings is not done again; without, it begins anew. --write-docs
writes the table of docs/choosing-settings.md from that file in the end; with --factors and nothing after it, nothing is run before.
"""

import argparse
import json
import random
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean

from measure import BENCHMARKS, ROOT, WORK, note
from results import cpu_seconds, read_results, record, write_section
from step import run

from offbeat.config.load import load_config

MODEL = ROOT / ".models" / "smollm2-135m-instruct"
FOLDER = WORK / "learning_rates"
RESULTS, SMOKE = BENCHMARKS / "learning_rates.jsonl", WORK / "learning_rates-quick.jsonl"
"""Runs, and those of smoke runs, which leave the others alone."""
DOCUMENT = ROOT / "docs" / "choosing-settings.md"
BEGIN, END = "<!-- begin: learning rates on SmolLM2 -->\n", "<!-- end: learning rates on SmolLM2 -->\n"
NUM_ROWS = {"grpo": 96, "sft": 288, "dpo": 96}
"""Rows that a kind of run trains on. SFT's steps are cheap, and its answers differ by chance more than twelve steps change them."""
NUM_HELDOUT = {"grpo": 64, "sft": 256, "dpo": 64}
SYSTEM = "You are good at arithmetic. Answer with the number alone."
QUESTION = "State the final answer to the following arithmetic problem:"
FACTORS = (1.0, 0.33, 3.0, 10.0)
"""Rates in units of what "auto" chooses."""
SHORT = {
    "model.dtype": "auto", "train.precision": "bf16_mixed", "train.threads": 1, "inference.threads": 1, "inference.max_context": 128,
    "rollout.max_new_tokens": 16, "rollout.reward": "math", "checkpoint.export": "false",
    "checkpoint.keep": 1, "evaluate.every_steps": 0, "telemetry.rollouts_every_steps": 0,
    "rollout.reward_timeout_s": 300, "weights.stage_timeout_s": 600, "weights.switch_timeout_s": 600, "inference.start_timeout_s": 900}
"""Settings of all runs, which make them short and say nothing of learning. They wait long, where other programs use the cores, too."""
KINDS: Mapping[str, tuple[str, str, Mapping[str, object]]] = {
    "grpo": ("train", "train.optimizer.lr", {
        "run.total_steps": 10, "rollout.group_size": 8, "rollout.consumer_batch_size": 8, "rollout.max_concurrent_rollouts": 16}),
    "sft": ("sft", "sft.optimizer.lr", {"sft.total_steps": 36, "sft.batch_size": 8, "sft.optimizer.warmup_steps": 2}),
    "dpo": ("dpo", "preference.optimizer.lr", {
        "preference.total_steps": 12, "preference.batch_size": 8, "preference.optimizer.warmup_steps": 2}),
}
"""The command of each kind of run, its learning rate, and its settings."""
WEIGHTS: Mapping[str, Mapping[str, object]] = {"all": {}, "adapter": {"model.lora.rank": 16}}
QUICK = {"sft.total_steps": 2, "preference.total_steps": 2, "run.total_steps": 2}


@dataclass(frozen=True)
class Run:
    """One line of the results.

    Attributes:
        factor: the rate in units of what "auto" chooses.
        settings: those of the run beside rate and seed, to tell results under another budget apart.
        before, after: held-out figure.
    """

    kind: str
    weights: str
    factor: float
    lr: float
    seed: int
    settings: Mapping[str, str]
    before: float
    after: float
    cpu_seconds: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="kinds of training (default: all)")
    parser.add_argument("--factors", nargs="*", type=float, default=FACTORS, help='rates in units of "auto" (default: 1 0.33 3 10)')
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="seeds of rows and samples (default: 0 1 2)")
    parser.add_argument("--quick", action="store_true", help="a smoke run: two steps of one seed at the default")
    parser.add_argument("--resume", action="store_true", help="keep the results that there are, and do the rest")
    parser.add_argument("--write-docs", action="store_true", help=f"write the table of {DOCUMENT.relative_to(ROOT)} from the results")
    args = parser.parse_args()
    if not (MODEL / "config.json").exists():
        sys.exit(f"{MODEL} does not exist; run make smollm2")
    results = SMOKE if args.quick else RESULTS
    if not args.resume and args.factors:
        results.unlink(missing_ok=True)
    factors, seeds = ([1.0], args.seeds[:1]) if args.quick else (args.factors, args.seeds)
    for factor in factors:
        for seed in seeds:
            for kind in args.kinds:
                for weights in WEIGHTS:
                    measure(kind, weights, factor, seed, quick=args.quick)
    if args.write_docs:
        write_section(DOCUMENT, render(read_results(results, Run)), begin=BEGIN, end=END)


def measure(kind: str, weights: str, factor: float, seed: int, *, quick: bool) -> None:
    """Do a run that is not yet among the results, and print it."""
    settings, results = settings_of(kind, weights, quick=quick), SMOKE if quick else RESULTS
    wanted = (kind, weights, factor, seed, settings)
    if any((run.kind, run.weights, run.factor, run.seed, run.settings) == wanted for run in read_results(results, Run)):
        return
    lr = None if factor == 1 else float(f"{factor * default_rate(kind, weights):.2g}")
    done = train(kind, weights, factor, seed, settings, lr=lr)
    record(results, done)
    print(json.dumps({"benchmark": "learning_rates", **asdict(done), "settings": None}), flush=True)


def settings_of(kind: str, weights: str, *, quick: bool) -> dict[str, str]:
    """Settings of a run beside its rate, its seed and its data."""
    own = KINDS[kind][2]
    short = {key: value for key, value in QUICK.items() if key in own} if quick else {}
    return {key: str(value) for key, value in {
        **SHORT, "data.heldout_size": NUM_HELDOUT[kind], **own, **WEIGHTS[weights], **short}.items()}


def default_rate(kind: str, weights: str) -> float:
    """What "auto" chose in the runs that are done."""
    return next(run.lr for run in read_results(RESULTS, Run) if (run.kind, run.weights, run.factor) == (kind, weights, 1))


def train(kind: str, weights: str, factor: float, seed: int, settings: Mapping[str, str], *, lr: float | None) -> Run:
    """One run; its folder goes, since a checkpoint takes 1.6 GB."""
    command, rate, _ = KINDS[kind]
    name, start, used = f"{kind}-{weights}-{factor:g}-{seed}", time.monotonic(), cpu_seconds()
    shutil.rmtree(FOLDER / name, ignore_errors=True)
    given = {rate: repr(lr)} if lr is not None else {}
    path = write_rows(kind, seed)
    offbeat(command, {
        "model.path": MODEL, "data.path": path, "run.dir": FOLDER, "run.name": name, "run.seed": seed, **settings, **given}, log=name)
    result = json.loads((FOLDER / name / "result.json").read_text())
    chosen = load_config(str(FOLDER / name / "config.toml"))
    section = {"sft": chosen.sft, "dpo": chosen.preference, "grpo": chosen.train}[kind]
    shutil.rmtree(FOLDER / name)
    before = result["heldout_before"] if kind == "grpo" else 0.5 if kind == "dpo" else accuracy_before(kind, seed)
    after = result["heldout_after" if kind == "grpo" else "accuracy"]
    done = Run(kind, weights, factor, section.optimizer.peak, seed, settings, before, after, round(cpu_seconds() - used, 1))
    note(f"{name}: lr {done.lr:g}, {before:.3f} to {after:.3f} in {time.monotonic() - start:.0f} s, CPU {done.cpu_seconds} s")
    return done


def accuracy_before(kind: str, seed: int) -> float:
    """Accuracy of the model as it is on a seed's held-out rows, measured once."""
    found = FOLDER / f"before-{kind}-{seed}.json"
    if not found.exists():
        said = offbeat("eval", {
            "model.path": MODEL, "data.path": write_rows(kind, seed), "run.dir": FOLDER, "run.name": f"before-{kind}-{seed}", **SHORT,
            "data.heldout_size": NUM_HELDOUT[kind]}, "--json", log=f"before-{kind}-{seed}")
        found.write_text(said)
    return float(json.loads(found.read_text().splitlines()[-1])["eval/accuracy"])


def offbeat(command: str, settings: Mapping[str, object], *flags: str, log: str) -> str:
    """Return what a command printed."""
    config = FOLDER / "empty.toml"
    config.touch()
    overrides = [part for key, value in settings.items() for part in (f"--{key}", value)]
    return run([sys.executable, "-m", "offbeat", command, config, *overrides, *flags], log=f"rates-{log}", threads=1).stdout


def write_rows(kind: str, seed: int) -> Path:
    """Write sums in chats with their answers, or with a right and a wrong answer. No sum is both trained on and held out."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    path = FOLDER / f"{kind}-{seed}.jsonl"
    draw = random.Random(seed)
    sums = draw.sample([(a, b) for a in range(1, 41) for b in range(1, 21)], NUM_ROWS[kind] + NUM_HELDOUT[kind])
    rows = []
    for a, b in sums:
        prompt = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"{QUESTION} {a} + {b} ="}]
        wrong = a + b + draw.choice([-10, -2, -1, 1, 2, 10])
        rows.append({"prompt": prompt, **({"chosen": _said(a + b), "rejected": _said(wrong)} if kind == "dpo" else {"answer": str(a + b)})})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def _said(number: int) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": str(number)}]


def render(runs: Sequence[Run]) -> str:
    """The table: a row for each kind of run and what is trained, a column for each rate; cells have the figure of each seed."""
    heads = {0.33: "a third", 1.0: "the default", 3.0: "three times", 10.0: "ten times"}
    factors = [factor for factor in heads if any(run.factor == factor for run in runs)]
    lines = [
        f"| training | weights | default rate | before | {' | '.join(heads[factor] for factor in factors)} |",
        "|---|---|---|---|" + "---|" * len(factors)]
    for kind in KINDS:
        for weights in WEIGHTS:
            own = sorted((run for run in runs if (run.kind, run.weights) == (kind, weights)), key=lambda run: run.seed)
            rates = {run.lr for run in own if run.factor == 1}
            if not rates:
                continue
            cells = [_cell([run.after for run in own if run.factor == factor]) for factor in factors]
            rate, before = ", ".join(f"{rate:g}" for rate in sorted(rates)), _cell([run.before for run in own if run.factor == 1])
            lines.append(f"| {' | '.join([kind.upper(), weights, rate, before, *cells])} |")
    return "\n".join(lines) + "\n"


def _cell(figures: Sequence[float]) -> str:
    """Return the mean, and each seed's figure in order."""
    if not figures:
        return ""
    return f"{mean(figures):.2f} ({', '.join(f'{figure:.2f}' for figure in figures)})"


if __name__ == "__main__":
    main()
