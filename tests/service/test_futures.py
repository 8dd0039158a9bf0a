"""Futures: waited for, ended once, found again after a restart and after a kill, forgotten in time."""

import asyncio
import itertools
import subprocess
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from offbeat.service.cost import ANSWER_ROW_BYTES
from offbeat.service.errors import LostError, UnknownError
from offbeat.service.futures import Future, Futures
from offbeat.service.limits import Limits, Usage
from offbeat.service.results import Results
from offbeat.service.store import Store
from offbeat.service.types import Failed, ModelCreated, Outcome, Payload, Pending, StepDone
from support.finishing import SESSION, answer_of

CHILD = Path(__file__).parents[1] / "support" / "finishing.py"
OWNERS = {SESSION: "alice"}


def request(number: int) -> str:
    return f"{SESSION}:sample:0:{number}"


def encode(outcome: Outcome) -> Payload:
    match outcome:
        case ModelCreated(text):
            return Payload("text/plain", text.encode())
        case Failed(message, category):
            return Payload("text/plain", f"{category}: {message}".encode())
    raise TypeError("cannot be encoded")


@dataclass
class Server:
    """What a server has of futures, to be started again over the same folder."""

    folder: Path
    url: str
    now: float = 1000.0
    opened: list[Store] = field(default_factory=list)

    def start(self, *, segment_bytes: int = 2**20) -> None:
        self.store = Store.open(self.url)
        self.opened.append(self.store)
        self.results = Results(self.folder / "results", segment_bytes=segment_bytes)
        self.usage = Usage(lambda _: Limits())
        self.futures = Futures(
            self.store, self.results, encode=encode, owner_of=OWNERS.get, usage=self.usage, retention_s=3600, clock=lambda: self.now)

    def open(self, number: int) -> Future:
        future, is_new = self.futures.open(request(number), owner="alice", kind="Sample")
        assert is_new
        return future

    async def finish(self, number: int, text: str = "answer") -> None:
        await self.futures.finish(self.open(number), ModelCreated(text))

    async def answer(self, number: int, *, timeout_s: float = 60) -> str | Pending:
        found = await self.futures.retrieve(request(number), "alice", timeout_s=timeout_s)
        return found.data.decode() if isinstance(found, Payload) else found

    def files(self) -> list[str]:
        return sorted(path.name for path in (self.folder / "results").iterdir())


@pytest.fixture
def server(tmp_path: Path):
    server = Server(tmp_path, f"sqlite:///{tmp_path}/service.db")
    server.start()
    yield server
    for store in server.opened:
        store.close()


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(120):
            await scenario()

    asyncio.run(bounded())


def test_all_who_wait_get_the_answer_and_so_do_those_who_come_later(server: Server) -> None:
    async def scenario() -> None:
        future = server.open(0)
        waiting = [asyncio.create_task(server.answer(0)) for _ in range(3)]
        await asyncio.sleep(0.01)
        assert not future.done
        assert len(server.futures) == 1
        await server.futures.finish(future, ModelCreated("there"))
        assert future.done
        assert len(server.futures) == 0
        assert await asyncio.gather(*waiting) == ["there"] * 3
        assert await server.answer(0) == "there"

    run(scenario)


def test_who_holds_a_future_is_given_its_outcome_and_a_failure_where_that_cannot_be_kept(server: Server) -> None:
    async def scenario() -> None:
        for outcome in (ModelCreated("there"), StepDone()):
            future = server.open(isinstance(outcome, StepDone))
            waiting = asyncio.create_task(future.ended())
            await server.futures.finish(future, outcome)
            if isinstance(outcome, ModelCreated):
                assert await waiting is outcome and future.outcome is outcome
            else:  # which the server of these tests cannot encode
                failed = await waiting
                assert isinstance(failed, Failed) and "could not be kept" in failed.message

    run(scenario)


def test_answers_are_their_owners_disk_until_they_are_swept(server: Server) -> None:
    async def scenario() -> None:
        await server.finish(0, "x" * 1000)
        await server.finish(1, "y")
        taken = 1001 + 2 * ANSWER_ROW_BYTES
        assert server.usage.of("alice").disk_bytes == taken
        server.start()
        assert server.usage.of("alice").disk_bytes == taken, "after a restart, too"
        server.now += 3601
        await server.futures.sweep()
        assert server.usage.of("alice").disk_bytes == 0

    run(scenario)


