"""The service's database, through SQLAlchemy: SQLite, or PostgreSQL by URL. The core keeps everything in memory; this is the durable copy.

One thread writes. It consumes rows that callers put or delete, produces transactions, and is woken by the next call. Everything that
arrives while one transaction commits goes into the next, so thousands of small writes per second need few commits. A call returns when
its changes are committed and on disk: they survive the death of this process and a power cut.
"""

import asyncio
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Self, TypeVar

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, OperationalError, SQLAlchemyError

from offbeat.errors import ConfigError, MissingExtraError, StorageError
from offbeat.service.identity import Known
from offbeat.service.tables import (
    IDENTITY,
    METADATA,
    SCHEMA,
    SCHEMA_VERSION,
    TABLES,
    CheckpointRow,
    FutureRow,
    ModelRow,
    Row,
    SamplerRow,
    SessionRow,
)
from offbeat.settling import outcome_of

MakeRow = Callable[[], Row]
"""Makes a row when it is written."""

Identify = Callable[[Known], str]
"""Returns the identity of a database."""

_TIMEOUT_S = 10
_CLAIM_S = 3
_LOCK_KEY = 0x0FFBEA7
_INSERT: dict[str, Any] = {"sqlite": sqlite.insert, "postgresql": postgresql.insert}
_DRIVERS = {"sqlite": "sqlite+pysqlite", "postgresql": "postgresql+psycopg"}
_ARGUMENTS: dict[str, dict[str, Any]] = {
    "sqlite": {"timeout": _TIMEOUT_S},
    "postgresql": {
        "connect_timeout": _TIMEOUT_S, "tcp_user_timeout": _TIMEOUT_S * 1000,
        # The server drops the connection to a machine that vanished, and its locks, after 20 s.
        "options": f"-c statement_timeout={_TIMEOUT_S}s -c tcp_keepalives_idle=10 -c tcp_keepalives_interval=5 -c tcp_keepalives_count=2"}}
R = TypeVar("R", bound=Row)


@dataclass(frozen=True)
class StoredRows:
    sessions: tuple[SessionRow, ...]
    models: tuple[ModelRow, ...]
    checkpoints: tuple[CheckpointRow, ...]
    samplers: tuple[SamplerRow, ...]


@dataclass(eq=False)
class _Write:
    """One call's changes: rows, or functions that make rows on the writer's thread, and whether to store or delete them."""

    given: Sequence[Row | MakeRow]
    keep: bool
    done: asyncio.Future[None]
    rows: Sequence[Row] = ()

    def made(self) -> bool:
        """Make the rows. Returns False, and gives the caller the error, if that failed."""
        outcome = outcome_of(lambda: [row() if callable(row) else row for row in self.given])
        if (error := outcome.exception()) is not None:
            self.wake_caller(error)
            return False
        self.rows = outcome.result()
        return True

    def wake_caller(self, error: BaseException | None) -> None:
        """Wake the caller, with an error if there is one."""
        def tell() -> None:
            if not self.done.done():
                self.done.set_exception(error) if error else self.done.set_result(None)

        with suppress(RuntimeError):  # the loop is closed, so nobody is waiting any more
            self.done.get_loop().call_soon_threadsafe(tell)


