"""Learning with int8 engines: two tasks with engines whose weights are float32 and int8.

Each pair of runs is `offbeat train` with an example and fewer steps, twice with the same seed, data and settings, so that they differ in
the form of the engines' weights and the timing of asynchronous steps: `sort_digits.toml`, and `smollm2_arithmetic.toml` with half as many
prompts in a step. A warm-up ends at an accuracy that the engine measures, and may so be ten steps longer with one form than with the other.
Figures are the accuracy of greedy answers to 256 held-out rows before and after, by the engine of the run itself, and the mean over the
steps of `policy/logprob_gap_mean`, which counts what the versions between sampling and training change, too.

    python benchmarks/int8_learning.py [--task smollm2_arithmetic] [--steps N] [--seeds 0 1 2] [--quick] [--resume] [--write-docs]

Runs are kept in benchmarks/int8_learning.jsonl, a line each. With --resume those that are there are not done again. --write-docs writes the
table of docs/engine.md from that file in the end.
"""

import argparse
import json
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import mean, stdev

from measure import BENCHMARKS, ROOT, WORK, note
from results import cpu_seconds, read_results, record, write_section
from step import run

FOLDER = WORK / "int8_learning"
RESULTS, SMOKE = BENCHMARKS / "int8_learning.jsonl", WORK / "int8_learning-quick.jsonl"
"""Runs, and those of smoke runs, which leave the others alone."""
DOCUMENT = ROOT / "docs" / "engine.md"
FORMS = ("none", "int8")
TASKS: dict[str, tuple[int, dict[str, object]]] = {
    "sort_digits": (40, {}),
    "smollm2_arithmetic": (10, {
        "model.dtype": "float32", "rollout.consumer_batch_size": 8, "rollout.max_concurrent_rollouts": 16, "train.threads": 1,
        "checkpoint.every_steps": 0, "checkpoint.export": "false"})}
"""Names of examples: steps, and settings that differ from theirs."""
T_95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78}
"""Student's t for 95 % intervals of a mean, by the number of seeds."""


@dataclass(frozen=True)
class Run:
    """One line of the results.

    Attributes:
        quantization: `inference.quantization` of the run.
        before, after: accuracy on the held-out rows.
        gap: mean over steps of `policy/logprob_gap_mean`, in nats.
        wall_seconds: duration of the whole run; 0 where it was not noted.
    """

    quantization: str
    seed: int
    steps: int
    before: float
    after: float
    gap: float
    cpu_seconds: float
    task: str = "sort_digits"
    wall_seconds: float = 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=tuple(TASKS), default="sort_digits", help="example to train (default: sort_digits)")
    parser.add_argument("--steps", type=int, default=0, help="steps after the warm-up (default: 40, or 10 of smollm2_arithmetic)")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="seeds (default: 0 1 2)")
    parser.add_argument("--quick", action="store_true", help="a smoke run: two steps of one seed")
    parser.add_argument("--resume", action="store_true", help="keep the results that there are, and do the rest")
    parser.add_argument("--write-docs", action="store_true", help=f"write the table of {DOCUMENT.relative_to(ROOT)} from the results")
    args = parser.parse_args()
    results = SMOKE if args.quick else RESULTS
    if not args.resume:
        others = [done for done in read_results(results, Run) if done.task != args.task]
        results.unlink(missing_ok=True)
        for done in others:
            record(results, done)
    for seed in args.seeds[:1] if args.quick else args.seeds:
        for form in FORMS:
            steps = 2 if args.quick else args.steps or TASKS[args.task][0]
            if not any((done.task, done.quantization, done.seed, done.steps) == (args.task, form, seed, steps)
                       for done in read_results(results, Run)):
                record(results, done := train(args.task, form, seed, steps=steps, quick=args.quick))
                print(json.dumps({"benchmark": "int8_learning", **asdict(done)}), flush=True)
    if args.write_docs:
        begin, end = (f"<!-- {which}: {args.task} with int8 engines -->\n" for which in ("begin", "end"))
        write_section(DOCUMENT, render([done for done in read_results(results, Run) if done.task == args.task]), begin=begin, end=end)


def train(task: str, form: str, seed: int, *, steps: int, quick: bool) -> Run:
    """One run, whose folder goes."""
    name, used, begun = f"{task}-{form}-{seed}", cpu_seconds(), time.monotonic()
    folder = FOLDER / name
    shutil.rmtree(folder, ignore_errors=True)
    settings: dict[str, object] = {
        "run.dir": FOLDER, "run.name": name, "run.seed": seed, "run.total_steps": steps, "inference.quantization": form,
        "evaluate.every_steps": 0, "telemetry.rollouts_every_steps": 0, "inference.start_timeout_s": 900, "weights.stage_timeout_s": 600,
        "weights.switch_timeout_s": 600, **TASKS[task][1], **({"sft.total_steps": 5} if quick else {})}
    FOLDER.mkdir(parents=True, exist_ok=True)
    arguments = [part for key, value in settings.items() for part in (f"--{key}", str(value))]
    run([sys.executable, "-m", "offbeat", "train", ROOT / "examples" / f"{task}.toml", *arguments], log=f"int8-{name}", threads=1)
    result = json.loads((folder / "result.json").read_text())
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    gaps = [row["policy/logprob_gap_mean"] for row in rows if "policy/logprob_gap_mean" in row]
    shutil.rmtree(folder)
    done = Run(
        form, seed, steps, round(result["heldout_before"], 4), round(result["heldout_after"], 4), round(mean(gaps), 5),
        round(cpu_seconds() - used, 1), task, round(time.monotonic() - begun, 1))
    note(f"{name}: {done.before:.3f} to {done.after:.3f}, gap {done.gap:.4f}, CPU {done.cpu_seconds} s, wall {done.wall_seconds} s")
    return done


def render(runs: Sequence[Run]) -> str:
    """The table, and the interval of the differences between runs of the same seed."""
    lines = ["| weights of the engine | before | after | `policy/logprob_gap_mean` |", "|---|---|---|---|"]
    by_form = {form: {done.seed: done for done in runs if done.quantization == form} for form in FORMS}
    for form, name in zip(FORMS, ("float32", "int8"), strict=True):
        own = [done for _, done in sorted(by_form[form].items())]
        before, after = (_figures([getattr(done, which) for done in own]) for which in ("before", "after"))
        lines.append(f"| {name} | {before} | {after} | {mean(done.gap for done in own):.4f} |")
    both = sorted(by_form["none"].keys() & by_form["int8"].keys())
    off = [by_form["int8"][seed].after - by_form["none"][seed].after for seed in both]
    if len(off) < 2:
        return "\n".join(lines) + "\n"
    gains = {form: _interval([of[seed].after - of[seed].before for seed in both]) for form, of in by_form.items()}
    lines += [
        "", f"Accuracy gains {gains['none']} with float32 and {gains['int8']} with int8. int8 ends {_interval(off)} from float32.",
        f"These are means over {len(off)} pairs of the same seed, with 95 % intervals."]
    return "\n".join(lines) + "\n"


def _interval(values: Sequence[float]) -> str:
    half = T_95[len(values)] * stdev(values) / len(values) ** 0.5
    return f"{mean(values):+.3f} ({mean(values) - half:+.3f} to {mean(values) + half:+.3f})"


def _figures(values: Sequence[float]) -> str:
    return f"{mean(values):.3f} ({', '.join(f'{value:.3f}' for value in values)})"


if __name__ == "__main__":
    main()
