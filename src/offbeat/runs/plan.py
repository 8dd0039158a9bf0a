"""The plan of a run: its configuration with everything chosen that depends on the machine, and the reasons.

Runs in both modes, programs that serve many adapters, and evaluations make one plan before they start anything. A run keeps it in its
folder as `plan.json`, for example

    {"devices": 0, "cores": 8, "settings": {"train.threads": {"value": 4, "why": "of 8 cores"}}, "notes": ["CPU threads: 4 for ..."]}

Torch-free.
"""

import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from offbeat.config.base import value_at
from offbeat.config.for_processes import PlanConfig
from offbeat.config.root import Config
from offbeat.controller.reward_choice import num_reward_models, num_set_reward_models
from offbeat.cpu import this_cpu
from offbeat.data import wire
from offbeat.disk import write_file
from offbeat.errors import DataError
from offbeat.machine import Device, smallest_device
from offbeat.runs.devices import choose_devices, describe_devices, usable_devices
from offbeat.runs.number_format import choose_number_format, format_choice, slow_formats
from offbeat.runs.rank_info import RankInfo
from offbeat.runs.step_choice import Choice, choose_step, shape_of, step_choices
from offbeat.runs.threads import choose_threads, usable_cores
from offbeat.telemetry.record import RunRecord

PLAN_NAME = "plan.json"
_CONTROLLER = RankInfo()
_DEVICES = ("train.devices_per_rank", "inference.devices_per_engine", "cluster.share_devices")
_LIBRARIES = ("offbeat", "torch", "transformers", "numpy", "safetensors", "tokenizers")
_THREADS = ("train.threads", "inference.threads")
_WHOLE_EVERY = 20
"""An engine that missed versions reads a whole one and half as many changes on average: at 1 % of the weights each, a tenth more."""


@dataclass(frozen=True)
class RunPlan:
    """Everything that is decided before a run starts its processes.

    Attributes:
        sections: those that `Config.planned` takes, with all choices in place.
        num_devices: devices of this machine that processes may compute on.
        num_cores: cores of this machine that they may use.
        choices: settings that were left open, such as "train.threads", with their values and reasons.
        notes: sentences about devices, steps and threads for the console.
        advice: warnings, such as of a number format that is slow on this CPU.
    """

    sections: PlanConfig
    num_devices: int
    num_cores: int
    choices: tuple[Choice, ...]
    notes: tuple[str, ...]
    advice: tuple[str, ...]

    def having(self, choices: Sequence[Choice]) -> "RunPlan":
        """Return the plan with choices that were made before it, such as learning rates."""
        return replace(self, choices=(*choices, *self.choices))

    def tell(self, record: RunRecord) -> None:
        """Show the notes on the console, and give the advice."""
        for note in self.notes:
            record.console.note(note)
        self.advise(record)

    def advise(self, record: RunRecord) -> None:
        """Give the advice, on the console and as events."""
        for advice in self.advice:
            record.note("advice", advice)

    def write(self, config: Config) -> None:
        """Write `plan.json` to the run's folder; the configuration has all choices, those of `having` too."""
        settings = {choice.setting: KeptChoice(value_at(config, choice.setting), choice.why) for choice in self.choices}
        kept = KeptPlan(self.num_devices, self.num_cores, settings, self.notes, versions())
        write_file(config.run_dir / PLAN_NAME, wire.encode_json(kept) + b"\n")


@dataclass(frozen=True)
class KeptChoice:
    """The value of a setting that was left open, and the reason; for example 4, "of 8 cores"."""

    value: Any
    why: str


@dataclass(frozen=True)
class KeptPlan:
    """The plan in a run's folder: devices and cores of its machine, choices by setting, and sentences about them.

    `versions` are those of what its numbers depend on, by name; empty if an older version wrote it.
    """

    devices: int
    cores: int
    settings: dict[str, KeptChoice]
    notes: tuple[str, ...]
    versions: dict[str, str] = field(default_factory=dict)


def read_plan(run_dir: Path) -> KeptPlan:
    """Read `plan.json` from a run's folder; raises DataError if it is damaged or, as in runs of older versions, missing."""
    path = run_dir / PLAN_NAME
    if not path.exists() and (settings := run_dir / "config.toml").is_file():
        raise DataError(
            f"{run_dir} has no {PLAN_NAME}: the run was made by a version that kept no plan; what it chose is among all other settings in"
            f" {settings}, without the reasons, and a run that goes on there writes a plan")
    try:
        return wire.decode_json(KeptPlan, path.read_bytes())
    except OSError as exc:
        raise DataError(f"{path} cannot be read: {exc.strerror}; give a run's folder, such as runs/my-run") from exc


def versions() -> dict[str, str]:
    """Return the versions of what the numbers of a run depend on, and the CPU, such as {"offbeat": "0.1.0", "cpu": "..., AVX2"}."""
    return dict(_installed()) | {"python": platform.python_version(), "cpu": str(this_cpu())}


@cache
def _installed() -> tuple[tuple[str, str], ...]:
    """Read the versions of the libraries, from files of a hundred kilobytes."""
    found = []
    for name in _LIBRARIES:
        with suppress(PackageNotFoundError):
            found.append((name, version(name)))
    return tuple(found)


def changed_versions(was: Mapping[str, str]) -> list[str]:
    """Return a sentence on each of `versions` that is not as it was."""
    now = versions()
    return [
        f"{name} is {now.get(name, 'not installed')} here, and was {of_run} in the run, so that bits may differ"
        for name, of_run in was.items() if now.get(name) != of_run]


