"""Names of LoRA adapters. A version of one is `adapter@version`: written once, loaded beside the old one, never overwritten."""

import re

from offbeat.errors import ConfigError
from offbeat.types import Version

_ADAPTER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_POLICY = "policy"


def check_adapter(name: str) -> str:
    """Return the name if an adapter may have it; it becomes part of paths and of model names.

    Raises:
        ConfigError: no adapter may have it.
    """
    if not _ADAPTER.fullmatch(name):
        raise ConfigError(
            f"an adapter's name is 1 to 100 letters, digits, '.', '_' or '-' and begins with a letter or digit, got {name[:120]!r}")
    return name


def adapter_name(adapter: str, version: Version) -> str:
    """Return the name by which engines know a version of an adapter, such as "alice@12"."""
    return f"{check_adapter(adapter)}@{version}"


def split_adapter_name(name: str) -> tuple[str, Version]:
    """Return the adapter and the version of a name, such as ("alice", 12) for "alice@12".

    Raises:
        ConfigError: it is no such name.
    """
    adapter, at, version = name.rpartition("@")
    if not (at and version.isascii() and version.isdecimal()):
        raise ConfigError(f"an adapter's version is named adapter@version, such as alice@12, got {name[:120]!r}")
    return check_adapter(adapter), int(version)


def policy_adapter(incarnation: str) -> str:
    """Return the name of the adapter that a run trains, such as "policy.3fa9c1"; no other start of a run has it."""
    return f"{_POLICY}.{incarnation}"


def is_policy(name: str) -> bool:
    """Whether a name is that of a version of any run's policy, such as "policy.3fa9c1@12"."""
    adapter, at, _ = name.rpartition("@")
    return bool(at) and (adapter == _POLICY or adapter.startswith(f"{_POLICY}."))
