"""The key that clients of a server have to give, for the commands that serve."""

import os
from pathlib import Path

from offbeat.errors import ConfigError


def read_key(file: str | None) -> str:
    """Return the key in a file, or $OFFBEAT_API_KEY without one, "" for no key; raises ConfigError if the file is unreadable or empty."""
    if file is None:
        return os.environ.get("OFFBEAT_API_KEY", "")
    try:
        key = Path(file).read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"--key-file {file} cannot be read: {getattr(exc, 'strerror', '') or 'it is not ASCII text'}") from exc
    if not key:
        raise ConfigError(f"--key-file {file} is empty; write a long random key into it")
    return key
