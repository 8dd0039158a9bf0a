"""Sends requests to engines; when an engine fails, another one generates or scores again.

A request for an adapter goes to an engine that holds it; if none does, the engine that is chosen loads it first. `routing` chooses among
several engines.
"""

import asyncio
import time
from bisect import bisect_right
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol, TypeVar

from offbeat.aio import deadline, gather_all
from offbeat.errors import BusyError, EngineError, RefusedError
from offbeat.fleet.adapters import AdapterCache
from offbeat.fleet.members import Guarded, Member, State
from offbeat.fleet.pool import EnginePool
from offbeat.fleet.routing import Router
from offbeat.inference.client import EngineClient
from offbeat.inference.hearing import KnownSample
from offbeat.inference.sampling import Draws, PromptScore, Sample, Sampling
from offbeat.types import Version
from offbeat.weights.adapters import split_adapter_name
from offbeat.weights.protocol import Manifest

T = TypeVar("T")
_BUSY_RETRY_S = 0.2
_TRIES_PER_ENGINE = 3
"""A request that has failed on engines this often, each healed in between, breaks them itself."""


class Dispatcher:
    """Sends generation and scoring to the engines of a pool; `generated_tokens` counts the tokens of all answers since the start."""

    def __init__(
        self, pool: EnginePool, *, request_timeout_s: float, token_timeout_s: float = 0.0, adapters: AdapterCache | None = None,
    ) -> None:
        """An engine has `request_timeout_s` to answer a request, or `token_timeout_s` for each token that it may generate, where that is
        more in total. Without `adapters`, requests only go to whole models.
        """
        self.pool = pool
        self.generated_tokens = 0
        self._request_timeout_s = request_timeout_s
        self._token_timeout_s = token_timeout_s
        self._adapters = adapters
        self._router = Router()

    async def generate(
        self, prompt: tuple[int, ...], sampling: Sampling, *, n: int, session: str = "", adapter: str = "", max_failures: int | None = None,
    ) -> list[Sample]:
        """Generate n continuations on one engine, or on another if it fails. Generation has no side effects, so repeating it is safe.

        With `sampling.hearing`, samples go on from the tokens that are known of them, of an earlier process or of an engine that failed.

        Args:
            session: requests of one session go to one engine as long as the load allows, for its cached prefix.
            adapter: name of an adapter, whose current version is used, or of one version, such as "coder@7"; "" for the model itself.
            max_failures: number of engines that may fail the request before it is given up; None for three times all engines.

        Raises:
            RefusedError: the engine says that the request is wrong; or there is no such adapter, or its folder cannot be loaded.
            EngineError: engines failed the request, and no other could serve it in time; gives each engine's reason.
            DeadlineError: the request passed its deadline.
        """
        timeout_s = max(self._request_timeout_s, self._token_timeout_s * sampling.max_new_tokens)
        num_begun = 0 if sampling.hearing is None else sampling.hearing.num_tokens
        samples, num_retries = await self._route(
            _Generation(prompt, sampling, n, timeout_s), session=session, adapter=adapter, max_failures=max_failures)
        self.generated_tokens += sum(len(sample.tokens) for sample in samples) - num_begun
        return [replace(sample, num_retries=num_retries) for sample in samples] if num_retries else samples

    async def score(
        self, tokens: tuple[int, ...], *, top_k: int = 0, targets: tuple[tuple[int, ...], ...] | None = None,
        draws: Draws | None = None, session: str = "", adapter: str = "", max_failures: int | None = None,
    ) -> PromptScore:
        """Score tokens under an adapter or the model itself; arguments as for `ScoreRequest` and `generate`."""
        score, _ = await self._route(
            _Scoring(tokens, top_k, targets, draws, self._request_timeout_s), session=session, adapter=adapter, max_failures=max_failures)
        return score

    async def _route(self, request: "_Request[T]", *, session: str, adapter: str, max_failures: int | None) -> tuple[T, int]:
        """Return an engine's answer, and the number of failures before it."""
        failed = Failures(limit=max_failures or _TRIES_PER_ENGINE * len(self.pool.members))
        give_up_s = time.monotonic() + self._request_timeout_s
        refused: set[str] = set()
        again: Member | None = None
        with self._cache.wanted(adapter) if adapter else nullcontext() as wanted:
            while True:
                choose = partial(self._choose, request.cost, session, wanted, failed)
                member = again if again is not None and again.healthy else await self.pool.wait(choose, last=failed.error)
                again, stint = None, member.stint
                with self.pool.carrying(member, request.cost):
                    try:
                        return await self._ask(member, request, wanted), failed.count
                    except RefusedError:
                        if wanted is None or member.client.name in refused:
                            raise
                        refused.add(member.client.name)
                        again = member  # it may have lost the adapter, which is then loaded again
                        await self._cache.verify(Guarded(member), wanted)
                    except BusyError:
                        if time.monotonic() > give_up_s:
                            raise
                        await asyncio.sleep(_BUSY_RETRY_S)
                    except EngineError as exc:
                        request.engine_failed()
                        failed.add(stint, exc)
                        self.pool.listener.failed(member.client.name, str(exc))
                        await self.pool.examine(member.client.name)

    async def _ask(self, member: Member, request: "_Request[T]", wanted: Manifest | None) -> T:
        """Return one engine's answer, once its weights are proven; raises EngineError if it failed, or was quarantined."""
        if wanted is not None:
            async with self._cache.holding(Guarded(member), wanted):
                return await member.while_in_service(request.ask(member.client, wanted.name))
        request.asks(member)
        answer = await member.while_in_service(request.ask(member.client, ""))
        # The answer is ahead of the member between a switch and its proof; the publisher then admits or quarantines the engine.
        async with deadline(f"the proof of what {member.client.name} answered with", self._request_timeout_s):
            while member.version is not None and request.newest(answer) > member.version:
                await member.while_in_service(member.news.wait())
        return answer

    def _choose(self, cost: int, session: str, wanted: Manifest | None, failed: "Failures") -> Member | None:
        """Choose the engine for a request; None when it has to wait. Raises the request's last error when waiting cannot help."""
        members, serving, unproven, num_healthy = self.pool.members, State.SERVING, State.UNPROVEN, 0
        able: dict[str, int] = {}  # outstanding tokens of the engines that may take the request
        for name, member in members.items():  # one pass, as there may be a thousand, for every request
            state = member.state
            if state is serving or state is unproven:
                num_healthy += 1
                if (wanted is not None or state is serving) and member.stint not in failed.stints:
                    able[name] = member.outstanding_tokens
        if failed.error is not None and (failed.count >= failed.limit or (not able and num_healthy == len(members))):
            raise failed.error
        if num_healthy < self.pool.min_engines or not able:
            return None
        holders = self._cache.holders(wanted.name) if wanted is not None else ()
        candidates = {name: load for name, load in able.items() if name in holders} if holders else {}
        return members[self._router.choose(candidates or able, cost=cost, session=session)]

    @property
    def _cache(self) -> AdapterCache:
        assert self._adapters is not None, "only a dispatcher with a cache of adapters can be asked for one"
        return self._adapters


