"""Finds the environment or the tools that `agent.environment` and `agent.tools` name, in the process that plays it."""

import inspect
import shlex
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from typing import Any

from offbeat.agents.environment import Stage
from offbeat.agents.environments.mcp import McpServer
from offbeat.agents.environments.own import OwnStage
from offbeat.agents.environments.tools import ToolStage
from offbeat.errors import CodeError, ConfigError, MissingExtraError
from offbeat.user_code.functions import resolve

ADAPTERS = {
    "textarena": ("textarena_games", "TextArena", "textarena"),
    "skyrl-gym": ("skyrl_gyms", "SkyRLGym", "skyrl-gym"),
    "gem": ("gem_games", "Gem", "gem-llm"),
    "openenv": ("openenv_server", "OpenEnv", "openenv"),
    "reasoning-gym": ("reasoning_items", "ReasoningGym", "reasoning-gym"),
}
"""Module, class and package of each library."""


def find_stage(names: Sequence[str], options: Sequence[str], *, step_timeout_s: float, tools: bool) -> Stage:
    """Return the environment or the tools that the settings name.

    `names` is one name of an environment, or with `tools` any number of names of tools.

    Raises:
        CodeError: nothing has such a name.
        ConfigError: an option cannot be read.
        MissingExtraError: a library is not installed.
    """
    return _tool_stage(names, timeout_s=step_timeout_s) if tools else _environment(names[0], read_options(options))


def read_options(options: Sequence[str]) -> dict[str, Any]:
    """Return options as named arguments, such as {"num_players": 2} for ["num_players=2"]; values are numbers, true, false, or text."""
    read: dict[str, Any] = {}
    for option in options:
        name, sign, value = option.partition("=")
        if not sign or not name.isidentifier():
            raise ConfigError(f"agent.options must each be NAME=VALUE, as in num_players=2, got {option!r}")
        read[name] = _value(value)
    return read


def _value(text: str) -> Any:
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _environment(name: str, options: dict[str, Any]) -> Stage:
    library, _, inner = name.partition(":")
    if library not in ADAPTERS:
        make = resolve(name, kind="agent.environment")
        for method in ("reset", "step"):
            if inspect.isclass(make) and not callable(getattr(make, method, None)):
                raise CodeError(f"agent.environment {name!r} has no method {method}; it needs reset(row, seed) and step(text)")
        return OwnStage(make, name=name, options=options)
    module, class_name, package = ADAPTERS[library]
    try:
        adapter = getattr(import_module(f"offbeat.agents.environments.{module}"), class_name)
    except ImportError as exc:
        raise MissingExtraError(
            f"agent.environment {name!r} needs {package}, which is not installed ({exc}); run pip install {package}") from exc
    return OwnStage(partial(adapter, inner, **options), name=name)


def _tool_stage(names: Sequence[str], *, timeout_s: float) -> Stage:
    functions, factories, servers = [], [], []
    for name in names:
        if name.startswith("mcp:"):
            servers.append(McpServer(shlex.split(name.removeprefix("mcp:"))))
            continue
        found = resolve(name, kind="agent.tools")
        (factories if inspect.isclass(found) else functions).append(found)
    if len(factories) > 1:
        raise CodeError(f"agent.tools may name one class, got {' and '.join(each.__name__ for each in factories)}")
    return ToolStage(functions, factories[0] if factories else None, servers, timeout_s=timeout_s)
