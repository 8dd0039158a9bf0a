"""Checkpoint folders that no database row names: set aside under a date, restored if a row names them again, and deleted when old.

A killed server leaves some, and so does restoring an older database, in which case they hold checkpoints that clients were told are
safe. So nothing is deleted at once. Called by `checkpoints`, on its threads.
"""

import logging
from collections.abc import Collection
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from offbeat.disk import discard
from offbeat.types import Clock

FOLDER = "orphans"
_DATE = "%Y-%m-%dT%H-%M-%SZ"
_log = logging.getLogger(__name__)


class Orphans:
    """The folder `orphans` below the folder of all checkpoints."""

    def __init__(self, root: Path, *, retention_s: float, clock: Clock) -> None:
        """`retention_s` is the time for which folders are kept; 0 keeps them until someone deletes them."""
        self._root = root
        self._folder = root / FOLDER
        self._retention_s = retention_s
        self._clock = clock

    def names(self) -> set[str]:
        return {path.name for path in self._folder.glob("*/*")}

    def put_aside(self, names: Collection[str]) -> None:
        """Move folders here, and log it."""
        now = self._clock()
        aside = self._folder / datetime.fromtimestamp(now, UTC).strftime(_DATE)
        aside.mkdir(parents=True, exist_ok=True)
        for name in names:
            (self._root / name).rename(aside / name)
        fate = "kept until somebody removes them"
        if self._retention_s:
            fate = f"removed after {datetime.fromtimestamp(now + self._retention_s, UTC):{_DATE}}"
        _log.warning(
            "%d checkpoint folders that the database does not name are in %s now, and %s; if an older database was put in place of a "
            "newer one, stop the server, put the newer one back, and start again: what it names comes back by itself",
            len(names), aside, fate)

    def bring_back(self, name: str) -> None:
        """Move a folder back to where it was, unless it exists there."""
        for path in self._folder.glob(f"*/{name}"):
            if not (self._root / name).exists():
                path.rename(self._root / name)
                _log.warning("the checkpoint folder %s, which the database names again, is back from %s", name, path.parent)

    def sweep(self) -> None:
        """Delete folders set aside long ago; anything that people have put here under other names stays."""
        if not self._retention_s or not self._folder.is_dir():
            return
        for path in self._folder.iterdir():
            with suppress(ValueError):
                since = datetime.strptime(path.name, _DATE).replace(tzinfo=UTC).timestamp()
                if since + self._retention_s <= self._clock():
                    _log.warning("the checkpoint folders in %s, which the database has not named for long, are removed", path)
                    discard(path)