@dataclass
class Failures:
    """Failures of one request so far.

    Attributes:
        limit: number of failures after which the request is given up.
        stints: stretches of service in which an engine failed the request; an engine that has healed since may be asked again.
    """

    limit: int
    stints: set[asyncio.Event] = field(default_factory=set)
    error: EngineError | None = None
    count: int = 0

    def add(self, stint: asyncio.Event, error: EngineError) -> None:
        """Note that an engine failed the request during this stretch of its service."""
        self.stints.add(stint)
        self.error = error
        self.count += 1


class _Request(Protocol[T]):
    """A request that any engine can answer; `cost` is the number of tokens to compute, at most."""

    @property
    def cost(self) -> int: ...

    async def ask(self, client: EngineClient, adapter: str) -> T:
        """Ask an engine, with an adapter's name or ""."""
        ...

    def newest(self, answer: T) -> Version: ...

    def asks(self, member: Member) -> None:
        """Take note of the engine that is asked, without an adapter."""
        ...

    def engine_failed(self) -> None:
        """Take note that it did not answer."""
        ...


@dataclass(frozen=True)
class _Generation:
    """Generates n continuations of a prompt."""

    prompt: tuple[int, ...]
    sampling: Sampling
    n: int
    timeout_s: float

    @property
    def cost(self) -> int:
        return self.n * (len(self.prompt) + self.sampling.max_new_tokens)

    async def ask(self, client: EngineClient, adapter: str) -> list[Sample]:
        sampling, hearing = self.sampling, self.sampling.hearing
        if hearing is not None:
            version = split_adapter_name(adapter)[1] if adapter else None
            if version is not None:  # an earlier process may have known a newer one
                for sample in hearing.samples:
                    sample.cut(bisect_right(sample.versions, version))
            if hearing.num_tokens:
                return await gather_all(
                    self._go_on(client, adapter, sample, replace(
                        sampling, max_new_tokens=sampling.max_new_tokens - len(sample.tokens), first_sample=sampling.first_sample + index,
                        hearing=hearing.request(sample, version=version)))
                    for index, sample in enumerate(hearing.samples))
            sampling = replace(sampling, hearing=hearing.request(*hearing.samples, version=version))
        return await client.generate(self.prompt, sampling, n=self.n, timeout_s=self.timeout_s, adapter=adapter)

    async def _go_on(self, client: EngineClient, adapter: str, begun: KnownSample, sampling: Sampling) -> Sample:
        """Generate the rest of a sample; returns all of it."""
        length = len(begun.tokens)
        [rest] = await self._accepted(client, (*self.prompt, *begun.tokens), sampling, adapter)
        # If another sample's engine fails, this one has its end.
        begun.hear(length, rest.tokens, rest.token_logprobs, rest.token_versions)
        tokens, logprobs, versions = begun.columns()
        return replace(
            rest, tokens=tokens, token_logprobs=logprobs, token_versions=versions,
            num_cached_tokens=min(rest.num_cached_tokens, len(self.prompt)))

    async def _accepted(self, client: EngineClient, prompt: tuple[int, ...], sampling: Sampling, adapter: str) -> list[Sample]:
        """Generate the rest of a sample; while the engine's queue is full, others of the call go on, and make room."""
        give_up_s = time.monotonic() + self.timeout_s
        while True:
            try:
                return await client.generate(prompt, sampling, n=1, timeout_s=self.timeout_s, adapter=adapter)
            except BusyError:
                if time.monotonic() > give_up_s:
                    raise
            await asyncio.sleep(_BUSY_RETRY_S)

    def asks(self, member: Member) -> None:
        if self.sampling.hearing is not None:
            self.sampling.hearing.go_on_at(member)

    def engine_failed(self) -> None:
        if self.sampling.hearing is not None:
            self.sampling.hearing.engine_failed()

    def newest(self, answer: list[Sample]) -> Version:
        return max((int(sample.token_versions.max(initial=-1)) for sample in answer), default=-1)


@dataclass(frozen=True)
class _Scoring:
    """Scores tokens; see `ScoreRequest` for the fields."""

    tokens: tuple[int, ...]
    top_k: int
    targets: tuple[tuple[int, ...], ...] | None
    draws: Draws | None
    timeout_s: float

    @property
    def cost(self) -> int:
        return len(self.tokens)

    async def ask(self, client: EngineClient, adapter: str) -> PromptScore:
        return await client.score(
            self.tokens, adapter=adapter, top_k=self.top_k, targets=self.targets, draws=self.draws, timeout_s=self.timeout_s)

    def newest(self, answer: PromptScore) -> Version:
        return answer.version

    def asks(self, member: Member) -> None:
        pass

    def engine_failed(self) -> None:
        pass
