"""Chooses and reports the learning rates that a configuration leaves open ("auto"), by the table of `offbeat.config.rates`.

Called before anything is started, so that a run's own `config.toml` and its checkpoints state the numbers; a run that goes on keeps its
checkpoint's. `offbeat config check` reports them, too. Torch-free: of a model, only its `config.json` is read.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from offbeat.config.base import Part
from offbeat.config.rates import Task, choose_rate
from offbeat.config.root import TRAINING_KINDS, Config
from offbeat.data.model_folder import read_width
from offbeat.runs.step_choice import Choice

_NOTHING: Mapping[str, Any] = {}
_OPTIMIZERS = tuple(name for name, info in Config.model_fields.items() if "optimizer" in getattr(info.annotation, "model_fields", {}))
"""Sections with an optimizer."""
_RATES: Mapping[Part, Task] = {kind.part: kind.rates for kind in TRAINING_KINDS.values() if kind.lesson}
"""Rows of the table of rates by the sections of lessons."""
_IN_WORDS: Mapping[Task, str] = {
    "sft": "supervised fine-tuning", "preference": "preference training", "reward_model": "a reward model", "rl": "reinforcement learning",
    "distillation": "distillation", "critic": "a critic"}


def choose_rates(config: Config, part: Part, *, was: Mapping[str, Any] = _NOTHING) -> tuple[dict[str, Any], list[Choice]]:
    """Return sections with numbers in place of "auto", such as {"train": ...}, and the choices for this part of a run, with reasons.

    `was` has the settings of the checkpoint that the run goes on from, if there is one, such as {"train.optimizer.lr": 1e-6}. Raises as
    `read_width`.
    """
    choices = list(rate_choices(config, part, was=was))
    # Rates of other parts of the run stay as they are remembered, so that they do not count as changed.
    kept = {key: was[key] for key in _open(config) if was.get(key, "auto") != "auto"}
    rates = kept | {choice.setting: float(choice.value) for choice in choices}
    sections: dict[str, Any] = {}
    for key, rate in rates.items():
        section = getattr(config, name := key.partition(".")[0])
        sections[name] = section.model_copy(update={"optimizer": section.optimizer.model_copy(update={"lr": rate})})
    return sections, choices


def rate_choices(config: Config, part: Part, *, was: Mapping[str, Any] = _NOTHING) -> Iterator[Choice]:
    """Yield the open learning rates that a part of a run trains with; arguments and errors as for `choose_rates`."""
    for section, task in _tasks(config, part):
        key = f"{section}.optimizer.lr"
        if key not in _open(config):
            continue
        if was.get(key, "auto") != "auto":
            yield Choice(key, repr(was[key]), '"auto" keeps what the run had at its checkpoint')
            continue
        width = _width(config, task)
        adapter = config.model.lora.rank > 0 and task != "critic"
        of = "" if task == "critic" else " of an adapter" if adapter else " of all weights"
        yield Choice(key, repr(choose_rate(task, width=width, adapter=adapter)), f'"auto" for {_IN_WORDS[task]}{of}, width {width}')


def rates_of_check(config: Config, *, pairs: bool) -> Iterator[str]:
    """Yield the lines of `config check` on open rates. It does not know the command, so `pairs` decides. Raises as `read_width`."""
    model = config.model.path
    for part in [kind.part for kind in TRAINING_KINDS.values() if kind.pairs == pairs]:
        if model and not (Path(model).expanduser() / "config.json").is_file():
            yield from (
                f'{section}.optimizer.lr = "auto": chosen at the start, by the config.json of {model}, which is no folder here'
                for section, _ in _tasks(config, part) if f"{section}.optimizer.lr" in _open(config))
        else:
            yield from map(str, rate_choices(config, part))


def _open(config: Config) -> list[str]:
    return [f"{name}.optimizer.lr" for name in _OPTIMIZERS if getattr(config, name).optimizer.lr == "auto"]


def _tasks(config: Config, part: Part) -> Iterator[tuple[str, Task]]:
    """Yield the sections whose optimizers a part of a run uses, with their tasks, for example ("train", "rl")."""
    if part in _RATES:
        yield part, _RATES[part]
        return
    yield "train", "distillation" if config.algorithm.needs_teacher else "rl"
    if config.algorithm.needs_critic:
        yield "critic", "critic"
    if config.run.warm_up:
        yield "sft", "sft"


def _width(config: Config, task: Task) -> int:
    """Return the width of the trained model; a model to be built has the configured one."""
    path = (config.critic.path if task == "critic" else "") or config.model.path
    return read_width(path) if path else config.model.tiny.hidden_size
