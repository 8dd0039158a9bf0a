"""Status page at `/`, the data that it fetches every two seconds, and the health check. The page is one file without external assets."""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from offbeat.aio import beside
from offbeat.service.app.auth import LOCAL_NAMES, HostNames, demand_local
from offbeat.service.app.journal import Journal
from offbeat.service.app.metrics import MakeStatus
from offbeat.service.app.reply import answer, refusal
from offbeat.service.errors import RequestError
from offbeat.service.types import ProcessStatus

MakePage = Callable[[], Response]
"""Answers a request from this machine."""

_EVERY_S = 2.0
_MEMORY_EVERY_S = 10.0
_POINTS = 150
_CHILD = "offbeat.process"
_PAGE = Path(__file__).with_name("status.html").read_text(encoding="utf-8")


@dataclass(frozen=True)
class Rates:
    """Tokens per second at one point in time."""

    time: float
    trained: float
    sampled: float


class StatusPage:
    """Shows the service's status to its own machine, or to everybody if `public`; its `processes` are a few seconds old."""

    def __init__(self, status: MakeStatus, journal: Journal, *, public: bool, names: HostNames = LOCAL_NAMES) -> None:
        """`names` are the host names under which the page is shown."""
        self._status = status
        self._journal = journal
        self._public = public
        self._names = names
        self.processes: tuple[ProcessStatus, ...] = ()
        self._started = time.time()
        self._history: deque[Rates] = deque(maxlen=_POINTS)

    @property
    def routes(self) -> list[Route]:
        """Routes that need no key."""
        return [
            Route("/api/v1/healthz", self._health), Route("/", self.shielded(self._page)),
            Route("/status.json", self.shielded(self._json))]

    async def watch(self) -> None:
        """Maintain the history of rates and the memory of processes until cancelled."""
        async with beside(self._watch_memory()):
            await self._watch_rates()

    async def _watch_memory(self) -> None:
        while True:
            self.processes = await asyncio.to_thread(processes)
            await asyncio.sleep(_MEMORY_EVERY_S)

    async def _watch_rates(self) -> None:
        before, then = self._status(), time.monotonic()
        while True:
            await asyncio.sleep(_EVERY_S)
            status, now = self._status(), time.monotonic()
            trained = (status.trained_tokens - before.trained_tokens) / (now - then)
            sampled = (status.sampled_tokens - before.sampled_tokens) / (now - then)
            self._history.append(Rates(time.time(), round(trained, 1), round(sampled, 1)))
            before, then = status, now

    def shielded(self, handler: MakePage) -> Callable[[Request], Awaitable[Response]]:
        """Wrap a handler in `demand_local`: this machine, or everybody if public, gets its answer under the server's names."""

        async def shielded(http: Request) -> Response:
            try:
                demand_local(http, self._names, public=self._public)
                return handler()
            except RequestError as exc:
                return refusal(str(exc), status=exc.status)

        return shielded

    async def _health(self, _: Request) -> Response:
        return answer({"status": "ok"})

    def _page(self) -> Response:
        return HTMLResponse(_PAGE, headers={"content-security-policy": "default-src 'self' 'unsafe-inline'; img-src data:"})

    def _json(self) -> Response:
        content = {
            "now": time.time(), "started": self._started, "status": self._status(), "rates": list(self._history),
            "troubles": list(self._journal.troubles), "strangers": self._journal.strangers}
        return answer(content, headers={"cache-control": "no-store"})


def processes() -> tuple[ProcessStatus, ...]:
    """Return this process, and each worker including its descendants; processes that end meanwhile are left out."""
    this = psutil.Process()
    return (ProcessStatus("service", _memory([this])), *_workers(this))


def _workers(this: psutil.Process) -> Iterator[ProcessStatus]:
    for child in sorted(this.children(), key=lambda child: child.pid):
        try:
            name = _name(child.cmdline())
            if name:
                yield ProcessStatus(name, _memory([child, *child.children(recursive=True)]))
        except psutil.Error:
            continue


def _name(command: list[str]) -> str:
    """Return a worker's name, such as "rank 0", from its command line; empty for helper processes such as a resource tracker."""
    return command[command.index(_CHILD) + 2] if _CHILD in command[:-2] else ""


def _memory(members: list[psutil.Process]) -> int:
    total = 0
    for member in members:
        try:
            total += member.memory_info().rss
        except psutil.Error:
            continue
    return total
