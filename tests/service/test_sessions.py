"""Sessions belong to one owner, are silent after a while, and end once."""

import asyncio
from pathlib import Path

import pytest

from offbeat.errors import StorageError
from offbeat.service.errors import BadRequestError, LostError, RequestError, UnknownError
from offbeat.service.limits import Limits, Usage
from offbeat.service.sessions import Sessions
from offbeat.service.store import Store
from small_service import ALICE, BOB


def test_a_session_lives_by_signs_of_life_until_it_is_finished_and_is_there_after_a_restart(tmp_path: Path) -> None:
    now, usage = [1000.0], Usage(lambda _: Limits())

    async def main() -> None:
        store = Store.open(f"sqlite:///{tmp_path / 'x.db'}")
        sessions = Sessions((), store=store, usage=usage, timeout_s=100, clock=lambda: now[0])
        first = await sessions.create(ALICE, metadata={"a": "b"}, tags=("x",), display_name="mine")
        second = await sessions.create(ALICE, metadata={}, tags=(), display_name="")
        assert [sessions.owner_of(session) for session in (first, "nobody")] == ["alice", None]
        assert {row.id for row in sessions.of(ALICE)} == {first, second} and sessions.of(BOB) == []
        for find in (sessions.find, sessions.check):
            with pytest.raises(UnknownError, match="there is no session"):
                find(BOB, first)
        with pytest.raises(UnknownError, match="there is no session"):
            await sessions.heartbeat(BOB, first)
        now[0] += 90
        await sessions.heartbeat(ALICE, first)
        now[0] += 90
        assert sessions.is_silent(second) and not sessions.is_silent(first)
        sessions.check(ALICE, second)
        assert not sessions.is_silent(second)
        assert await sessions.end_session(ALICE, first) and not await sessions.end_session(ALICE, first)
        with pytest.raises(LostError, match="has ended"):
            await sessions.heartbeat(ALICE, first)
        with pytest.raises(BadRequestError, match="has ended"):
            sessions.check(ALICE, first)
        now[0] += 1000
        again = Sessions(store.load().sessions, store=store, usage=Usage(lambda _: Limits()), timeout_s=100, clock=lambda: now[0])
        assert again.has_ended(first) and not again.has_ended(second) and not again.is_silent(second)
        assert (again.find(ALICE, first).metadata, again.find(ALICE, first).tags) == ({"a": "b"}, ("x",))
        store.close()

    asyncio.run(main())


def test_an_end_that_the_database_did_not_take_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def full(*_rows: object) -> None:
        raise StorageError("the disk is full")

    async def main() -> None:
        store = Store.open(f"sqlite:///{tmp_path / 'x.db'}")
        sessions = Sessions((), store=store, usage=Usage(lambda _: Limits()), timeout_s=100)
        session = await sessions.create(ALICE, metadata={}, tags=(), display_name="")
        with monkeypatch.context() as patch:
            patch.setattr(store, "put", full)
            with pytest.raises(StorageError):
                await sessions.end_session(ALICE, session)
        assert not sessions.has_ended(session)
        assert await sessions.end_session(ALICE, session), "it is asked for again, and stored"
        assert store.load().sessions[0].ended is not None
        store.close()

    asyncio.run(main())


def test_a_session_to_which_nothing_belongs_is_forgotten_when_it_was_silent_for_long(tmp_path: Path) -> None:
    now, usage, owning = [1000.0], Usage(lambda _: Limits()), set[str]()

    async def main() -> None:
        store = Store.open(f"sqlite:///{tmp_path / 'x.db'}")
        sessions = Sessions((), store=store, usage=usage, timeout_s=100, retention_s=1000, clock=lambda: now[0])
        sessions.users.append(lambda: owning)
        empty, owner, ended, heard = [await sessions.create(ALICE, metadata={}, tags=(), display_name="") for _ in range(4)]
        owning.add(owner)
        await sessions.end_session(ALICE, ended)
        now[0] += 1001
        await sessions.heartbeat(ALICE, heard)
        await sessions.sweep()
        assert {row.id for row in sessions.of(ALICE)} == {owner, heard} == {row.id for row in store.load().sessions}
        assert usage.of("alice").sessions == 2
        assert sessions.has_ended(empty) and sessions.is_silent(empty), "what still asks for it hears that it is over"
        # Of 5,000 seconds without a server nothing counts, so that a long stop takes nobody's models.
        now[0] += 5000
        again = Sessions(store.load().sessions, store=store, usage=Usage(lambda _: Limits()), timeout_s=100, retention_s=1000,
                         clock=lambda: now[0])
        assert (again.silence_s(heard), again.silence_s(owner)) == (0, 1001) and not again.is_silent(owner)
        now[0] += 101
        assert again.is_silent(owner)
        store.close()

    asyncio.run(main())


def test_an_owner_has_no_more_sessions_than_he_may_and_those_that_are_over_make_room(tmp_path: Path) -> None:
    now, usage = [1000.0], Usage(lambda _: Limits(max_sessions=3))

    async def main() -> None:
        store = Store.open(f"sqlite:///{tmp_path / 'x.db'}")
        sessions = Sessions((), store=store, usage=usage, timeout_s=100, clock=lambda: now[0])

        async def create() -> str:
            return await sessions.create(ALICE, metadata={}, tags=(), display_name="")

        first, *_ = [await create() for _ in range(3)]
        with pytest.raises(RequestError, match="you have 3 of 3 sessions that you may have"):
            await create()
        await sessions.create(BOB, metadata={}, tags=(), display_name="")
        await sessions.end_session(ALICE, first)
        await create()
        now[0] += 101
        await create()
        assert len(sessions.of(ALICE)) == usage.of("alice").sessions == 1 and len(sessions.of(BOB)) == 1
        store.close()

    asyncio.run(main())
