"""Reads a TOML file whose mistakes are told in a sentence. For `config.load`, and `config.resume`, which reads files of other versions."""

import tomllib
from pathlib import Path
from typing import Any

from offbeat.errors import ConfigError


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file as it is; raises ConfigError if it is missing, is not TOML, or cannot be read."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))  # editors on Windows put a mark of the byte order first
    except FileNotFoundError as exc:
        raise ConfigError(f"configuration file {path} does not exist; give the path of a TOML file") from exc
    except tomllib.TOMLDecodeError as exc:
        reason, _, place = str(exc).rpartition(" (at ")
        raise ConfigError(f"{path} is not valid TOML at {place.rstrip(')')}: {reason[:1].lower()}{reason[1:]}") from exc
    except RecursionError as exc:
        raise ConfigError(f"{path} has lists or tables inside each other, more than Python reads; give fewer levels") from exc
    except UnicodeDecodeError as exc:
        raise ConfigError(f"{path} is not UTF-8 text (byte {exc.start}); give a TOML file") from exc
    except ValueError as exc:  # such as an integer of thousands of digits
        raise ConfigError(f"{path} has a value that cannot be read: {exc}") from exc
    except OSError as exc:
        raise ConfigError(f"configuration file {path} cannot be read: {exc.strerror}; give the path of a TOML file") from exc
