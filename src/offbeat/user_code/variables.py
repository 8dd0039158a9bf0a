"""Environment variables of processes that run user code: without the parent's secrets, and with this machine reached without a proxy."""

import re
from collections.abc import Collection, Mapping

from offbeat.hosts import LOOPBACK, direct

_SECRET_NAME = re.compile(
    r"^(AWS|AZURE)_|PASSWORD|SECRET|CREDENTIAL|APIKEY|(^|_)(KEY|KEYS|TOKEN|PASSWD|PASS|PASSPHRASE|AUTH|COOKIE|PAT|DSN)(_|$)|_PWD$",
    re.IGNORECASE)
_SECRET_VALUE = re.compile(r"://[^/@\s]*:[^/@\s]+@")
"""Matches a URL that contains a password."""


def secret_variables(environ: Mapping[str, str], *, allowed: Collection[str]) -> frozenset[str]:
    """Return the names of variables that look like secrets, by name or value, and are not in `allowed`."""
    return frozenset(
        name for name, value in environ.items()
        if name not in allowed and (_SECRET_NAME.search(name) or _SECRET_VALUE.search(value)))


def environment_of_programs(environ: Mapping[str, str], *, allowed: Collection[str], host: str = LOOPBACK) -> dict[str, str]:
    """Return the environment of user programs: without secrets, unless `allowed`, and with this machine reached without a proxy."""
    hidden = secret_variables(environ, allowed=allowed)
    return {name: value for name, value in environ.items() if name not in hidden} | direct(environ, host)