def make_plan(config: Config, *, rank_info: RankInfo = _CONTROLLER, trains: bool = True, serves: bool = True) -> RunPlan:
    """Choose devices, precision, recomputation, number format, changes of weights and threads, in this order, where they are left open.

    Arguments and errors are those of `choose_devices`.
    """
    num_devices, num_cores = usable_devices(), usable_cores()
    placed = place(config, devices=num_devices, rank_info=rank_info, trains=trains, serves=serves)
    device, shape = _rank_device(placed, rank_info), shape_of(placed) if trains else None
    stepped = choose_step(placed, device=device, shape=shape) if trains else placed
    formatted = choose_number_format(stepped)
    publishing = choose_changes(formatted) if trains and serves else formatted
    sections = choose_threads(publishing, cores=num_cores, rank_info=rank_info, trains=trains, serves=serves)
    engine_device = smallest_device() if stepped.inference.devices_per_engine else None
    reasons: Mapping[str, str] = {
        **dict.fromkeys(_DEVICES, f"of {num_devices} that are visible"), **dict.fromkeys(_THREADS, f"of {num_cores} cores"),
        **({choice.setting: choice.why for choice in step_choices(placed, device=device, shape=shape) if "." in choice.setting}
           if trains else {}),
        "model.dtype": format_choice(stepped, device=engine_device, cpu=this_cpu()).why,
        "weights.whole_every_versions": change_choice(formatted).why}
    choices = (
        Choice(setting, _shown(value_at(sections, setting)), why) for setting, why in reasons.items()
        if value_at(sections, setting) != value_at(config, setting))
    return RunPlan(
        sections, num_devices, num_cores, tuple(choices), tuple(_notes(sections, formatted, num_devices=num_devices, num_cores=num_cores)),
        tuple(slow_formats(sections, cpu=this_cpu())))


def place(config: Config, *, devices: int, rank_info: RankInfo = _CONTROLLER, trains: bool = True, serves: bool = True) -> PlanConfig:
    """Return the sections with settings that are chosen by the machine, with the devices chosen; see `choose_devices`."""
    num_judges = _num_judges(config, rank_info) if serves else 0
    return choose_devices(config.for_plan, devices=devices, num_judges=num_judges, rank_info=rank_info, trains=trains, serves=serves)


def _num_judges(config: Config, rank_info: RankInfo) -> int:
    """Return the number of reward models on this machine: of each process that plays, and on the first machine also of evaluation sets."""
    num_players = rank_info.local_world if not config.rollout.single_rank_load else int(rank_info.is_on_first_machine)
    of_sets = num_set_reward_models(config) if rank_info.is_on_first_machine else 0
    return num_reward_models(config) * num_players + of_sets


def _rank_device(placed: PlanConfig, rank_info: RankInfo) -> Device | None:
    """Return the device of a rank. In SPMD mode over several machines, each sees only its own devices: they are unknown."""
    known = placed.train.devices_per_rank and (placed.run.mode != "spmd" or rank_info.local_world == rank_info.world)
    return smallest_device() if known else None


def _notes(chosen: PlanConfig, formatted: PlanConfig, *, num_devices: int, num_cores: int) -> Iterator[str]:
    """Yield what the console shows about devices and threads; `formatted` are the sections before threads were chosen."""
    if num_devices:
        yield describe_devices(chosen, devices=num_devices)
        yield f"training steps: {chosen.train.computes_in}, activations computed again: {chosen.train.recomputes}"
    if (chosen.train.threads, chosen.inference.threads) != (formatted.train.threads, formatted.inference.threads):
        users = (("train rank", chosen.train.threads), ("engine", chosen.inference.threads))
        threads = ", ".join(f"{count} for each {user}" for user, count in users if count)
        yield f"CPU threads: {threads}, of {num_cores} cores"


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def choose_changes(config: PlanConfig) -> PlanConfig:
    """Return the sections, in which the number format is chosen, with a number in place of "auto"."""
    if config.weights.whole_every_versions != "auto":
        return config
    number = int(change_choice(config).value)
    return config.model_copy(update={"weights": config.weights.model_copy(update={"whole_every_versions": number})})


def change_choice(config: PlanConfig) -> Choice:
    """Return the number of versions from a whole one to the next, such as "20", and the reason."""
    weights, kind = config.weights, config.inference.kind
    if weights.whole_every_versions != "auto":
        return Choice("weights.whole_every_versions", str(weights.whole_every_versions), "as configured")
    value, why = 1, ""
    if config.model.lora.rank:
        why = "adapters are small"
    elif not kind.takes_changes:
        why = f"{config.inference.engine} takes whole weights only"
    elif config.inference.quantization != "none" and kind.changes_in_place:
        why = f"engines keep {config.inference.quantization} weights alone, to which no changes can be applied"
    elif config.model.number_format == "float32":
        why = "a step changes nearly every weight in float32"
    elif not (kind.changes_in_place or config.inference.urls or config.cluster.ray_address or weights.channel == "collective"):
        why = f"{config.inference.engine} would keep a copy of the weights for it, and has whole folders on this machine"
    else:
        value = _WHOLE_EVERY
        why = f"a step changes few weights in {config.model.number_format}"
    return Choice("weights.whole_every_versions", str(value), why)
