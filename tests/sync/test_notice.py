"""A notice in a real store."""

import asyncio

import pytest

from offbeat.errors import DeadlineError
from offbeat.sync.mesh import connect_store, host_store
from offbeat.sync.notice import Notice


def test_what_one_puts_up_last_the_other_reads():
    store = host_store(30)
    one, other = (Notice(connect_store("127.0.0.1", store.port, timeout_s=30), "attempt-0/engines") for _ in range(2))

    async def body():
        assert await other.read() == ""
        for text in ("first", "last"):
            await one.put_up(text)
        assert await other.read() == "last"

    asyncio.run(body())
    one.close()
    other.close()


def test_a_store_that_is_gone_is_a_missed_deadline():
    store = host_store(30)
    notice = Notice(connect_store("127.0.0.1", store.port, timeout_s=30), "engines")
    del store
    with pytest.raises(DeadlineError, match="the store, which holds the notice 'engines', is gone"):
        asyncio.run(notice.read())
    notice.close()
