"""API keys: the caller of a request, and the caller's limits.

Keys are listed in a TOML file; in an open house, any key is an owner of its own. Only digests are kept and compared, so that neither
memory nor the time of a comparison reveals a key. Used by the HTTP layer for each request.
"""

import hashlib
import re
import tomllib
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Self

import msgspec

from offbeat.errors import ConfigError
from offbeat.service.errors import UnknownKeyError
from offbeat.service.limits import Limits
from offbeat.service.types import Caller

_PREFIX = "tml-"
_MIN_CHARS = 16
"""Minimum length of a key in the file, after the prefix: as hexadecimal digits 64 bits, too many to guess over a network."""
_OWNER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_DEFAULT = Limits()
_EXAMPLE = '[owners.NAME] with key = "tml-..."'


class _Owner(msgspec.Struct, forbid_unknown_fields=True):
    """An owner's table in the file; limits that are not given have their default."""

    key: str
    max_models: int | None = None
    max_queued_tokens: int | None = None
    max_disk_bytes: int | None = None
    max_queued_bytes: int | None = None
    max_sessions: int | None = None
    max_samplers: int | None = None


class _File(msgspec.Struct, forbid_unknown_fields=True):
    owners: dict[str, _Owner]


class Keys:
    """Finds the owner of an API key, and an owner's limits."""

    def __init__(self, owners: Mapping[str, str] | None, limits: Mapping[str, Limits], default: Limits) -> None:
        """Use `load` or `open_house` instead.

        Args:
            owners: owners by the digest of their key; None for an open house.
            limits: limits by owner, where they differ from the default.
        """
        self._owners = owners
        self._limits = limits
        self._default = default

    @classmethod
    def load(cls, path: Path, *, default: Limits = _DEFAULT) -> Self:
        """Read a file of owners, tables `[owners.NAME]` of a `key` and fields of `Limits`; raises ConfigError if it cannot be used."""
        try:
            entries = msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), _File).owners
        except OSError as exc:
            raise ConfigError(f"the file of keys {path} cannot be read: {exc.strerror}") from exc
        except (tomllib.TOMLDecodeError, UnicodeDecodeError, msgspec.ValidationError) as exc:
            raise ConfigError(f"the file of keys {path} cannot be used: {exc}; write {_EXAMPLE} for each owner") from exc
        owners: dict[str, str] = {}
        for owner, entry in entries.items():
            _check_owner(path, owner, entry)
            if (other := owners.setdefault(_digest(entry.key), owner)) != owner:
                raise ConfigError(f"the owners {other} and {owner} in {path} have the same key; give each one of its own")
        return cls(owners, {owner: replace(default, **_given(entry)) for owner, entry in entries.items()}, default)

    @classmethod
    def open_house(cls, *, default: Limits = _DEFAULT) -> Self:
        """Accept every key that has the right form; equal keys are the same owner."""
        return cls(None, {}, default)

    @property
    def any_will_do(self) -> bool:
        """Whether this is an open house, which accepts any key."""
        return self._owners is None

    def caller(self, api_key: str) -> Caller:
        """Return the caller of a key such as "tml-..."; raises UnknownKeyError if no owner has the key."""
        digest = _digest(api_key)
        if not api_key.startswith(_PREFIX):
            raise UnknownKeyError(f"the API key does not begin with {_PREFIX}; set TINKER_API_KEY to the one you were given")
        owner = f"key-{digest[:12]}" if self._owners is None else self._owners.get(digest)
        if owner is None:
            raise UnknownKeyError("this server does not know the API key; set TINKER_API_KEY to the one you were given")
        return Caller(owner)

    def limits_of(self, owner: str) -> Limits:
        return self._limits.get(owner, self._default)


def _check_owner(path: Path, owner: str, entry: _Owner) -> None:
    if _OWNER.fullmatch(owner) is None:
        raise ConfigError(f"the owner {owner!r} in {path} has a name that cannot be used; take 1 to 64 of A-Z a-z 0-9 . _ -")
    if not entry.key.startswith(_PREFIX) or entry.key == _PREFIX:
        raise ConfigError(f"the key of owner {owner} in {path} does not begin with {_PREFIX}, which clients require")
    if (length := len(entry.key) - len(_PREFIX)) < _MIN_CHARS:
        raise ConfigError(
            f"the key of owner {owner} in {path} must have at least {_MIN_CHARS} characters after {_PREFIX}, got {length}; take random "
            "ones, such as openssl rand -hex 16 gives")
    for name, value in _given(entry).items():
        if value < 0:
            raise ConfigError(f"{name} of owner {owner} in {path} must be >= 0, got {value}")


def _given(entry: _Owner) -> dict[str, Any]:
    return {field.name: value for field in fields(Limits) if (value := getattr(entry, field.name)) is not None}


def _digest(api_key: str) -> str:
    return hashlib.sha256(api_key.encode(errors="surrogatepass")).hexdigest()
