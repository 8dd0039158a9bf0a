"""Clients' sessions: who began them, whether they last, and when they last gave a sign of life. Everything else belongs to one."""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from offbeat.errors import StorageError
from offbeat.service.errors import BadRequestError, LostError, UnknownError
from offbeat.service.ids import new_session_id
from offbeat.service.store import Store
from offbeat.service.tables import SessionRow
from offbeat.service.types import Caller

_STORED_EVERY_S = 60.0


class Sessions:
    """All sessions of all owners. One is silent after a while without a sign of life, and ended only when its client says so."""

    def __init__(
        self, rows: Iterable[SessionRow], *, store: Store, timeout_s: float, clock: Callable[[], float] = time.time,
    ) -> None:
        """
        Args:
            rows: those that there were before.
            timeout_s: after so long a session is silent; those from before get as long from now.
        """
        self._rows = {row.id: row for row in rows}
        self._last_seen = dict.fromkeys(self._rows, clock())
        self._store = store
        self._timeout_s = timeout_s
        self._clock = clock

    async def create(self, caller: Caller, *, metadata: Mapping[str, str], tags: tuple[str, ...], display_name: str) -> str:
        """Begin a session; its id."""
        now = self._clock()
        row = SessionRow(
            new_session_id(), caller.owner, created=now, last_seen=now, metadata=metadata, display_name=display_name, tags=tags)
        await self._store.put(row)
        self._rows[row.id], self._last_seen[row.id] = row, now
        return row.id

    def find(self, caller: Caller, session_id: str) -> SessionRow:
        """A session of the caller's, which may have ended; raises UnknownError if there is none."""
        row = self._rows.get(session_id)
        if row is None or row.owner != caller.owner:
            raise UnknownError(f"there is no session {session_id[:120]!r}; create one")
        return row

    def check(self, caller: Caller, session_id: str) -> SessionRow:
        """A session of the caller's that lasts, and this is a sign of life.

        Raises:
            UnknownError: there is none.
            BadRequestError: it has ended.
        """
        row = self.find(caller, session_id)
        if row.ended is not None:
            raise BadRequestError(f"the session {session_id} has ended; create another one")
        self._last_seen[session_id] = self._clock()
        return row

    def owner_of(self, session_id: str) -> str | None:
        """The owner of a session, if there is such a session."""
        row = self._rows.get(session_id)
        return row and row.owner

    def has_ended(self, session_id: str) -> bool:
        """Whether its client has said so."""
        return self._rows[session_id].ended is not None

    def is_silent(self, session_id: str) -> bool:
        """Whether nothing was heard of it for a while."""
        return self._last_seen[session_id] < self._clock() - self._timeout_s

    def of(self, caller: Caller) -> list[SessionRow]:
        """The caller's sessions, the newest first."""
        return sorted((row for row in self._rows.values() if row.owner == caller.owner), key=lambda row: -row.created)

    async def heartbeat(self, caller: Caller, session_id: str) -> None:
        """Take a sign of life.

        Raises:
            UnknownError: there is no such session.
            LostError: it has ended.
        """
        row, now = self.find(caller, session_id), self._clock()
        if row.ended is not None:
            raise LostError(f"the session {session_id} has ended; create another one")
        self._last_seen[session_id] = now
        if row.last_seen < now - _STORED_EVERY_S:
            self._rows[session_id] = replace(row, last_seen=now)
            await self._store.put(self._rows[session_id])

    async def finish(self, caller: Caller, session_id: str) -> bool:
        """End a session; whether it lasted until now. Raises StorageError if the database fails; it lasts as before."""
        row, now = self.find(caller, session_id), self._clock()
        if row.ended is not None:
            return False
        self._rows[session_id] = replace(row, last_seen=now, ended=now)  # first: a heartbeat must not store it as it was
        try:
            await self._store.put(self._rows[session_id])
        except StorageError:
            self._rows[session_id] = row
            raise
        return True
