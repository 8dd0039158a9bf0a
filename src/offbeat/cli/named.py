"""`--model`, `--data`, `--reward` and the like: the arguments of `offbeat.train` by their names, so that training needs no file.

Each is short for settings, such as `--model` for `--model.path`, and means the same as the argument of the Python function.
"""

import argparse
from collections.abc import Sequence
from typing import Any

from offbeat.api.settings import settings_of_data
from offbeat.config.load import ALIASES, Override, load_config
from offbeat.config.root import Config
from offbeat.errors import ConfigError

_SHORT_FOR = {
    "model": ("model.path",),
    "data": ("data.path", "data.task", "data.sets"),
    "reward": ("rollout.reward", "rollout.rewards"),
    "evaluate": ("data.heldout_path",),
    "name": ("run.name",),
}
"""Settings that each option sets or replaces; errors name the first."""


def add_named_arguments(parser: argparse.ArgumentParser, *, data: str, rewards: bool = False) -> None:
    """Add the options; `data` is the help of `--data`, and `rewards` says whether the command calls a reward."""
    parser.add_argument("--model", help="the model to train: a folder or a hub id (model.path)")
    parser.add_argument("--data", help=f"{data} (data.path or data.task)")
    if rewards:
        parser.add_argument(
            "--reward", action="append",
            help="what scores a completion: file.py:function, module:function or the name of a built-in one (rollout.reward); given several"
            " times, all count alike")
    parser.add_argument("--evaluate", metavar="DATA", help="a file of held-out rows (data.heldout_path); else the last of the data are")
    parser.add_argument("--name", help="name of the run, whose folder is runs/NAME (run.name)")


def named_options(args: argparse.Namespace) -> dict[str, Any]:
    return {name: value for name in _SHORT_FOR if (value := getattr(args, name, None)) is not None}


def named_config(args: argparse.Namespace, overrides: Sequence[Override], *, command: str = "") -> Config:
    """Return the configuration of a file, settings and named options together.

    `command` is the name of a command that needs data, or "". Raises ConfigError if there is no data, something is given twice, or a
    setting cannot be used.
    """
    given = named_options(args)
    typed = {ALIASES.get(key, key) for key, _ in overrides}
    for name in given:
        if twice := next((key for key in _SHORT_FOR[name] if key in typed), None):
            raise ConfigError(f"--{name} and --{twice} say the same; give one of them")
    values: dict[str, Any] = {}
    for name, value in given.items():
        values |= settings_of_data("data", value) if name == "data" else {_SHORT_FOR[name][0]: value}
    if "reward" in given:
        [first, *others] = given["reward"]
        values |= {"rollout.reward": given["reward"] if others else first, "rollout.rewards": {}}
    config = load_config(args.config, overrides, values=values)
    if command and args.config is None and not (config.data.path or config.data.task or config.data.sets):
        rewards = " --reward rewards.py:score" if hasattr(args, "reward") else ""
        raise ConfigError(f"'offbeat {command}' was given no data; give a TOML file, or --model MODEL --data rows.jsonl{rewards}")
    return config
