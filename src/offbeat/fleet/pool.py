"""The engines of a run as one: where requests go, and what happens to those of an engine that fails.

An engine serves after a publication proved it (`admit`). One that fails its probe or its proof is quarantined: nothing more is sent to it
or taken from it, and what it was generating is generated elsewhere. `offbeat.fleet.health` brings it back (`restore`). While fewer
than `min_engines` are healthy, or none can serve a request, requests wait for one to heal, for `heal_timeout_s` at most.
"""

import asyncio
import time
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol, TypeVar

from offbeat.aio import deadline
from offbeat.errors import BusyError, DeadlineError, EngineError, OffbeatError, RefusedError
from offbeat.fleet.members import Guarded, Member, State
from offbeat.fleet.routing import Router
from offbeat.inference.client import EngineClient
from offbeat.inference.sampling import Draws, PromptScore, Sample, Sampling
from offbeat.types import Version
from offbeat.weights.protocol import EngineControl

T = TypeVar("T")
Ask = Callable[[EngineClient, str], Coroutine[Any, Any, T]]
"""A request, to be made of an engine, with an adapter's name or ""."""

_BUSY_RETRY_S = 0.2
_TRIES_PER_ENGINE = 3
"""A request that has failed on engines this often, each healed in between, is itself what breaks them."""


class WantedAdapter(Protocol):
    """The adapter that a request is for, as who knows where it is loaded sees it; see `offbeat.fleet.adapters`."""

    @property
    def name(self) -> str: ...

    @property
    def holders(self) -> Collection[str]:
        """Engines that hold it."""
        ...

    def using(self, engine: EngineControl) -> AbstractAsyncContextManager[None]:
        """Hold it on the engine for one request, loaded and proven there first if need be; raises EngineError."""
        ...

    async def verify(self, engine: EngineControl) -> None:
        """Find out whether the engine still holds it, so that it is loaded again if not; raises nothing."""
        ...


