"""Checks that a database and a data folder belong together: both hold the same random identity, created at their first start.

With the wrong folder, a database would name none of the folder's checkpoints, and yet be believed. So `store` asks here before it changes
anything, and `serve` writes the identity into the folder once the database has it. If the start dies in between, the next one repeats it:
then only one of the two has the identity, and the other has no data yet.
"""

import uuid
from dataclasses import dataclass
from pathlib import Path

from offbeat.disk import sync, write_file
from offbeat.errors import ConfigError, StorageError
from offbeat.service.manifest import sealed_folders

_FILE = "identity"


@dataclass(frozen=True)
class Known:
    """A database's record of its data folder.

    Attributes:
        database: name of the database, to show to people.
        identity: identity in the database; empty if it has none.
        folders: folders of checkpoints, saved states and snapshots that its rows name.
    """

    database: str
    identity: str = ""
    folders: frozenset[str] = frozenset()


def agree(known: Known, data_dir: Path) -> str:
    """Return the identity shared by a database and a data folder, or a new one for both. Changes nothing.

    If either has no identity, as in data from before there were any, it gets one if the two evidently belong together: the database names
    a checkpoint that exists, or neither has any.

    Raises:
        ConfigError: they do not belong together.
        StorageError: the folder cannot be read.
    """
    try:
        file = data_dir / _FILE
        ours = file.read_text(errors="replace").strip() if file.exists() else ""
        sealed = sealed_folders(data_dir / "checkpoints") if not (known.identity and ours) else frozenset()
    except OSError as exc:
        raise StorageError(f"the data folder {str(data_dir)!r} cannot be read: {exc.strerror}; mend it, or give another one") from exc
    if known.identity and ours:
        why = f"their identities are {known.identity} and {ours[:40]}" if known.identity != ours else ""
    elif known.folders and not known.folders & sealed:
        why = f"it names {len(known.folders)} checkpoint folders, and none of them is there"
    elif sealed and not known.folders:
        why = f"it names no checkpoint, and {len(sealed)} are there"
    else:
        why = ""
    if why:
        raise ConfigError(
            f"{known.database} does not belong to the data folder {str(data_dir)!r}: {why}; nothing was changed; give the --database and "
            "the --data-dir that were used together, or a new one of each")
    return known.identity or ours or uuid.uuid4().hex


def keep(data_dir: Path, identity: str) -> None:
    """Write the identity into the folder durably; raises StorageError if it cannot be written."""
    try:
        if not (data_dir / _FILE).exists():
            write_file(data_dir / _FILE, f"{identity}\n".encode())
            sync(data_dir.parent)  # the folder itself may be new
    except OSError as exc:
        raise StorageError(f"the data folder {str(data_dir)!r} cannot be written: {exc.strerror}; free space, or give another one") from exc
