"""Sessions belong to one owner, are silent after a while, and end once."""

import asyncio
from pathlib import Path

import pytest

from offbeat.service.errors import BadRequestError, LostError, UnknownError
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
        assert await sessions.finish(ALICE, first) and not await sessions.finish(ALICE, first)
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
