"""The database: one contract, over SQLite, and over PostgreSQL where OFFBEAT_TEST_POSTGRES holds a URL."""

import asyncio
import os
import sqlite3
import sys
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import sqlalchemy as sa

from offbeat.errors import ConfigError, MissingExtraError, StorageError
from offbeat.service.store import Store, StoredRows
from offbeat.service.tables import (
    IDENTITY,
    METADATA,
    SCHEMA_VERSION,
    CheckpointRow,
    FutureRow,
    ModelRow,
    Row,
    SamplerRow,
    SessionRow,
)
from offbeat.service.types import LoraSpec

OLDER = Path(__file__).parent / "older" / "72f4296.sql"
"""A database with a row of each kind below, as the code of commit 72f4296 wrote it."""
POSTGRES = os.environ.get("OFFBEAT_TEST_POSTGRES", "")
LORA = LoraSpec(rank=8, alpha=32.0, seed=2**40, train_attn=True, train_mlp=False)
SESSION = SessionRow(
    "s", "alice", 1.5, 1763719150.123456, ended=None, metadata={"naïve": "\"quoted\" ✓", "nul": "\0"}, display_name="Ω", tags=("a", "b,c"))
MODEL = ModelRow(
    "s:train:0", "s", "alice", 1.0, 2.0, "org/model", LORA, {"k": "v"}, step=3, state_folder="f", last_seq=2**62,
    next_version=4, ended=False, dirty=True)
CHECKPOINT = CheckpointRow(
    "s:train:0", "training", "final", "alice", "folder", 1.0, expires=9.0, size_bytes=2**40, public=True, metadata={}, lora=LORA,
    base_model="org/model", step=7, version=2)
SAMPLER = SamplerRow("s:sample:0", "s", "alice", "org/model", path="tinker://x", run_id="r", version=3, folder="g", created=5.0, ended=True)
FUTURE = FutureRow("s:sample:0:1", "alice", "Sample", 1.0, 2.0, "application/x-protobuf", segment=1, start=2**33, length=2**32)


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Of a database that nobody else uses."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path}/service.db"
        return
    if not POSTGRES:
        pytest.skip("OFFBEAT_TEST_POSTGRES holds no URL")
    server = sa.make_url(POSTGRES).set(drivername="postgresql+psycopg")
    admin = sa.create_engine(server, isolation_level="AUTOCOMMIT")
    name = f"offbeat_{uuid.uuid4().hex}"
    with admin.connect() as connection:
        connection.execute(sa.text(f"CREATE DATABASE {name}"))
    yield server.set(drivername="postgresql", database=name).render_as_string(hide_password=False)
    with admin.connect() as connection:
        connection.execute(sa.text(f"DROP DATABASE {name} WITH (FORCE)"))
    admin.dispose()


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    opened = Store.open(url)
    yield opened
    opened.close()


def reopened(store: Store, url: str) -> StoredRows:
    store.close()
    again = Store.open(url)
    rows = again.load()
    again.close()
    return rows


def future(number: int, *, finished: float = 2.0, segment: int = 1) -> FutureRow:
    return FutureRow(f"s:sample:0:{number}", "alice", "Sample", 1.0, finished, "application/json", segment, 0, 5)


def test_every_kind_of_row_comes_back_as_it_was_after_reopening(store: Store, url: str) -> None:
    asyncio.run(store.put(SESSION, MODEL, CHECKPOINT, SAMPLER, FUTURE))
    assert store.find_future(FUTURE.request_id) == FUTURE
    assert store.find_future("other") is None
    assert reopened(store, url) == StoredRows((SESSION,), (MODEL,), (CHECKPOINT,), (SAMPLER,))


def test_a_row_takes_the_place_of_the_one_with_its_key_and_the_last_change_counts(store: Store, url: str) -> None:
    async def change() -> None:
        await asyncio.gather(
            store.put(SessionRow("s", "alice", 1.0, 1.0), SessionRow("s", "alice", 1.0, 2.0), SessionRow("t", "bob", 1.0, 1.0)),
            store.put(SessionRow("s", "alice", 1.0, 3.0, ended=3.0)), store.delete(SessionRow("t", "", 0.0, 0.0)),
            store.put(CHECKPOINT), store.delete(CHECKPOINT), store.put(SAMPLER), store.delete(SAMPLER), store.put(SAMPLER))

    asyncio.run(change())
    assert reopened(store, url) == StoredRows((SessionRow("s", "alice", 1.0, 3.0, ended=3.0),), (), (), (SAMPLER,))


