"""The engines of a run as one: requests go to the healthy engine with the least outstanding tokens.

An engine serves requests only after a publication proved it (`admit`), and never again once quarantined.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from offbeat.errors import BusyError, EngineError, RefusedError
from offbeat.inference.client import EngineClient
from offbeat.inference.dialects import Sample, Sampling
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

    def quarantine(self, name: str, reason: str) -> None:
        """Send nothing more to the engine."""
        self._members[name].quarantined = reason

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
                return await member.client.generate(prompt, sampling, n=n, timeout_s=self._request_timeout_s)
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
