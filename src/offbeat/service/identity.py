"""Whether a database and a data folder belong together: both hold one random identity, made at their first start.

A database that is beside the wrong folder names none of its checkpoints, and would be taken for the truth about them. So `store` asks
here before it changes anything, and `serve` leaves the identity in the folder once the database has it. A start that dies in between is
repeated: then one of the two has the identity, and nothing is in the other that could be lost.
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
    """What a database knows of its folder.

    Attributes:
        database: what people call it.
        identity: empty if it has none.
        folders: of checkpoints, saved states and snapshots that its rows name.
    """

    database: str
    identity: str = ""
    folders: frozenset[str] = frozenset()


def agree(known: Known, data_dir: Path) -> str:
    """The identity of a database and a data folder, or the one to give to both; changes nothing.

    Where one of them has none, as before there were identities, it gets one if the other cannot be a stranger: the database names a
    checkpoint that is there, or neither of them has any.

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
    """Leave the identity in the folder, for good.

    Raises:
        StorageError: it cannot be written.
    """
    try:
        if not (data_dir / _FILE).exists():
            write_file(data_dir / _FILE, f"{identity}\n".encode())
            sync(data_dir.parent)  # where the folder itself is new
    except OSError as exc:
        raise StorageError(f"the data folder {str(data_dir)!r} cannot be written: {exc.strerror}; free space, or give another one") from exc
