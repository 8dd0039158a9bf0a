"""Optional parts of the package: which modules an extra brings, and one sentence where they are missing. Nothing is loaded here."""

import importlib.util
from collections.abc import Sequence

from offbeat.errors import MissingExtraError

TRAIN = ("torch", "transformers", "tokenizers", "safetensors", "sqlalchemy", "prometheus_client", "math_verify")
"""Modules of the extra `train`, which loads, trains and serves models. Reading runs and checking configurations need none of them."""


def require(extra: str, modules: Sequence[str], *, wanted_by: str) -> None:
    """Refuse to begin something whose extra is not installed.

    Args:
        extra: name of the extra, such as "train".
        modules: top-level modules that it brings; none of them is imported here.
        wanted_by: what needs them, such as "offbeat train".

    Raises:
        MissingExtraError: names the modules that are missing, and the command that installs them.
    """
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        names = f"{', '.join(missing[:-1])} and {missing[-1]}, which are" if len(missing) > 1 else f"{missing[0]}, which is"
        raise MissingExtraError(f"{wanted_by} needs {names} not installed; run pip install 'offbeat[{extra}]'")
