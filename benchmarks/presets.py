"""Every preset on one task under one budget: held-out accuracy of `sort_digits` before and after, and CPU time.

Each run is `offbeat train` with the quick start's configuration on one warmed-up base, which `offbeat sft` makes once: the same steps,
samples, learning rate and staleness for all, and nothing but `algorithm.preset` differs, and what a preset needs besides (`NEEDED`): a
critic's learning rate, and a teacher, which is the same base after more supervised steps. A seed draws other prompts, held-out prompts and
samples; the base is the same. The time is that of the CPU, over all processes of a run, so that it does not depend on what else runs.

    python benchmarks/presets.py [--quick] [--presets grpo,cispo] [--seeds 0 1 2] [--resume] [--write-docs]

Runs are kept in benchmarks/presets.jsonl, a line each. With --resume it is gone on with, and what is done under the same settings is not
done again; without, it begins anew. One line per preset is printed when all of its seeds are done. All presets take about an hour and a
half on two cores. --write-docs writes the table of docs/algorithms.md from that file in the end.
"""

import argparse
import json
import shutil
import textwrap
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from measure import BENCHMARKS, ROOT, WORK, note
from results import cpu_seconds, read_results, record, write_section
from step import offbeat

from offbeat.config.presets import PRESETS

FOLDER = WORK / "presets"
BASE, TEACHER = FOLDER / "base" / "export", FOLDER / "teacher" / "export"
RESULTS, SMOKE = BENCHMARKS / "presets.jsonl", WORK / "presets-quick.jsonl"
"""Runs, and those of smoke runs, which leave the others alone."""
DOCUMENT = ROOT / "docs" / "algorithms.md"
BEGIN, END = "<!-- begin: presets on sort_digits -->\n", "<!-- end: presets on sort_digits -->\n"
BASE_SETTINGS = {"sft.stop_at_accuracy": "0.35", "sft.evaluate_every_steps": "5"}
TEACHER_SETTINGS = {"sft.stop_at_accuracy": "0.97", "sft.evaluate_every_steps": "20", "sft.total_steps": "400"}
NEEDED: Mapping[str, Mapping[str, object]] = {
    "ppo": {"critic.optimizer.lr": "1e-3"}, "vapo": {"critic.optimizer.lr": "1e-3", "critic.warmup_steps": "10"},
    "opd": {"teacher.path": TEACHER}}
BUDGET = {
    "run.total_steps": "80", "train.optimizer.lr": "2e-4", "rollout.group_size": "8", "rollout.consumer_batch_size": "64",
    "rollout.max_head_offpolicyness": "1"}
"""Settings of all runs alike, beside those of the quick start."""
QUICK = {"run.total_steps": "3"}
REMARKS = {
    "vapo": "`vapo` learns least: its lambda of 1 - 1 / (0.05 n) is made for answers of hundreds of tokens. For the 9 of this"
            " task it is 0,\nso that each token learns from a critic alone which has had ten steps to begin with.",
    "sdft": "`sdft` forgets what the base knew: a model this small, which has never seen a prompt with its solution, has nothing to teach"
            " itself.",
}
"""What to know about a row of the table, by preset."""


@dataclass(frozen=True)
class Run:
    """One line of the results.

    Attributes:
        settings: those of all runs, to tell results under another budget apart.
        before, after: held-out accuracy.
        cpu_seconds: of all processes, from their start to their end.
    """

    preset: str
    seed: int
    settings: Mapping[str, str]
    before: float
    after: float
    cpu_seconds: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smoke run: three steps of one seed")
    parser.add_argument("--presets", type=_names, default=list(PRESETS), metavar="A,B", help="which presets (default: all)")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="seeds of prompts and samples (default: 0 1 2)")
    parser.add_argument("--resume", action="store_true", help="keep the results that there are, and do the rest")
    parser.add_argument("--write-docs", action="store_true", help=f"write the table of {DOCUMENT.relative_to(ROOT)} from the results")
    args = parser.parse_args()
    settings, seeds = (BUDGET | QUICK, args.seeds[:1]) if args.quick else (BUDGET, args.seeds)
    results = SMOKE if args.quick else RESULTS
    if not args.resume:
        results.unlink(missing_ok=True)
    if not (BASE / "config.json").exists():
        note("supervised warm-up, once")
        offbeat("sft", "--run.dir", FOLDER, "--run.name", BASE.parent.name, *_overrides(BASE_SETTINGS))
    if any("teacher.path" in NEEDED.get(preset, ()) for preset in args.presets) and not (TEACHER / "config.json").exists():
        note("a teacher, once")
        offbeat("sft", "--run.dir", FOLDER, "--run.name", TEACHER.parent.name, *_overrides(TEACHER_SETTINGS))
    for preset in args.presets:
        done = {run.seed: run for run in runs_under(settings, results) if run.preset == preset}
        for seed in seeds:
            if seed not in done:
                done[seed] = train(preset, seed, settings)
                record(results, done[seed])
        print(json.dumps(summary([done[seed] for seed in seeds])), flush=True)
    if args.write_docs:
        write_section(DOCUMENT, render(runs_under(settings, results), settings), begin=BEGIN, end=END)


