"""The engines of a run as one: requests go to the healthy engine with the least outstanding tokens.

An engine serves requests only after a publication proved it (`admit`), and never again once quarantined.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from offbeat.errors import BusyError, EngineError, RefusedError
from offbeat.inference.client import EngineClient
from offbeat.inference.sampling import Sample, Sampling
from offbeat.types import Version

_BUSY_RETRY_S = 0.2


@dataclass
class Member:
    """One engine's standing."""

    client: EngineClient
    version: Version | None = None
    outstanding_tokens: int = 0
    busy_since_s: float = 0.0
    quarantined: str = ""
    news: asyncio.Event = field(default_factory=asyncio.Event)

    def tell(self) -> None:
        """Wake whoever waits for a proof or a quarantine of this engine."""
        self.news.set()
        self.news = asyncio.Event()


class EnginePool:
    """Routes generation over the engines."""

    def __init__(
        self,
        clients: Iterable[EngineClient],
        *,
        request_timeout_s: float,
        on_failure: Callable[[str, str], None] = lambda _name, _reason: None,
        on_busy: Callable[[str, str, float, float], None] = lambda _what, _name, _start_s, _end_s: None,
    ) -> None:
        """`on_failure(engine, reason)` hears of every request that an engine failed; `on_busy("generate", engine, start_s, end_s)` of every
        stretch of wall-clock time in which an engine had requests, cut at each switch of versions.
        """
        self._members = {client.name: Member(client) for client in clients}
        self._request_timeout_s = request_timeout_s
        self._on_failure = on_failure
        self._on_busy = on_busy

    @property
    def healthy(self) -> Mapping[str, EngineClient]:
        """Engines that are not quarantined, by name."""
        return {name: member.client for name, member in self._members.items() if not member.quarantined}

    def admit(self, name: str, version: Version) -> None:
        """The engine proved this version."""
        member = self._members[name]
        member.version = version
        if member.outstanding_tokens:
            self._end_busy(member)
        member.tell()

    def quarantine(self, name: str, reason: str) -> None:
        """Send nothing more to the engine, and take nothing more from it: what it still generates is generated again elsewhere."""
        member = self._members[name]
        member.quarantined = reason
        member.tell()

    async def generate(self, prompt: tuple[int, ...], sampling: Sampling, *, n: int) -> list[Sample]:
        """n continuations from one engine; when it fails, from another. Generation has no side effect, so running it twice is safe.

        Raises:
            EngineError: every healthy engine failed the request, or none is healthy; the last reason.
            DeadlineError: the request passed its deadline.
        """
        tried: set[str] = set()
        while True:
            member = self._choose(tried)
            cost = n * (len(prompt) + sampling.max_new_tokens)
            if not member.outstanding_tokens:
                member.busy_since_s = time.time()
            member.outstanding_tokens += cost
            try:
                return await self._ask(member, prompt, sampling, n)
            except RefusedError:
                raise
            except BusyError:
                await asyncio.sleep(_BUSY_RETRY_S)
            except EngineError as exc:
                self._on_failure(member.client.name, str(exc))
                tried.add(member.client.name)
                if not self._candidates(tried):
                    raise
            finally:
                member.outstanding_tokens -= cost
                if not member.outstanding_tokens:
                    self._end_busy(member)

    async def _ask(self, member: Member, prompt: tuple[int, ...], sampling: Sampling, n: int) -> list[Sample]:
        """One engine's answer, once the weights that sampled it are proven.

        Raises:
            EngineError: it failed, or was quarantined before.
        """
        call = asyncio.ensure_future(member.client.generate(prompt, sampling, n=n, timeout_s=self._request_timeout_s))
        waiting: set[asyncio.Future] = {call}
        try:
            while not member.quarantined:
                # Ahead between a switch and its proof, which the publisher ends with an admission or a quarantine.
                if call.done() and not _is_ahead(call.result(), member.version):
                    return call.result()
                news = asyncio.ensure_future(member.news.wait())
                waiting = {news} if call.done() else {news, call}
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                news.cancel()
            raise EngineError(f"{member.client.name} was quarantined while it answered: {member.quarantined}")
        finally:
            for future in waiting:
                future.cancel()

    def _end_busy(self, member: Member) -> None:
        now_s = time.time()
        self._on_busy("generate", member.client.name, member.busy_since_s, now_s)
        member.busy_since_s = now_s

    def _candidates(self, tried: set[str]) -> list[Member]:
        return [m for name, m in self._members.items() if name not in tried and not m.quarantined and m.version is not None]

    def _choose(self, tried: set[str]) -> Member:
        candidates = self._candidates(tried)
        if not candidates:
            reasons = "; ".join(f"{name}: {m.quarantined or 'has no proven version yet'}" for name, m in self._members.items())
            raise EngineError(f"no engine can serve: {reasons}")
        return min(candidates, key=lambda member: member.outstanding_tokens)


def _is_ahead(samples: list[Sample], proven: Version | None) -> bool:
    """Whether a token was sampled by a version later than the proven one."""
    return proven is not None and any(version > proven for sample in samples for version in sample.versions)