class Store:
    """An open database. `put` and `delete` belong to an event loop; the other methods block for a short query, from any thread.

    Methods that read raise StorageError if the database cannot be read.

    Attributes:
        identity: the identity shared with the data folder; empty if none was given.
    """

    def __init__(self, engine: sa.Engine, claim: sa.Connection | None, identity: str) -> None:
        """Use `open` instead."""
        self.identity = identity
        self._engine = engine
        self._claim = claim
        self._closed = False
        self._upserts = {table: _upsert(engine, table) for table in TABLES.values()}
        self._queue: SimpleQueue[_Write | None] = SimpleQueue()
        self._writer = threading.Thread(target=self._work, name="store", daemon=True)
        self._writer.start()

    @classmethod
    def open(cls, url: str, *, identify: Identify = lambda known: known.identity) -> Self:
        """Open the database at `url`, creating its tables if it is new.

        Args:
            url: "sqlite:///PATH", in a folder that the caller has locked, or "postgresql://USER@HOST/NAME".
            identify: returns the identity that the database is to have; called before anything is changed, and may raise.

        Raises:
            ConfigError: the URL cannot be used, another server uses the database, or a newer version of this package created it.
            MissingExtraError: PostgreSQL's client is not installed.
            StorageError: the database cannot be opened.
        """
        engine = _engine(url)
        claim = _claim(engine) if engine.dialect.name == "postgresql" else None
        try:
            known = _known(engine)
            identity = identify(known)
            with _sentences(engine), engine.begin() as connection:
                METADATA.create_all(connection)
                if connection.scalar(sa.select(sa.func.max(SCHEMA.c.version))) is None:
                    connection.execute(sa.insert(SCHEMA).values(version=SCHEMA_VERSION))
                if identity and not known.identity:
                    connection.execute(sa.insert(IDENTITY).values(id=identity))
        except BaseException:
            if claim is not None:
                claim.close()
            engine.dispose()
            raise
        return cls(engine, claim, identity)

    def load(self) -> StoredRows:
        """Return all rows except `FutureRow`s."""
        return StoredRows(self._all(SessionRow), self._all(ModelRow), self._all(CheckpointRow), self._all(SamplerRow))

    def find_future(self, request_id: str) -> FutureRow | None:
        """Return the row of a request that has ended, or None."""
        return next(iter(self._all(FutureRow, TABLES[FutureRow].c.request_id == request_id)), None)

    def future_ids(self) -> list[str]:
        """Return the IDs of all requests that have ended and are still known."""
        with _sentences(self._engine), self._engine.connect() as connection:
            return list(connection.scalars(sa.select(TABLES[FutureRow].c.request_id)))

    def answer_sizes(self) -> dict[str, tuple[int, int]]:
        """Return the number of answers and their size in bytes, by owner."""
        table = TABLES[FutureRow]
        with _sentences(self._engine), self._engine.connect() as connection:
            found = connection.execute(sa.select(table.c.owner, sa.func.count(), sa.func.sum(table.c.length)).group_by(table.c.owner))
            return {owner: (int(count), int(total)) for owner, count, total in found}

    def futures_before(self, finished: float) -> tuple[FutureRow, ...]:
        """Return the requests that ended before a time, in seconds since the epoch."""
        return self._all(FutureRow, TABLES[FutureRow].c.finished < finished)

    def first_segment(self) -> int | None:
        """Return the number of the first results file that a request still needs, or None."""
        with _sentences(self._engine), self._engine.connect() as connection:
            return connection.scalar(sa.select(sa.func.min(TABLES[FutureRow].c.segment)))

    def last_segment(self) -> int:
        """Return the number of the last results file that a request names, or 0."""
        with _sentences(self._engine), self._engine.connect() as connection:
            return connection.scalar(sa.select(sa.func.max(TABLES[FutureRow].c.segment))) or 0

    async def put(self, *rows: Row | MakeRow) -> None:
        """Store rows, replacing rows with the same keys, and return once they are committed: either all of them or none.

        Args:
            rows: rows, or functions that make rows slowly. A function runs on the writer's thread; its errors are raised here.

        Raises:
            StorageError: the database is full, locked, unreachable or refuses the rows; nothing was changed.
        """
        await self._write_rows(rows, keep=True)

    async def delete(self, *rows: Row) -> None:
        """Delete the rows with these rows' keys, and return once that is committed; raises as `put` does."""
        await self._write_rows(rows, keep=False)

    def close(self) -> None:
        """Commit everything given so far, and close the database."""
        self._closed = True
        self._queue.put(None)
        self._writer.join(_TIMEOUT_S)
        if self._claim is not None:
            self._claim.close()
        self._engine.dispose()

    # -- reading ---------------------------------------------------------------------------------------------------------------------------

    def _all(self, kind: type[R], *where: sa.ColumnElement[bool]) -> tuple[R, ...]:
        with _sentences(self._engine), self._engine.connect() as connection:
            found = connection.execute(sa.select(TABLES[kind]).where(*where))
            return tuple(kind(*values) for values in found)

    # -- writing, on the event loop and then on the writer's thread ------------------------------------------------------------------------

    async def _write_rows(self, rows: Sequence[Row | MakeRow], *, keep: bool) -> None:
        if self._closed:
            raise StorageError(f"{_name(self._engine)} is closed: the server ends")
        write = _Write(rows, keep, asyncio.get_running_loop().create_future())
        self._queue.put(write)
        await write.done

    def _work(self) -> None:
        closing = False
        while not closing:
            group = [self._queue.get()]
            while not self._queue.empty():
                group.append(self._queue.get())
            closing = None in group
            self._commit([write for write in group if write is not None])

    def _commit(self, group: list[_Write]) -> None:
        group = [write for write in group if write.made()]
        error = outcome_of(lambda: self._transact(group)).exception()
        if error is not None and len(group) > 1 and not isinstance(error, OperationalError):
            for write in group:  # the database refuses one of them, which must not make the others fail
                self._settle(write, outcome_of(partial(self._transact, [write])).exception())
        else:
            for write in group:
                self._settle(write, error)

    def _transact(self, group: list[_Write]) -> None:
        last = {(type(row), _key(row)): (write.keep, row) for write in group for row in write.rows}
        upserts: dict[sa.Table, list[dict[str, Any]]] = defaultdict(list)
        deletes: dict[sa.Table, list[dict[str, Any]]] = defaultdict(list)
        for (kind, key), (keep, row) in last.items():
            if keep:
                upserts[TABLES[kind]].append(vars(row))
            else:
                deletes[TABLES[kind]].append(dict(zip(TABLES[kind].primary_key.columns.keys(), key, strict=True)))
        with self._engine.begin() as connection:
            for table, rows in upserts.items():
                connection.execute(self._upserts[table], rows)
            for table, rows in deletes.items():
                connection.execute(sa.delete(table).where(*(c == sa.bindparam(c.name) for c in table.primary_key)), rows)

    def _settle(self, write: _Write, error: BaseException | None) -> None:
        write.wake_caller(error and _storage_error(self._engine, error))


