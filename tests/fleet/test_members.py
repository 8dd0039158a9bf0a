"""What is asked of an engine in service ends with its service."""

import asyncio
import warnings

import pytest

from offbeat.errors import EngineError
from offbeat.fleet.members import Guarded, Member, State
from offbeat.inference.client import EngineClient, EngineSession
from offbeat.weights.protocol import Manifest


def using(url: str, body) -> None:
    async def main() -> None:
        async with EngineSession() as http:
            await body(Member(EngineClient("engine 0", url, http.session)))

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # no coroutine that is never awaited, no exception that nobody looks at
        asyncio.run(main())


def quarantine(member: Member) -> None:
    member.state, member.reason = State.QUARANTINED, "it is stopped"
    member.stint.set()


def test_all_that_publishers_ask_ends_when_the_engine_is_quarantined() -> None:
    async def body(member: Member) -> None:
        async with await asyncio.start_server(lambda _reader, _writer: None, "127.0.0.1", 0) as silent:  # never answers
            member.client.url = f"http://127.0.0.1:{silent.sockets[0].getsockname()[1]}"
            engine, manifest = Guarded(member), Manifest(1, "v1", "print", (1, 2), (-1.0,))
            calls = [asyncio.create_task(call) for call in (
                engine.stage(manifest, timeout_s=60), engine.switch(manifest, interrupt="keep", timeout_s=60),
                engine.prove((1, 2), timeout_s=60), engine.load_adapter("a@1", "a", timeout_s=60),
                engine.unload_adapter("a@1", timeout_s=60))]
            assert not (await asyncio.wait(calls, timeout=0.05))[0]
            quarantine(member)
            for call in calls:
                with pytest.raises(EngineError, match="engine 0 was quarantined while it answered: it is stopped"):
                    await call

    using("", body)


def test_nothing_is_asked_of_an_engine_that_is_out(start_engine) -> None:
    _, url = start_engine()

    async def body(member: Member) -> None:
        engine = Guarded(member)
        assert engine.name == "engine 0"
        assert (await engine.prove((13, 14, 15), timeout_s=30)).version == 0
        quarantine(member)
        with pytest.raises(EngineError, match="it is stopped"):
            await engine.prove((13, 14, 15), timeout_s=30)
        assert member.out and not member.healthy

    using(url, body)


def test_an_answer_in_the_moment_of_a_quarantine_is_not_taken() -> None:
    async def body(member: Member) -> None:
        async def answer() -> str:
            quarantine(member)
            return "what an engine of unknown weights says"

        with pytest.raises(EngineError, match="it is stopped"):
            await member.while_in_service(answer())

    using("", body)
