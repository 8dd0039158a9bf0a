"""`offbeat eval CONFIG [MODEL ...]`: how often models are right on held-out prompts and evaluation sets, without training."""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console as Terminal
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Table
from rich.text import Text

from offbeat.cli.common import add_json_argument, keep_private
from offbeat.cli.compare import WIDTH, print_differences
from offbeat.config.load import load_config
from offbeat.errors import ConfigError, DataError
from offbeat.evaluation.comparison import compare
from offbeat.evaluation.files import samples_beside
from offbeat.evaluation.result import ModelResult
from offbeat.loading import load_module
from offbeat.runs.evaluated_model import KEY_ENV, is_run, run_config
from offbeat.telemetry.evaluation_log import RESULT_NAME

if TYPE_CHECKING:
    from offbeat.runs.evaluation import OnProgress, Progress

_OF_ONE_PROCESS = (("run.mode", "controller"), ("rollout.single_rank_load", "true"))
"""Settings of a run that do not hold for the evaluation of its export."""

DESCRIPTION = """\
Evaluate models on the configured held-out prompts and evaluation sets. CONFIG is a TOML file, or the folder of a run, whose settings are
used and whose export is evaluated. Each MODEL is a model's folder or hub id, the folder of a LoRA adapter (its base is --model.path, or
the one that it names), a run's folder, or the URL of an OpenAI-style endpoint (URL#NAME if it has several models). Without a MODEL, the
model at model.path is evaluated. Given several, each is compared with the first, prompt by prompt.

Scores are written as JSON to FILE, or to evaluation.json in the folder NAME-eval, and answers with their texts as JSON lines beside it.
"""

EXAMPLES = """\
examples:
  offbeat eval task.toml --model.path runs/my-run/export
  offbeat eval runs/my-run --checkpoint best
  offbeat eval task.toml Qwen/Qwen3-0.6B runs/gsm8k http://localhost:8001 --evaluate.num_prompts 64 --output three.json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG", help="TOML file, or a run's folder; --section.key value changes a setting")
    parser.add_argument("models", metavar="MODEL", nargs="*", help="what to evaluate (default: the run, or model.path)")
    parser.add_argument("--checkpoint", default="", metavar="WHICH", help="export of a run: last, best or a step's number (default: last)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="JSON file for scores; answers go to FILE's name with .samples.jsonl")
    parser.add_argument(
        "--key-env", default=KEY_ENV, metavar="NAME", help=f"environment variable with the key of endpoints (default: {KEY_ENV})")
    add_json_argument(parser)


def run(args: argparse.Namespace, overrides: Sequence[tuple[str, str]]) -> int:
    """Evaluate the models and print the results; raises ConfigError if an option is invalid, or there is nothing to evaluate."""
    if args.output is not None and args.output.suffix != ".json":
        raise ConfigError(f"--output must name a .json file, got {args.output}; answers go to a file of that name with .samples.jsonl")
    path, models = args.config, list(args.models)
    if is_run(Path(path)):
        path, models = str(run_config(Path(path))), [args.config, *(model for model in models if model != args.config)]
        overrides = [*_OF_ONE_PROCESS, *overrides]
    config = load_config(path, overrides)
    keep_private(config)
    # Loaded here and not at the top: it takes a second more, and help is shown and a wrong setting found without it.
    with shown(Terminal(stderr=True, highlight=False) if sys.stderr.isatty() and not args.json else None) as show:
        results = load_module("offbeat.runs.evaluation").evaluate_models(
            config, models, checkpoint=args.checkpoint, key_env=args.key_env, output=args.output, on_progress=show)
    if args.json:
        for result in results:
            print(json.dumps({"model": result.model, **result.metrics()}, ensure_ascii=False))
        return 0
    _print(results)
    output = args.output or config.run_dir.with_name(f"{config.run.name}-eval") / RESULT_NAME
    print(f"answers: {samples_beside(output)}")
    return 0


def _print(results: Sequence[ModelResult]) -> None:
    first, *others = results
    if others:
        print_table(results)
        _compare(first, others)
    elif any(each.name for each in first.evaluations):
        print_table(results)
    else:
        [evaluation] = first.evaluations
        failed = f", {evaluation.num_failed} of them failed" if evaluation.num_failed else ""
        print(f"{evaluation}, mean reward {evaluation.reward_mean:.3f}, over {evaluation.num_prompts} prompts{failed}")
    for result in results:
        for each in result.evaluations:
            if each.own_failure:
                print(f"{each.title}: evaluate.metric failed: {each.own_failure}")


def print_table(results: Sequence[ModelResult]) -> None:
    """Print a row for each set and model; empty columns are left out."""
    rows = [(result.model, each) for result in results for each in result.evaluations]
    order = list(dict.fromkeys(each.name for _, each in rows))
    rows.sort(key=lambda row: order.index(row[1].name))
    shares = dict.fromkeys(name for _, each in rows for name in each.shares)
    several = len(results) > 1
    table = Table(box=None, pad_edge=False)
    for title in ("set", *(["model"] if several else []), "prompts", "accuracy", "95 % interval", "mean reward", *shares, "failed"):
        table.add_column(title, justify="left" if title in ("set", "model") else "right", no_wrap=True)
    for model, each in rows:
        low, high = each.interval
        own = (f"{each.shares[name]:.3f}" if name in each.shares else "" for name in shares)
        table.add_row(
            each.name or "held-out", *([model] if several else []), str(each.num_prompts), f"{each.accuracy:.3f}",
            f"{low:.3f} to {high:.3f}", f"{each.reward_mean:.3f}", *own, str(each.num_failed))
    Terminal(highlight=False, width=WIDTH).print(table)


def _compare(first: ModelResult, others: Sequence[ModelResult]) -> None:
    """Print the differences of each other model from the first, prompt by prompt."""
    terminal = Terminal(highlight=False, width=WIDTH)
    for other in others:
        terminal.print(Text(f"\nA  {first.model}\nB  {other.model}"))
        try:
            print_differences(compare(first.played, other.played, num_changes=0), terminal)
        except DataError as exc:
            terminal.print(Text(str(exc)))


@contextmanager
def shown(terminal: Terminal | None) -> Iterator["OnProgress"]:
    """Yield a function that shows progress as one line on a terminal, which disappears at the end; without a terminal it shows nothing."""
    if terminal is None:
        yield lambda _progress: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[told]}"), TimeElapsedColumn(),
               TextColumn("·"), TimeRemainingColumn(), TextColumn("left"))
    with Bar(*columns, console=terminal, transient=True) as bar:
        task = bar.add_task("starting", total=None, told="")

        def show(progress: "Progress") -> None:
            if not progress.num_answered:
                bar.reset(task, total=progress.num_prompts or None)
            told = f"accuracy {progress.accuracy:.3f}" if progress.num_answered else ""
            bar.update(task, description=f"{progress.model} · {progress.set or 'starting'}", completed=progress.num_answered, told=told)

        yield show