# -- SQLAlchemy ----------------------------------------------------------------------------------------------------------------------------


def _engine(text: str) -> sa.Engine:
    try:
        url = make_url(text)
    except ArgumentError:
        url = None
    if url is None or url.get_backend_name() not in _DRIVERS or not url.database:
        raise ConfigError("the database's URL cannot be used; give sqlite:///PATH, or postgresql://USER@HOST/NAME for PostgreSQL")
    backend = url.get_backend_name()
    try:
        engine = sa.create_engine(
            url.set(drivername=_DRIVERS[backend]), connect_args=_ARGUMENTS[backend], pool_pre_ping=backend == "postgresql")
    except ImportError as exc:
        raise MissingExtraError("PostgreSQL needs psycopg, which is not installed; pip install 'offbeat[postgres]'") from exc
    if backend == "sqlite":
        event.listen(engine, "connect", _set_up_sqlite)
    return engine


def _set_up_sqlite(connection: Any, record: object) -> None:  # noqa: ARG001
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=FULL")


def _known(engine: sa.Engine) -> Known:
    """Return a database's record of its data folder. A missing database is not created."""
    name, path = _name(engine), engine.url.database or ""
    if engine.dialect.name == "sqlite" and not engine.url.query and not Path(path).exists():
        return Known(name)
    with _sentences(engine), engine.connect() as connection:
        there = set(sa.inspect(connection).get_table_names())
        version = connection.scalar(sa.select(sa.func.max(SCHEMA.c.version))) if SCHEMA.name in there else None
        if version is not None and version > SCHEMA_VERSION:
            raise ConfigError(
                f"{name} has schema version {version}, made by a newer Offbeat than this one, which knows up to {SCHEMA_VERSION}; upgrade "
                "Offbeat or use another database")
        identity = connection.scalar(sa.select(IDENTITY.c.id)) if IDENTITY.name in there else None
        checkpoints, models, samplers = (TABLES[kind] for kind in (CheckpointRow, ModelRow, SamplerRow))
        naming = {
            checkpoints: sa.select(checkpoints.c.folder), models: sa.select(models.c.state_folder),
            samplers: sa.select(samplers.c.folder).where(samplers.c.path == "")}  # other samplers use the folders of checkpoints
        folders = {folder for table, select in naming.items() if table.name in there for folder in connection.scalars(select)}
    return Known(name, identity or "", frozenset(folders - {""}))


def _claim(engine: sa.Engine) -> sa.Connection:
    """Lock the database for as long as the connection lives, because a second server would change rows that the first has in memory."""
    with _sentences(engine):
        connection = engine.connect().execution_options(isolation_level="AUTOCOMMIT")
        connection.execute(sa.text(f"SET lock_timeout = '{_CLAIM_S}s'"))  # a server that was just killed may still hold the lock
        try:
            connection.execute(sa.select(sa.func.pg_advisory_lock(_LOCK_KEY)))
        except OperationalError as exc:
            raise ConfigError(f"{_name(engine)} is in use by another server; stop that one or give this one a database of its own") from exc
    return connection


def _upsert(engine: sa.Engine, table: sa.Table) -> sa.Executable:
    insert = _INSERT[engine.dialect.name](table)
    return insert.on_conflict_do_update(
        index_elements=list(table.primary_key), set_={c.name: insert.excluded[c.name] for c in table.columns if not c.primary_key})


def _key(row: Row) -> tuple[str, ...]:
    return tuple(getattr(row, column.name) for column in TABLES[type(row)].primary_key)


def _name(engine: sa.Engine) -> str:
    return f"the database {engine.url.render_as_string(hide_password=True)}"


def _storage_error(engine: sa.Engine, exc: BaseException) -> StorageError:
    reason = str(exc.orig if isinstance(exc, DBAPIError) else exc).strip().partition("\n")[0]
    error = StorageError(f"{_name(engine)} cannot be used: {reason}; see that it can be reached, has free space and is not locked")
    error.__cause__ = exc
    return error


@contextmanager
def _sentences(engine: sa.Engine) -> Iterator[None]:
    try:
        yield
    except SQLAlchemyError as exc:
        raise _storage_error(engine, exc) from exc
