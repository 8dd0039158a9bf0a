"""`offbeat config show | check | plan | docs`: shows a resolved configuration, checks one, says what a run chose, or explains settings."""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from offbeat.cli.named import add_named_arguments, named_config, named_options
from offbeat.config.docs import render_docs
from offbeat.config.dump import dump_toml, toml_value
from offbeat.config.notes import clip_note, notes_of_check
from offbeat.config.objectives import objective_of
from offbeat.config.presets import PRESETS
from offbeat.config.root import Config
from offbeat.cpu import this_cpu
from offbeat.errors import ConfigError
from offbeat.extras import TRAIN, missing_modules, require
from offbeat.machine import smallest_device
from offbeat.runs.devices import describe_devices, usable_devices
from offbeat.runs.learning_rates import rates_of_check
from offbeat.runs.number_format import format_choice, slow_formats
from offbeat.runs.plan import KeptPlan, place, read_plan
from offbeat.runs.step_choice import shape_of, step_choices

_MEMORY_TIMEOUT_S = 300

DESCRIPTION = """\
Show, check or explain configurations, and what a run chose where its configuration left a setting open.

  show   print every setting of a run, defaults included, as TOML; with --basic only those that a first run needs
  check  say whether a file and its overrides are valid, what a step of its algorithm computes, and on a machine with devices what a run
         would choose; exit 2 if it is not valid. The first rows of the data are read, rewards and workflow are loaded, and an objective
         or a credit of your own is called on synthetic samples
  plan   print what the run in a folder chose for its machine, and why: devices, threads, precision and learning rates
  docs   print the reference of all settings as Markdown
"""

