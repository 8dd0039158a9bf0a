"""The Python environments of engines of other makes, and the command lines that start them. Torch-free.

`inference.arguments` come last and win. The server's key is in its environment, because anyone on the machine can read a command line.
"""

import subprocess
from pathlib import Path

from offbeat.config.for_processes import EngineConfig
from offbeat.errors import ConfigError
from offbeat.fleet.kinds import MAKERS, Serving

_ASK_PACKAGE = "import importlib.util, sys; sys.exit(importlib.util.find_spec(sys.argv[1]) is None)"
_ASK_TIMEOUT_S = 30.0


def server_command(
    config: EngineConfig, *, model: str, tokenizer: str, version: int, seed: int, key: str,
) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return the command (without its address) and the environment variables of one server of kind `inference.engine`.

    Raises:
        ConfigError: the environment does not exist, or the engine cannot serve this rank.
    """
    python = _find_python(config)
    command, env = MAKERS[config.inference.engine].command(config, Serving(model, tokenizer, version, seed, key))
    return (str(python), *command, *config.inference.arguments), env


def engine_python(config: EngineConfig) -> Path:
    """Find the Python that starts the servers; raises ConfigError if it does not exist, or lacks their package."""
    kind, python = config.inference.engine, _find_python(config)
    try:
        done = subprocess.run([str(python), "-c", _ASK_PACKAGE, kind], capture_output=True, timeout=_ASK_TIMEOUT_S, check=False)
        reason = f"it ended with exit code {done.returncode} when asked for it" if done.returncode else ""
    except (OSError, subprocess.TimeoutExpired) as exc:
        reason = str(exc)
    if reason:
        raise ConfigError(
            f"inference.engine = {kind!r} needs a Python with {kind} in it, and {python} is not one: {reason}; "
            "set inference.python to the Python of an environment that has it")
    return python


def _find_python(config: EngineConfig) -> Path:
    """Return the path unresolved, since it is a link that leads out of its environment."""
    kind = config.inference.engine
    python = Path(config.inference.python or f".venv-{kind}/bin/python").absolute()
    if not python.is_file():
        setup = config.inference.kind.setup
        make = f"run `{setup}`, or " if setup else ""
        raise ConfigError(
            f"inference.engine = {kind!r} needs a Python with {kind} in it, and {python} does not exist; "
            f"{make}set inference.python to the Python of an environment that has it")
    return python