def test_checkpoints_of_one_name_differ_by_kind_and_run(store: Store) -> None:
    others = [CheckpointRow(**{**vars(CHECKPOINT), "kind": "sampler"}), CheckpointRow(**{**vars(CHECKPOINT), "run_id": "s:train:1"})]
    asyncio.run(store.put(CHECKPOINT, *others))
    asyncio.run(store.delete(CHECKPOINT))
    assert set(map(id_of, store.load().checkpoints)) == set(map(id_of, others))


def id_of(row: CheckpointRow) -> tuple[str, str, str]:
    return row.run_id, row.kind, row.name


def test_many_changes_at_once_are_all_there(store: Store) -> None:
    async def put_all() -> None:
        await asyncio.gather(*(store.put(future(number)) for number in range(500)))

    asyncio.run(put_all())
    assert sorted(store.future_ids()) == sorted(future(number).request_id for number in range(500))


def test_old_futures_and_the_first_file_that_is_needed_are_found(store: Store) -> None:
    assert store.first_segment() is None and store.last_segment() == 0
    rows = [future(0, finished=1.0, segment=3), future(1, finished=2.0, segment=4), future(2, finished=3.0, segment=5)]
    asyncio.run(store.put(*rows))
    assert sorted(row.request_id for row in store.futures_before(3.0)) == [row.request_id for row in rows[:2]]
    asyncio.run(store.delete(rows[0]))
    assert (store.first_segment(), store.last_segment()) == (4, 5)


def test_a_row_that_is_made_late_fails_alone(store: Store) -> None:
    def broken() -> Row:
        raise ValueError("no row")

    async def put_both() -> list[BaseException | None]:
        return await asyncio.gather(store.put(lambda: SESSION), store.put(broken), store.put(SAMPLER), return_exceptions=True)

    first, second, third = asyncio.run(put_both())
    assert (first, third) == (None, None)
    assert isinstance(second, ValueError)
    assert store.load() == StoredRows((SESSION,), (), (), (SAMPLER,))


def test_a_row_that_the_database_refuses_fails_alone(store: Store) -> None:
    refused = SessionRow("t", "\ud800", 1.0, 1.0)

    async def put_both() -> list[BaseException | None]:
        return await asyncio.gather(store.put(SESSION), store.put(refused, SAMPLER), store.put(MODEL), return_exceptions=True)

    first, second, third = asyncio.run(put_both())
    assert (first, third) == (None, None)
    assert isinstance(second, StorageError)
    assert store.load() == StoredRows((SESSION,), (MODEL,), (), ()), "all rows of a call, or none"


def test_a_call_that_was_given_up_is_carried_out(store: Store) -> None:
    async def give_up() -> None:
        task = asyncio.create_task(store.put(SESSION))
        await asyncio.sleep(0)
        task.cancel()
        await store.put(SAMPLER)

    asyncio.run(give_up())
    assert store.load().sessions == (SESSION,)


def test_a_database_that_an_older_commit_wrote_is_read_and_gone_on_with(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "service.db") as older:
        older.executescript(OLDER.read_text(encoding="utf-8"))
    older.close()
    url = f"sqlite:///{tmp_path}/service.db"
    store = Store.open(url, identify=lambda known: known.identity or "new")
    assert store.load() == StoredRows((SESSION,), (MODEL,), (CHECKPOINT,), (SAMPLER,))
    assert store.find_future(FUTURE.request_id) == FUTURE
    asyncio.run(store.put(replace(SESSION, id="later")))
    assert {session.id for session in reopened(store, url).sessions} == {SESSION.id, "later"}


def test_tables_have_other_columns_only_in_another_version(tmp_path: Path) -> None:
    """Existing tables are not altered: whoever changes a row raises SCHEMA_VERSION, and migrates databases of this one or refuses them."""
    with sqlite3.connect(":memory:") as older:
        older.executescript(OLDER.read_text(encoding="utf-8"))
        columns = {name: [column[1] for column in older.execute(f"PRAGMA table_info({name})")] for name in METADATA.tables}
    older.close()
    assert SCHEMA_VERSION == 1
    added = {IDENTITY.name}  # after the first commit; nothing else depends on it
    assert {name: [column.name for column in table.columns] for name, table in METADATA.tables.items() if name not in added} == {
        name: columns[name] for name in columns if name not in added}