class EnginePool:
    """Routes generation and scoring over the engines, and knows the standing of each.

    Attributes:
        generated_tokens: in answers, since the start.
    """

    def __init__(
        self,
        clients: Iterable[EngineClient],
        *,
        request_timeout_s: float,
        token_timeout_s: float = 0.0,
        probe_timeout_s: float = 5.0,
        min_engines: int = 1,
        heal_timeout_s: float = 0.0,
        on_failure: Callable[[str, str], None] = lambda _name, _reason: None,
        on_quarantine: Callable[[str, str], None] = lambda _name, _reason: None,
        on_busy: Callable[[str, str, float, float], None] = lambda _what, _name, _start_s, _end_s: None,
        note: Callable[[str], None] = lambda _text: None,
    ) -> None:
        """
        Args:
            request_timeout_s: for one engine to answer a request,
            token_timeout_s: or this for each token that it may generate, if that is more.
            heal_timeout_s: see above; 0 where nobody heals engines.
            on_failure: hears (engine, reason) of every request that an engine failed.
            on_quarantine: hears (engine, reason) of every engine that leaves service.
            on_busy: hears ("generate", engine, start_s, end_s) of every stretch of wall-clock time in which an engine had requests, cut at
                each switch of versions.
            note: tells people what is waited for.
        """
        self._members = {client.name: Member(client) for client in clients}
        self._request_timeout_s = request_timeout_s
        self._token_timeout_s = token_timeout_s
        self._probe_timeout_s = probe_timeout_s
        self._min_engines = min_engines
        self._heal_timeout_s = heal_timeout_s
        self._on_failure = on_failure
        self._on_quarantine = on_quarantine
        self._on_busy = on_busy
        self._note = note
        self._router = Router()
        self._changed = asyncio.Event()
        self._num_waiting = 0
        self.generated_tokens = 0

    # -- standing ----------------------------------------------------------------------------------------------------------------------

    @property
    def states(self) -> Mapping[str, State]:
        """The state of every engine."""
        return {name: member.state for name, member in self._members.items()}

    @property
    def outstanding(self) -> Mapping[str, int]:
        """Tokens of the requests that every engine has: prompts, and the most that is to be generated."""
        return {name: member.outstanding_tokens for name, member in self._members.items()}

    @property
    def healthy(self) -> Mapping[str, EngineControl]:
        """Engines that serve or only lack a proof, by name; what is asked of them here ends when they are quarantined."""
        return {name: Guarded(member) for name, member in self._members.items() if member.healthy}

    def client(self, name: str) -> EngineClient:
        """The engine itself, whatever its state."""
        return self._members[name].client

    def admit(self, name: str, version: Version) -> None:
        """An engine in service proved this version of the weights; a proof does not end a quarantine."""
        member = self._members[name]
        if member.out:
            return
        if member.state is State.UNPROVEN:
            member.state = State.SERVING
        member.version = version
        if member.outstanding_tokens:
            self._end_busy(member)
        member.tell_version()
        self._tell()

    def quarantine(self, name: str, reason: str) -> None:
        """Send nothing more to the engine, and take nothing more from it. The first reason stands."""
        member = self._members[name]
        if member.out:
            return
        member.state, member.reason = State.QUARANTINED, reason
        member.stint.set()
        self._on_quarantine(name, reason)
        self._tell()

    def mark_healing(self, name: str, *, url: str = "") -> None:
        """Someone is bringing a quarantined engine back, perhaps as another process at another URL."""
        member = self._members[name]
        assert member.out, f"{name} is {member.state.value} and needs no healing"
        member.state = State.HEALING
        if url:
            member.client.url = url.rstrip("/")

    def restore(self, name: str, version: Version | None) -> None:
        """End a quarantine or a drain: the engine proved this version; None if no weights were published yet."""
        member = self._members[name]
        member.state = State.UNPROVEN if version is None else State.SERVING
        member.version, member.reason = version, ""
        member.tell_version()
        if member.stint.is_set():
            member.stint = asyncio.Event()
        self._tell()

    async def drain(self, name: str, *, timeout_s: float) -> None:
        """Send nothing more to the engine, and return when its last request is done; `restore` brings it back.

        Raises:
            DeadlineError: requests are left.
        """
        member = self._members[name]
        assert member.healthy, f"{name} is {member.state.value} and cannot be drained"
        member.state, member.reason = State.DRAINING, "it is being drained"
        self._tell()
        async with deadline(f"the last request on {name}", timeout_s):
            while member.outstanding_tokens:
                await self._changed.wait()

    async def examine(self, name: str) -> None:
        """Ask an engine whether it is well, and quarantine it if it does not say so in time, or somebody has paused it."""
        member = self._members[name]
        try:
            told = await member.while_in_service(member.client.health(timeout_s=self._probe_timeout_s))
        except OffbeatError as exc:
            self.quarantine(name, str(exc))
        else:
            if pause := told.get("paused"):
                self.quarantine(name, _paused(pause))

    async def wait_quarantined(self, name: str) -> None:
        """Return as soon as the engine is quarantined."""
        await self._members[name].stint.wait()

    async def wait_healthy(self, *, version: Version | None = None) -> Mapping[str, EngineControl]:
        """Engines in service, those that serve `version` if it is given, once they are `min_engines`.

        Raises:
            EngineError: they are fewer after `heal_timeout_s`; each engine's reason.
        """
        def enough() -> Mapping[str, EngineControl]:
            found = {n: e for n, e in self.healthy.items() if version is None or self._members[n].version == version}
            return found if len(found) >= self._min_engines else {}

        return await self._wait(enough)

    # -- generation --------------------------------------------------------------------------------------------------------------------

    async def generate(
        self, prompt: tuple[int, ...], sampling: Sampling, *, n: int, session: str = "", adapter: WantedAdapter | None = None,
        max_failures: int | None = None,
    ) -> list[Sample]:
        """n continuations from one engine; when it fails, from another. Generation has no side effect, so running it twice is safe.

        Args:
            session: requests of one session go to one engine as long as the load allows, for its cached prefix.
            adapter: None for the base model.
            max_failures: engines that may fail the request before it is given up; None for three times all.

        Raises:
            RefusedError: the engine says that the request is wrong.
            EngineError: engines failed the request, and no other could serve it in time; each engine's reason.
            DeadlineError: the request passed its deadline.
        """
        timeout_s = max(self._request_timeout_s, self._token_timeout_s * sampling.max_new_tokens)

        def ask(client: EngineClient, name: str) -> Coroutine[Any, Any, list[Sample]]:
            return client.generate(prompt, sampling, n=n, timeout_s=timeout_s, adapter=name)

        samples, num_retries = await self._route(
            ask, _newest_of_samples, cost=n * (len(prompt) + sampling.max_new_tokens), session=session, adapter=adapter,
            max_failures=max_failures)
        self.generated_tokens += sum(len(sample.token_ids) for sample in samples)
        return [replace(sample, num_retries=num_retries) for sample in samples] if num_retries else samples

    async def score(
        self, tokens: tuple[int, ...], *, top_k: int = 0, targets: tuple[tuple[int, ...], ...] | None = None,
        draws: Draws | None = None, session: str = "", adapter: WantedAdapter | None = None, max_failures: int | None = None,
    ) -> PromptScore:
        """What a model says of tokens; see `ScoreRequest`, and `generate` for the rest."""
        def ask(client: EngineClient, name: str) -> Coroutine[Any, Any, PromptScore]:
            return client.score(
                tokens, adapter=name, top_k=top_k, targets=targets, draws=draws, timeout_s=self._request_timeout_s)

        score, _ = await self._route(
            ask, _version_of_score, cost=len(tokens), session=session, adapter=adapter, max_failures=max_failures)
        return score

    async def _route(
        self, ask: Ask[T], newest: Callable[[T], Version], *, cost: int, session: str, adapter: WantedAdapter | None,
        max_failures: int | None,
    ) -> tuple[T, int]:
        """An engine's answer, and how many have failed before it; `newest` tells the newest version in an answer."""
        failed = Failures(limit=max_failures or _TRIES_PER_ENGINE * len(self._members))
        give_up_s = time.monotonic() + self._request_timeout_s
        refused: set[str] = set()
        again: Member | None = None
        while True:
            choose = partial(self._choose, cost, session, adapter, failed)
            member = again if again is not None and again.healthy else await self._wait(choose, last=failed.error)
            again, stint = None, member.stint
            with self._carrying(member, cost):
                try:
                    return await self._ask(member, ask, newest, adapter), failed.count
                except RefusedError:
                    if adapter is None or member.client.name in refused:
                        raise
                    refused.add(member.client.name)
                    again = member  # it may have lost the adapter: then it is given it again
                    await adapter.verify(Guarded(member))
                except BusyError:
                    if time.monotonic() > give_up_s:
                        raise
                    await asyncio.sleep(_BUSY_RETRY_S)
                except EngineError as exc:
                    failed.add(stint, exc)
                    self._on_failure(member.client.name, str(exc))
                    await self.examine(member.client.name)

    async def _ask(self, member: Member, ask: Ask[T], newest: Callable[[T], Version], adapter: WantedAdapter | None) -> T:
        """One engine's answer, once the weights that gave it are proven; raises EngineError if it failed, or was quarantined before."""
        if adapter is not None:
            async with adapter.using(Guarded(member)):
                return await member.while_in_service(ask(member.client, adapter.name))
        answer = await member.while_in_service(ask(member.client, ""))
        # Ahead between a switch and its proof, which the publisher ends with an admission or a quarantine.
        async with deadline(f"the proof of what {member.client.name} answered with", self._request_timeout_s):
            while member.version is not None and newest(answer) > member.version:
                await member.while_in_service(member.news.wait())
        return answer

    def _choose(self, cost: int, session: str, adapter: WantedAdapter | None, failed: "Failures") -> Member | None:
        """The engine for a request; None when it has to wait. Raises the request's last error when waiting cannot help."""
        healthy = {name: member for name, member in self._members.items() if member.healthy}
        able = {name: m for name, m in healthy.items()
                if m.stint not in failed.stints and (adapter is not None or m.state is State.SERVING)}
        if failed.error is not None and (failed.count >= failed.limit or (not able and len(healthy) == len(self._members))):
            raise failed.error
        if len(healthy) < self._min_engines or not able:
            return None
        holders = adapter.holders if adapter is not None else ()
        candidates = {name: m.outstanding_tokens for name, m in able.items() if name in holders}
        candidates = candidates or {name: m.outstanding_tokens for name, m in able.items()}
        return able[self._router.choose(candidates, cost=cost, session=session)]

    @contextmanager
    def _carrying(self, member: Member, cost: int) -> Iterator[None]:
        if not member.outstanding_tokens:
            member.busy_since_s = time.time()
        member.outstanding_tokens += cost
        try:
            yield
        finally:
            member.outstanding_tokens -= cost
            if not member.outstanding_tokens:
                self._end_busy(member)
                if member.state is State.DRAINING:
                    self._tell()

    def _end_busy(self, member: Member) -> None:
        now_s = time.time()
        self._on_busy("generate", member.client.name, member.busy_since_s, now_s)
        member.busy_since_s = now_s

    # -- waiting for engines -----------------------------------------------------------------------------------------------------------

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _wait(self, ready: Callable[[], T | None], *, last: EngineError | None = None) -> T:
        """The first truth that `ready` gives, asked again at each change of any engine.

        Raises:
            EngineError: none in `heal_timeout_s`; each engine's reason, and the request's last error.
        """
        if found := ready():
            return found
        if self._heal_timeout_s and not self._num_waiting:
            self._note(f"waiting up to {self._heal_timeout_s:g} s for engines to heal: {self._reasons()}")
        self._num_waiting += 1
        try:
            async with deadline("engines", self._heal_timeout_s):
                while not (found := ready()):
                    await self._changed.wait()
            return found
        except DeadlineError as exc:
            raise EngineError(f"no engine can serve: {self._reasons()}{f'; last: {last}' if last else ''}") from exc
        finally:
            self._num_waiting -= 1

    def _reasons(self) -> str:
        return "; ".join(f"{name}: {m.reason or m.state.value}" for name, m in self._members.items())


@dataclass
class Failures:
    """What a request has met with.

    Attributes:
        stints: engines that failed it, each for as long as it does not heal.
        error: the last.
    """

    limit: int
    stints: set[asyncio.Event] = field(default_factory=set)
    error: EngineError | None = None
    count: int = 0

    def add(self, stint: asyncio.Event, error: EngineError) -> None:
        self.stints.add(stint)
        self.error = error
        self.count += 1


def _paused(pause: object) -> str:
    """What an engine says of a pause that none of this process's publishers has made."""
    told = pause if isinstance(pause, dict) else {}
    by = f" by {told['by']}" if told.get("by") else ""
    since = f", {told['for_s']:.0f} s ago" if isinstance(told.get("for_s"), int | float) else ""
    return f"it was paused{by}{since}, and not by this run"


def _newest_of_samples(samples: list[Sample]) -> Version:
    return max((version for sample in samples for version in sample.versions), default=-1)


def _version_of_score(score: PromptScore) -> Version:
    return score.version