def test_a_poll_that_ends_early_says_why_the_request_has_not_ended(server: Server) -> None:
    async def scenario() -> None:
        future = server.open(0)
        assert await server.answer(0, timeout_s=0.01) == Pending()
        future.pending = Pending("paused_capacity", "the trainers start")
        assert await server.answer(0, timeout_s=0) == Pending("paused_capacity", "the trainers start")

    run(scenario)


def test_a_poll_that_was_given_up_takes_nothing_from_the_others(server: Server) -> None:
    async def scenario() -> None:
        future = server.open(0)
        one, other = (asyncio.create_task(server.answer(0)) for _ in range(2))
        await asyncio.sleep(0)
        one.cancel()
        await asyncio.sleep(0)
        await server.futures.finish(future, ModelCreated("there"))
        assert await other == "there"

    run(scenario)


def test_a_request_that_is_sent_again_finds_its_future_whether_it_has_ended_or_not(server: Server) -> None:
    async def scenario() -> None:
        future = server.open(0)
        assert server.futures.open(request(0), owner="alice", kind="Sample") == (future, False)
        assert server.futures.find(request(0), "alice") is future
        await server.futures.finish(future, ModelCreated("there"))
        for _ in range(2):
            again, is_new = server.futures.open(request(0), owner="alice", kind="Sample")
            assert not is_new
            assert again.done
            assert again.kind == "Sample"
            server.start()
        assert server.futures.find(request(1), "alice") is None

    run(scenario)


def test_a_caller_that_is_cancelled_while_it_finishes_leaves_nobody_waiting(server: Server) -> None:
    async def scenario() -> None:
        finishing = asyncio.create_task(server.finish(0))
        await asyncio.sleep(0)
        finishing.cancel()
        assert await server.answer(0) == "answer"
        assert finishing.cancelled()

    run(scenario)


def test_the_first_outcome_counts(server: Server) -> None:
    async def scenario() -> None:
        future = server.open(0)
        await asyncio.gather(*(server.futures.finish(future, ModelCreated(text)) for text in ("first", "second")))
        await server.futures.finish(future, ModelCreated("third"))
        assert await server.answer(0) == "first"

    run(scenario)


def test_anothers_request_is_as_one_that_does_not_exist(server: Server) -> None:
    async def scenario() -> None:
        server.open(0)
        await server.finish(1)
        for number in (0, 1, 2):
            with pytest.raises(UnknownError, match="there is no request") as caught:
                await server.futures.retrieve(request(number), "bob", timeout_s=0)
            assert str(caught.value).replace(request(number), "X") == "there is no request 'X'; use an id that this server answered with"
            assert server.futures.find(request(number), "bob") is None
        for number in (0, 1):
            with pytest.raises(UnknownError):
                server.futures.open(request(number), owner="bob", kind="Sample")

    run(scenario)


def test_what_was_never_a_request_is_unknown(server: Server) -> None:
    async def scenario() -> None:
        for text in ("", "nonsense", "00000000-0000-0000-0000-000000000000:sample:0:0"):
            with pytest.raises(UnknownError):
                await server.futures.retrieve(text, "alice", timeout_s=0)

    run(scenario)


def test_after_a_restart_what_had_ended_is_there_and_what_had_not_is_lost_and_can_be_sent_again(server: Server) -> None:
    async def scenario() -> None:
        await server.finish(0, "kept")
        server.open(1)
        server.start()
        assert await server.answer(0) == "kept"
        with pytest.raises(LostError, match="send it again"):
            await server.answer(1)
        await server.finish(1, "again")
        assert await server.answer(1) == "again"

    run(scenario)


def test_a_damaged_answer_is_lost_not_garbage(server: Server) -> None:
    async def scenario() -> None:
        await server.finish(0, "first")
        await server.finish(1, "second")
        path = server.folder / "results" / "00000001.results"
        path.write_bytes(path.read_bytes().replace(b"first", b"fifth"))
        with pytest.raises(LostError, match=f"request {request(0)} was carried out, but its answer is damaged"):
            await server.answer(0)
        assert await server.answer(1) == "second"
        path.unlink()
        with pytest.raises(LostError):
            await server.answer(1)

    run(scenario)


