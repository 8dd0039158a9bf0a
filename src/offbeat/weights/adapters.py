"""Names of LoRA adapters, and what many adapters on one base model need.

A version of an adapter is `adapter@version`: written once, loaded beside the old one, never overwritten. The rules stand here for the
program that serves adapters, which refuses before it starts anything, and for the ranks that train them.
"""

import re
from collections.abc import Collection, Mapping
from typing import TypeVar

from offbeat.config.model import LoraConfig
from offbeat.config.train import TrainConfig
from offbeat.errors import ConfigError
from offbeat.types import Version

_ADAPTER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_POLICY = "policy"
T = TypeVar("T")


def check_many(lora: LoraConfig, train: TrainConfig, *, shard: int, tp: int, ep: int) -> None:
    """Refuse settings with which many adapters cannot train; ranks divide the base model by `shard`, `tp` and `ep` of [train.parallel].

    Raises:
        ConfigError: model.lora.rank is 0, model.lora.dropout or train.router_aux_loss_coefficient is not, or the model is divided.
    """
    if not lora.rank:
        raise ConfigError("model.lora.rank must be at least 1 to train many adapters, got 0; give the largest rank of any of them")
    if lora.dropout:
        raise ConfigError(
            f"model.lora.dropout must be 0 to train many adapters, got {lora.dropout}; what one drops would depend on the others")
    if coefficient := train.router_aux_loss_coefficient:
        raise ConfigError(
            f"train.router_aux_loss_coefficient must be 0 to train many adapters, got {coefficient:g}; the loss of one would depend on the"
            " tokens of the others")
    for name, given in (("shard", shard), ("tp", tp), ("ep", ep)):
        if given > 1:
            raise ConfigError(
                f"train.parallel.{name} must be 1 to train many adapters, got {given}; each rank passes its rows at its own pace and holds"
                " the whole model, so leave it out, or train a single adapter in a run of its own")


def check_new(name: str, taken: Collection[str]) -> None:
    """Refuse, with ConfigError, the name of a new adapter that one of `taken` has, or that none may have."""
    if check_adapter(name) in taken:
        raise ConfigError(f"there is an adapter {name!r} already; choose another name, or remove it first")


def find_adapter(name: str, known: Mapping[str, T]) -> T:
    """Return the entry of an adapter. Raises ConfigError if there is none of this name; it names those that there are."""
    if name not in known:
        raise ConfigError(f"there is no adapter {name[:120]!r}, only {', '.join(known) or 'none'}; add it first")
    return known[name]


def check_adapter(name: str) -> str:
    """Return the name if an adapter may have it, else raise ConfigError; it becomes part of paths and of model names."""
    if not _ADAPTER.fullmatch(name):
        raise ConfigError(
            f"an adapter's name is 1 to 100 letters, digits, '.', '_' or '-' and begins with a letter or digit, got {name[:120]!r}")
    return name


def adapter_name(adapter: str, version: Version) -> str:
    """Return the name by which engines know a version of an adapter, such as "alice@12"."""
    return f"{check_adapter(adapter)}@{version}"


def split_adapter_name(name: str) -> tuple[str, Version]:
    """Return the adapter and the version of a name, such as ("alice", 12) for "alice@12". Raises ConfigError if it is no such name."""
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