def test_a_database_of_a_newer_version_is_refused(store: Store, url: str) -> None:
    store.close()
    with store._engine.begin() as connection:
        connection.execute(sa.text("UPDATE schema_version SET version = 99"))
    store._engine.dispose()
    with pytest.raises(ConfigError, match="has schema version 99, made by a newer Offbeat than this one, which knows up to 1; upgrade"):
        Store.open(url)


@pytest.mark.skipif(not POSTGRES, reason="OFFBEAT_TEST_POSTGRES holds no URL")
@pytest.mark.parametrize("url", ["postgresql"], indirect=True)
def test_a_database_that_another_server_uses_is_refused_until_that_ends(store: Store, url: str) -> None:
    with pytest.raises(ConfigError, match="is in use by another server"):
        Store.open(url)
    store.close()
    Store.open(url).close()


def test_a_closed_database_takes_nothing(store: Store) -> None:
    store.close()
    with pytest.raises(StorageError, match="is closed"):
        asyncio.run(store.put(SESSION))


def test_what_is_committed_is_synced(tmp_path: Path) -> None:
    store = Store.open(f"sqlite:///{tmp_path}/service.db")
    with store._engine.connect() as connection:
        assert connection.exec_driver_sql("PRAGMA synchronous").scalar() == 2, "FULL"
    store.close()


def test_a_locked_database_is_a_sentence_and_works_again_afterwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offbeat.service.store._ARGUMENTS", {"sqlite": {"timeout": 0.1}})
    store = Store.open(f"sqlite:///{tmp_path}/service.db")
    other = sqlite3.connect(tmp_path / "service.db")
    other.execute("BEGIN IMMEDIATE")

    async def put_both() -> list[BaseException | None]:
        return await asyncio.gather(store.put(SESSION), store.put(SAMPLER), return_exceptions=True)

    for error in asyncio.run(put_both()):
        assert isinstance(error, StorageError)
        assert "service.db cannot be used: database is locked; see that it can be reached" in str(error)
    assert store.load().sessions == (), "reading goes on"
    other.rollback()
    asyncio.run(store.put(SESSION))
    assert store.load().sessions == (SESSION,)
    store.close()
    other.close()


def test_a_full_disk_is_a_sentence_and_what_was_there_stays(tmp_path: Path) -> None:
    store = Store.open(f"sqlite:///{tmp_path}/service.db")
    asyncio.run(store.put(SESSION))
    sa.event.listen(store._engine, "begin", lambda connection: connection.exec_driver_sql("PRAGMA max_page_count = 1"))
    with pytest.raises(StorageError, match="database or disk is full"):
        asyncio.run(store.put(SessionRow("t", "bob", 1.0, 1.0, metadata={"k": "v" * 100_000})))
    assert store.load().sessions == (SESSION,)
    store.close()


@pytest.mark.parametrize("url", ["", "service.db", "mysql://host/name", "sqlite://", "sqlite:///", "postgresql://host"])
def test_a_url_that_cannot_be_used_is_a_sentence(url: str) -> None:
    with pytest.raises(ConfigError, match="give sqlite:///PATH, or postgresql://USER@HOST/NAME"):
        Store.open(url)


def test_a_database_that_cannot_be_opened_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "text.db").write_text("this is no database" * 100)
    with pytest.raises(StorageError, match="text.db cannot be used: file is not a database"):
        Store.open(f"sqlite:///{tmp_path}/text.db")
    with pytest.raises(StorageError, match="unable to open database file"):
        Store.open(f"sqlite:///{tmp_path}/missing/service.db")


def test_a_server_out_of_reach_is_a_sentence_without_the_password() -> None:
    pytest.importorskip("psycopg")
    with pytest.raises(StorageError, match="cannot be used: ") as caught:
        Store.open("postgresql://alice:secret@127.0.0.1:1/offbeat")
    assert "secret" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_postgresql_without_its_client_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'offbeat\[postgres\]'"):
        Store.open("postgresql://host/name")