def test_a_request_whose_answer_cannot_be_kept_ends_as_failed_and_the_log_says_why(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    async def fail(number: int, outcome: Outcome, reason: str) -> None:
        future = server.open(number)
        waiting = asyncio.create_task(server.answer(number))
        await asyncio.sleep(0)
        await server.futures.finish(future, outcome)
        assert await waiting == (
            f"server: request {request(number)} has ended, but its answer could not be kept; the server's log says why")
        assert reason in caplog.text

    async def scenario() -> None:
        await fail(0, StepDone(), "cannot be encoded")
        with monkeypatch.context() as patch:
            patch.setattr("offbeat.service.results.os.pwrite", full)
            await fail(1, ModelCreated("x"), "No space left on device")
            future = server.open(3)
            waiting = asyncio.create_task(server.answer(3))
            await server.futures.finish(future, Failed("the model went back", "server"))
            assert await waiting == "server: the model went back"
        await server.finish(2)
        assert await server.answer(2) == "answer"

    run(scenario)


def test_answers_are_forgotten_an_hour_after_they_ended_but_not_soon_after_they_were_fetched(server: Server) -> None:
    async def scenario() -> None:
        await server.finish(0)
        await server.finish(1)
        server.now += 3500
        await server.finish(2)
        assert await server.answer(1) == "answer"
        server.now += 200
        await server.futures.sweep()
        with pytest.raises(LostError):
            await server.answer(0)
        assert server.futures.find(request(0), "alice") is None
        assert server.futures.find(request(1), "alice") is not None
        assert await server.answer(2) == "answer"
        server.now += 450
        await server.futures.sweep()
        with pytest.raises(LostError):
            await server.answer(1)
        assert await server.answer(2) == "answer"

    run(scenario)


def test_files_go_when_all_their_answers_are_forgotten(server: Server) -> None:
    async def scenario() -> None:
        server.start(segment_bytes=10)
        for number in range(4):
            server.now += 1000
            await server.finish(number, "a long answer")
        before = server.files()
        await server.futures.sweep()
        assert server.files() == before[1:], "the file of the first start, which holds nothing"
        server.now += 2500
        await server.futures.sweep()
        assert server.files() == before[-2:]
        assert [await server.answer(number) for number in (2, 3)] == ["a long answer"] * 2
        server.now += 3600
        await server.futures.sweep()
        assert server.files() == before[-1:], "the one that grows stays"

    run(scenario)


def test_sweeping_beside_finishing_loses_nothing(server: Server) -> None:
    async def scenario() -> None:
        server.start(segment_bytes=100)
        numbers = itertools.count()

        async def finish_some() -> None:
            for number in itertools.islice(numbers, 50):
                server.now += 1
                await server.finish(number, f"answer {number}")

        async def sweep_on() -> None:
            for _ in range(20):
                await server.futures.sweep()

        await asyncio.gather(finish_some(), finish_some(), sweep_on())
        assert [await server.answer(number) for number in range(100)] == [f"answer {number}" for number in range(100)]

    run(scenario)


def test_thousands_may_wait_at_once(server: Server) -> None:
    async def scenario() -> None:
        futures = [server.open(number) for number in range(2000)]
        waiting = [asyncio.create_task(server.answer(number)) for number in range(2000)]
        await asyncio.sleep(0)
        await asyncio.gather(*(server.futures.finish(future, ModelCreated(future.request_id)) for future in futures))
        assert await asyncio.gather(*waiting) == [request(number) for number in range(2000)]
        assert len(server.futures) == 0

    run(scenario)


def test_all_that_was_called_finished_is_found_after_a_kill_and_a_torn_record_is_dropped(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/service.db"
    with subprocess.Popen([sys.executable, str(CHILD), str(tmp_path), url], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        said = [line.strip() for line in itertools.islice(child.stdout, 1500)]
        child.kill()
        said += [line.strip() for line in child.stdout if line.endswith("\n")]
    assert child.returncode == -9
    assert len(said) >= 1500

    async def scenario() -> None:
        server = Server(tmp_path, url)
        server.start()
        try:
            for request_id in said:
                found = await server.futures.retrieve(request_id, "alice", timeout_s=0)
                assert isinstance(found, Payload)
                assert found.data == answer_of(request_id)
            last = server.store.find_future(said[-1])
            assert last is not None
            path = tmp_path / "results" / f"{last.segment:08d}.results"
            with path.open("r+b") as file:
                file.truncate(last.start + 20)
            with pytest.raises(LostError):
                await server.futures.retrieve(last.request_id, "alice", timeout_s=0)
            unsaid = max(int(request_id.rpartition(":")[2]) for request_id in said) + 1000
            with pytest.raises(LostError):
                await server.futures.retrieve(request(unsaid), "alice", timeout_s=0)
            await server.finish(unsaid, "goes on")
            assert await server.answer(unsaid) == "goes on"
        finally:
            server.store.close()

    run(scenario)
