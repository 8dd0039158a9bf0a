"""Detects which public SDK sent a request, from its headers. Used by routes whose answers some versions cannot read."""

import re
from collections.abc import Mapping

_FULL = re.compile(r"(\d{1,4})\.(\d{1,4})(?:[.\-+a-z].*)?")
_AGENT = re.compile(r"AsyncTinker/Python (.+)")
_EXTERNAL_SINCE = (0, 28)


def sdk_version(headers: Mapping[str, str]) -> tuple[int, int] | None:
    """Return the first two numbers of the SDK's version, such as (0, 28), or None if the client is not the SDK or does not say."""
    agent = _AGENT.fullmatch(headers.get("user-agent", ""))
    said = _FULL.fullmatch(headers.get("x-sdk-version") or (agent[1] if agent else ""))
    return (int(said[1]), int(said[2])) if said else None


def knows_external(headers: Mapping[str, str]) -> bool:
    """Whether the client can read a list that contains exports; SDKs before 0.28 fail at the first."""
    version = sdk_version(headers)
    return version is None or version >= _EXTERNAL_SINCE
