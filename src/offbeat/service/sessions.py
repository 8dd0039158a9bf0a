"""Clients' sessions: their owners, their ends and their last heartbeats. Everything else belongs to a session.

A session that has ended, or has been silent for long, is forgotten once nothing belongs to it any more. So memory and database hold no
more sessions than the owners' limits allow.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from offbeat.errors import StorageError
from offbeat.service.clock import steady_time
from offbeat.service.errors import BadRequestError, LostError, UnknownError
from offbeat.service.ids import new_session_id
from offbeat.service.limits import Usage
from offbeat.service.store import Store
from offbeat.service.tables import SessionRow
from offbeat.service.types import Caller
from offbeat.types import Clock

_STORED_EVERY_S = 60.0
_SWEPT_AT_ONCE = 1000


class Sessions:
    """All sessions of all owners. A session becomes silent after a while without a heartbeat, and ends only when its client says so.

    `users` return the sessions to which something belongs.
    """

    def __init__(
        self, rows: Iterable[SessionRow], *, store: Store, usage: Usage, timeout_s: float, retention_s: float = 86400.0,
        clock: Clock = steady_time,
    ) -> None:
        """Start from the stored rows.

        Args:
            timeout_s: a session is silent after this long; stored sessions get this long from now.
            retention_s: a session to which nothing belongs is forgotten so long after its last heartbeat; no time without a server counts.
        """
        self.users: list[Callable[[], Iterable[str]]] = []
        self._rows = {row.id: row for row in rows}
        self._started = clock()
        away_s = self._started - max((row.last_seen for row in self._rows.values()), default=self._started)
        self._last_seen = {row.id: row.last_seen + away_s for row in self._rows.values()}
        self._store = store
        self._usage = usage
        self._timeout_s = timeout_s
        self._retention_s = retention_s
        self._clock = clock
        for row in self._rows.values():
            usage.add(row.owner, sessions=1)

    async def create(self, caller: Caller, *, metadata: Mapping[str, str], tags: tuple[str, ...], display_name: str) -> str:
        """Begin a session and return its ID; raises RequestError if the owner has too many that are active or own something."""
        if self._usage.is_full(caller.owner, sessions=1):
            await self._forget([
                row for row in self._rows.values() if row.owner == caller.owner and (row.ended is not None or self.is_silent(row.id))])
        self._usage.charge(caller.owner, sessions=1)
        now = self._clock()
        row = SessionRow(
            new_session_id(), caller.owner, created=now, last_seen=now, metadata=metadata, display_name=display_name, tags=tags)
        await self._store.put(row)
        self._rows[row.id], self._last_seen[row.id] = row, now
        return row.id

    def find(self, caller: Caller, session_id: str) -> SessionRow:
        """Return a session of the caller, which may have ended; raises UnknownError if there is none."""
        row = self._rows.get(session_id)
        if row is None or row.owner != caller.owner:
            raise UnknownError(f"there is no session {session_id[:120]!r}; create one")
        return row

    def check(self, caller: Caller, session_id: str) -> SessionRow:
        """Return an active session of the caller, with a heartbeat; raises UnknownError if there is none, BadRequestError if it ended."""
        row = self.find(caller, session_id)
        if row.ended is not None:
            raise BadRequestError(f"the session {session_id} has ended; create another one")
        self._last_seen[session_id] = self._clock()
        return row

    def owner_of(self, session_id: str) -> str | None:
        """Return the owner of a session, or None if there is no such session."""
        row = self._rows.get(session_id)
        return row and row.owner

    def has_ended(self, session_id: str) -> bool:
        """Whether its client has ended a session, or it has been forgotten."""
        row = self._rows.get(session_id)
        return row is None or row.ended is not None

    def is_silent(self, session_id: str) -> bool:
        """Whether a session has not been heard from for a while, or has been forgotten."""
        return max(self._last_seen.get(session_id, 0.0), self._started) < self._clock() - self._timeout_s

    def silence_s(self, session_id: str) -> float:
        """Return the seconds since a session was last heard from, not counting time in which no server ran."""
        return self._clock() - self._last_seen.get(session_id, 0.0)

    def of(self, caller: Caller) -> list[SessionRow]:
        """Return the caller's sessions, newest first."""
        return sorted((row for row in self._rows.values() if row.owner == caller.owner), key=lambda row: -row.created)

    async def heartbeat(self, caller: Caller, session_id: str) -> None:
        """Record a heartbeat; raises UnknownError if there is no such session and LostError if the session has ended."""
        row, now = self.find(caller, session_id), self._clock()
        if row.ended is not None:
            raise LostError(f"the session {session_id} has ended; create another one")
        self._last_seen[session_id] = now
        if row.last_seen < now - _STORED_EVERY_S:
            self._rows[session_id] = replace(row, last_seen=now)
            await self._store.put(self._rows[session_id])

    async def end_session(self, caller: Caller, session_id: str) -> bool:
        """End a session. Returns whether it was still active; raises StorageError, and it stays active, if the database fails."""
        row, now = self.find(caller, session_id), self._clock()
        if row.ended is not None:
            return False
        self._rows[session_id] = replace(row, last_seen=now, ended=now)  # first, so that a heartbeat cannot store the old row
        try:
            await self._store.put(self._rows[session_id])
        except StorageError:
            self._rows[session_id] = row
            raise
        self._last_seen[session_id] = now
        return True

    async def sweep(self) -> None:
        """Forget sessions that were silent or have ended for long and to which nothing belongs. To be called about once a minute."""
        await self._forget([row for row in self._rows.values() if self.silence_s(row.id) > self._retention_s])

    async def _forget(self, rows: list[SessionRow]) -> None:
        """Forget the given sessions, except ones to which something belongs."""
        used = {session_id for using in self.users for session_id in using()} if rows else set()
        rows = [row for row in rows if row.id not in used][:_SWEPT_AT_ONCE]
        for row in rows:
            del self._rows[row.id], self._last_seen[row.id]
            self._usage.release_charge(row.owner, sessions=1)
        if rows:
            await self._store.delete(*rows)
