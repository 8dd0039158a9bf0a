"""Optional parts of the package: which modules an extra brings, and one sentence where they are missing. Nothing is loaded here."""

import importlib.util
from collections.abc import Sequence

from offbeat.errors import MissingExtraError

TRAIN = ("torch", "transformers", "tokenizers", "safetensors", "sqlalchemy", "prometheus_client", "math_verify")
"""Modules of the extra `train`, which loads, trains and serves models. Reading runs and checking configurations need none of them."""
QLORA = ("bitsandbytes",)
"""Modules of the extra `qlora`, which adapters over 4-bit weights need."""


def require(extra: str, modules: Sequence[str], *, wanted_by: str) -> None:
    """Refuse to begin something whose extra is not installed.

    Args:
        modules: top-level modules that it brings; none of them is imported here.
        wanted_by: the command or part that needs them, such as "config check --memory".

    Raises:
        MissingExtraError: names the modules that are missing, and the command that installs them.
    """
    if missing := missing_modules(modules):
        raise MissingExtraError(f"{wanted_by} needs {missing} not installed; run pip install 'offbeat[{extra}]'")


def missing_modules(modules: Sequence[str]) -> str:
    """Return the missing ones of these top-level modules, such as "torch, which is" or "torch and ray, which are"; "" if there are none."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if len(missing) > 1:
        return f"{', '.join(missing[:-1])} and {missing[-1]}, which are"
    return f"{missing[0]}, which is" if missing else ""
