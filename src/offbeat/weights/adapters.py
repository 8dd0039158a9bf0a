"""Names and manifests of LoRA adapters. An adapter is `tenant@version`: written once, loaded beside the old, never overwritten."""

import re
from dataclasses import dataclass

from offbeat.errors import ConfigError
from offbeat.types import Version

_TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def check_tenant(name: str) -> str:
    """The name itself, if it may be a tenant's; it becomes part of paths and of model names.

    Raises:
        ConfigError: it may not.
    """
    if not _TENANT.fullmatch(name):
        raise ConfigError(
            f"a tenant's name is 1 to 100 letters, digits, '.', '_' or '-' and begins with a letter or digit, got {name[:120]!r}")
    return name


def adapter_name(tenant: str, version: Version) -> str:
    """What engines know a version of a tenant's adapter by."""
    return f"{check_tenant(tenant)}@{version}"


def split_adapter_name(name: str) -> tuple[str, Version]:
    """The tenant and the version of an adapter.

    Raises:
        ConfigError: it is no adapter's name.
    """
    tenant, at, version = name.rpartition("@")
    if not (at and version.isascii() and version.isdecimal()):
        raise ConfigError(f"an adapter's name is tenant@version, such as alice@12, got {name[:120]!r}")
    return check_tenant(tenant), int(version)


@dataclass(frozen=True)
class AdapterManifest:
    """One immutable version of a tenant's adapter, as the trainer wrote it.

    Attributes:
        folder: in PEFT's format; never written again.
        fingerprint: `model.fingerprint` of its tensors as float32, under the names in the folder.
        canary: token ids whose log-probability proves the policy.
        canary_logprobs: log-probability of each of canary[1:] under the trainer's base model with this adapter; or their mean alone, of an
            adapter that an earlier Offbeat has written.
        num_bytes: size of the tensors.
    """

    tenant: str
    version: Version
    folder: str
    fingerprint: str
    canary: tuple[int, ...]
    canary_logprobs: tuple[float, ...]
    num_bytes: int = 0

    @property
    def name(self) -> str:
        """`tenant@version`."""
        return adapter_name(self.tenant, self.version)

    @property
    def canary_logprob(self) -> float:
        """The mean of them."""
        return sum(self.canary_logprobs) / len(self.canary_logprobs)