def _names(text: str) -> Sequence[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in PRESETS]:
        raise argparse.ArgumentTypeError(f"no preset is called {unknown[0]!r}; there are {', '.join(PRESETS)}")
    return names


def _overrides(settings: Mapping[str, object]) -> list[object]:
    return [part for key, value in settings.items() for part in (f"--{key}", value)]


def train(preset: str, seed: int, settings: Mapping[str, str]) -> Run:
    """One run, from the base."""
    name = f"{preset}-{seed}"
    shutil.rmtree(FOLDER / name, ignore_errors=True)
    start, used = time.monotonic(), cpu_seconds()
    offbeat("train", *_overrides({
        "run.dir": FOLDER, "run.name": name, "run.seed": seed, "run.warm_up": "false", "model.path": BASE, "evaluate.every_steps": 0,
        "checkpoint.export": "false", "algorithm.preset": preset, **NEEDED.get(preset, {}), **settings}))
    result = json.loads((FOLDER / name / "result.json").read_text())
    run = Run(preset, seed, settings, result["heldout_before"], result["heldout_after"], round(cpu_seconds() - used, 1))
    note(f"{name}: held-out accuracy {run.before:.3f} to {run.after:.3f} in {time.monotonic() - start:.0f} s, CPU {run.cpu_seconds} s")
    return run


def runs_under(settings: Mapping[str, str], results: Path) -> list[Run]:
    """All runs that were made under these settings."""
    return [run for run in read_results(results, Run) if run.settings == settings]


def summary(runs: Sequence[Run]) -> dict[str, object]:
    """What is printed of a preset, given its runs."""
    return {
        "benchmark": "presets", "preset": runs[0].preset, "seeds": [run.seed for run in runs], "before": [run.before for run in runs],
        "after": [run.after for run in runs], "mean_before": round(mean(run.before for run in runs), 4),
        "mean_after": round(mean(run.after for run in runs), 4), "cpu_seconds": round(mean(run.cpu_seconds for run in runs), 1)}


def render(runs: Sequence[Run], settings: Mapping[str, str]) -> str:
    """The section of the page: a row for each preset that was run, the best first."""
    by_preset = {preset: sorted((run for run in runs if run.preset == preset), key=lambda run: run.seed) for preset in PRESETS}
    found = [own for own in by_preset.values() if own]
    seeds = sorted({run.seed for run in runs})
    lines = [
        "## The presets on one task",
        "",
        "Sorting 8 digits with a model of 0.6M parameters from one warmed-up base, with one budget for all: "
        f"{settings['run.total_steps']} steps of {settings['rollout.consumer_batch_size']}",
        f"prompts with {settings['rollout.group_size']} samples each, a learning rate of {settings['train.optimizer.lr']}, and one version "
        "of staleness. `python benchmarks/presets.py --write-docs`",
        "makes this table. It shows whether a preset learns, not which is best: each wants a learning rate of its own, and what some are",
        "made for does not occur here, such as stale samples, long answers, engines that compute differently and rewards by name. Accuracy",
        "is that of 256 held-out prompts, which a seed draws; the time is that of the CPU, over all processes of a run from start to end.",
        "",
        "| preset | before, mean | " + " | ".join(f"after, seed {seed}" for seed in seeds) + " | after, mean | CPU seconds |",
        "|---|---|" + "---|" * len(seeds) + "---|---|"]
    for own in sorted(found, key=lambda own: -mean(run.after for run in own)):
        after = {run.seed: f"{run.after:.3f}" for run in own}
        cells = [
            own[0].preset, f"{mean(run.before for run in own):.3f}", *(after.get(seed, "") for seed in seeds),
            f"{mean(run.after for run in own):.3f}", f"{mean(run.cpu_seconds for run in own):.0f}"]
        lines.append("| " + " | ".join(cells) + " |")
    if missing := [preset for preset, own in by_preset.items() if not own]:
        names = ", ".join(f"`{preset}`" for preset in missing)
        lines += ["", *textwrap.wrap(f"Not measured since the base or the presets changed: {names}.", 140)]
    lines += ["", *(REMARKS[preset] for preset, own in by_preset.items() if own and preset in REMARKS)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