EXAMPLES = """\
examples:
  offbeat config show                                         all defaults
  offbeat config show --basic                                 what a first run needs, of some three hundred settings
  offbeat config show run.toml --rollout.group_size 16        a file with one setting changed
  offbeat config show --model M --data D > run.toml           what named options come to, as a file
  offbeat config check run.toml && offbeat train run.toml     stop before anything starts
  offbeat config check run.toml --memory                      and what a train rank takes on a GPU
  offbeat config plan runs/my-run                             what a run chose where settings were left open
  offbeat config docs | less
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("show", "check", "plan", "docs"), help="what to do")
    parser.add_argument("config", nargs="?", metavar="CONFIG", help=(
        "TOML file; the defaults if left out; --section.key value changes it. With plan, a run's folder"))
    add_named_arguments(parser, data="rows to train on: a file, a folder, a hub id or a built-in task", rewards=True)
    parser.add_argument("--basic", action="store_true", help="with show: print only the settings that a first run needs")
    parser.add_argument("--memory", action="store_true", help="with check: estimate the memory of a train rank on a GPU")


def run(args: argparse.Namespace, overrides: Sequence[tuple[str, str]]) -> int:
    """Print the requested information.

    Raises ConfigError if the file or an override is invalid or names something that cannot be used, DataError if the folder has no plan,
    CodeError if an objective or a credit of the user's own does not work.
    """
    if args.action == "docs":
        print(render_docs(), end="")
        return 0
    if args.action == "plan":
        if overrides or named_options(args) or not args.config:
            raise ConfigError("config plan takes a run's folder and no settings, such as offbeat config plan runs/my-run")
        plan = read_plan(Path(args.config))
        print("\n".join(_kept(plan)))
        return 0
    config = named_config(args, overrides)
    if args.action == "show":
        print(dump_toml(config, only_basic=args.basic), end="")
    else:
        tried = _try(config)
        changed = f" with {len(overrides)} override{'' if len(overrides) == 1 else 's'}" if overrides else ""
        what = args.config or ("the configuration" if named_options(args) else "the default configuration")
        print(f"{what}{changed} is valid; its run goes to {config.run_dir}")
        print("\n".join([*tried, *_about(config), *_here(config), *(_memory(config) if args.memory else [])]))
    return 0


def _kept(plan: KeptPlan) -> Iterator[str]:
    yield f"machine: {plan.devices} devices, {plan.cores} cores"
    yield from (f"{setting} = {toml_value(choice.value)}: {choice.why}" for setting, choice in plan.settings.items())
    yield from plan.notes


def _try(config: Config) -> list[str]:
    """Try data, rewards, workflows, objective and credit, if the extra `train` is installed. Raises as `run`; returns a line on each."""
    if missing := missing_modules(TRAIN):
        return [f"note: data, rewards and workflow were not tried, which needs {missing} not installed; run pip install 'offbeat[train]'"]
    from offbeat.controller.own_code import check_own_code  # noqa: PLC0415 - needs packages that may be missing
    from offbeat.runs.check import check_named, pairs_in  # noqa: PLC0415

    return [*check_named(config), *check_own_code(config.algorithm), *rates_of_check(config, pairs=pairs_in(config.data))]


def _about(config: Config) -> Iterator[str]:
    """Yield lines on the chosen algorithm: the computation of each of its steps, and settings that cannot act."""
    algorithm = config.algorithm
    source = PRESETS[algorithm.preset].source
    name = f"{algorithm.preset} ({'arXiv:' if source[0].isdigit() else ''}{source})"
    computed = [what for what, needed in (
        ("log-probabilities before the first update", algorithm.needs_prox_pass),
        ("log-probabilities under the reference policy", algorithm.compares_reference),
        ("values, before and in an update of the critic", algorithm.needs_critic),
        (_teacher(config), algorithm.needs_teacher),
        ("the entropy of each token", algorithm.needs_entropy)) if needed]
    yield f"algorithm: {name}" + (f"; besides the update's own forward pass, a step computes {' and '.join(computed)}" if computed else "")
    if idle := clip_note(algorithm):
        yield f"note: {idle}"
    yield from (f"note: {note}" for note in notes_of_check(config))
    if top_k := config.teacher.top_k:
        cost = "the teacher's logits of a whole micro-batch are held at once" if config.teacher.path else "the engine sends as many numbers"
        bias = " the reverse KL on them is biased;" if "teacher_least" in objective_of(algorithm.objective).reads else ""
        yield f"note: each token is trained on as {top_k} targets, the teacher's likeliest, renormalised over them;{bias} {cost}"
    if config.teacher.path:
        yield "note: the frozen teacher takes its weights' memory on every train rank, or a shard of it with train.parallel.shard"


def _here(config: Config) -> Iterator[str]:
    """Yield lines on the choices of a run on this machine; without devices only on number formats, since `offbeat doctor` covers CPUs."""
    devices = usable_devices()
    placed = place(config, devices=devices)
    yield from (f"note: {advice}" for advice in slow_formats(placed, cpu=this_cpu()))
    if not devices and config.model.dtype == "auto":
        yield f"on this machine, {format_choice(placed, device=None, cpu=this_cpu())}"
    if not devices:
        return
    device = smallest_device() if placed.train.devices_per_rank else None
    yield f"on this machine, {describe_devices(placed, devices=devices)}"
    yield from (f"  {choice}" for choice in step_choices(placed, device=device, shape=shape_of(placed)))
    served = smallest_device() if placed.inference.devices_per_engine else None
    yield f"  {format_choice(placed, device=served, cpu=this_cpu())}"


def _memory(config: Config) -> Iterator[str]:
    """Yield a table of the memory that a train rank takes. Another process counts it, since that needs torch.

    Raises ConfigError if there is no model that can be read, MissingExtraError if torch is not installed.
    """
    require("train", TRAIN, wanted_by="config check --memory")
    if not config.model.path:
        raise ConfigError("model.path must name a model for --memory, got none; the tiny model fits anywhere")
    done = subprocess.run(
        [sys.executable, "-m", "offbeat.trainer.memory"], input=config.for_ranks.model_dump_json(), capture_output=True, text=True,
        timeout=_MEMORY_TIMEOUT_S, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise ConfigError(f"the memory of {config.model.path} cannot be estimated: {last}; see that the model can be loaded")
    sizes: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    host = sizes.pop("host")
    yield f"on a GPU, each of {config.train.num_ranks} train ranks takes about"
    yield from (f"  {name:<12}{size / 2**30:8.1f} GiB" for name, size in (sizes | {"total": sum(sizes.values())}).items())
    if host:
        yield f"  and {host / 2**30:.1f} GiB of host memory, where train.offload_optimizer keeps the optimizer's moments"


def _teacher(config: Config) -> str:
    """Say how the teacher scores a step's samples."""
    teacher = config.teacher
    if config.algorithm.teaches_itself:
        return f"log-probabilities under the {config.algorithm.teacher} with the answer in its context, a longer prompt"
    who = f"the teacher {teacher.path} on the train ranks" if teacher.path else f"the teacher at {teacher.url}, one request for each sample"
    return f"log-probabilities{f' and the {teacher.top_k} likeliest tokens' if teacher.top_k else ''} under {who}"
