"""Sampling requests: queued fairly between owners, generated and scored by the engines, and answered through futures.

A request for many samples is carried out in parts, so that it never has the engines to itself. An owner with nothing in flight starts at
once, even if others fill the engines; they get no more until that owner has an equal share. While several owners sample, now or within the
last seconds, none of them may fill the engines alone, because long samples of many rows slow every step of the others' short ones. The
prompt is scored along with a request's first part. Every request ends in an outcome, unless the server ends first.

    SamplingService._start   consumes the fair queue; produces one task per part, up to a number of samples in flight; woken by `sample`
                             and by each part that ends
"""

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Mapping
from contextvars import Context, copy_context
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

from offbeat.aio import both
from offbeat.errors import OffbeatError, RefusedError
from offbeat.inference.sampling import Draws, PromptScore, Sample
from offbeat.inference.sampling import Sampling as EngineSampling
from offbeat.service.checkpoints import CheckpointError
from offbeat.service.clock import steady_time
from offbeat.service.cost import SampleCost, cost_of_samples
from offbeat.service.engine_terms import draws_of, engine_sampling, sampled, sequence_of, target_rows
from offbeat.service.errors import FailedError, RequestError, TooLargeError, outside
from offbeat.service.fair import FairQueue
from offbeat.service.futures import Future, Futures
from offbeat.service.ids import sample_request
from offbeat.service.limits import Usage
from offbeat.service.samplers import Samplers
from offbeat.service.speeds import Speeds
from offbeat.service.tables import SamplerRow
from offbeat.service.types import Caller, Failed, FailedRequest, Pending, QueueStatus, Sampled, SampledSequence, SampleRequest
from offbeat.user_code.boundary import Caught

_log = logging.getLogger(__name__)
T = TypeVar("T")

Make = Callable[..., T]
"""Makes a part of an answer."""
_FAILURES_KEPT = 50
_MOST_BEYOND = 2
"""Multiple of the allowed samples in flight that may be reached while new owners start and earlier ones still fill the engines."""
_RECENT_S = 10.0
"""Time after its last request for which an owner still counts: most clients sample a little, train, and sample again."""
_BURST = 16
"""Each of several owners may have an equal share of the samples in flight, or 1/16 of all, whichever is more."""
_GIVEN_UP = Failed("the client went away before this was done", "user")
_CELLS_AT_ONCE = 20_000
"""Number of top tokens that the event loop puts into an answer, in about 10 ms; more are handled on a thread."""


class Engines(Protocol):
    """The part of `offbeat.fleet.sampling_models.SamplingModel` that sampling needs."""

    @property
    def context(self) -> int: ...

    @property
    def end_token_ids(self) -> tuple[int, ...]: ...

    async def sample(self, adapter: str, prompt: tuple[int, ...], sampling: EngineSampling, n: int, session: str) -> list[Sample]: ...

    async def score(
        self, adapter: str, tokens: tuple[int, ...], top_k: int, targets: tuple[tuple[int, ...], ...] | None, draws: Draws | None,
    ) -> PromptScore: ...


@dataclass(eq=False)
class SamplingJob:
    """One request under way.

    sequences: samples so far, by number.
    score: score of the prompt, once known.
    left: parts that have not ended.
    failed: outcome of the first part that failed.
    context: context of the client's call, so that log lines carry the call's ID.
    running: timeouts of its running parts, by which they can be ended early.
    """

    request: SampleRequest
    row: SamplerRow
    future: Future
    cost: SampleCost
    sequences: dict[int, SampledSequence] = field(default_factory=dict)
    score: PromptScore | None = None
    left: int = 0
    failed: Failed | None = None
    since: float = field(default_factory=time.monotonic)
    context: Context = field(default_factory=copy_context)
    running: set[asyncio.Timeout] = field(default_factory=set)

    def parts(self) -> "list[SamplingPart]":
        num, together = self.request.num_samples, self.cost.together
        return [SamplingPart(self, first, min(together, num - first)) for first in range(0, num, together)]


@dataclass(frozen=True, eq=False)
class SamplingPart:
    """Samples `first` to `first + num` (exclusive) of a request, for example 32 to 64."""

    job: SamplingJob
    first: int
    num: int

    @property
    def slots(self) -> int:
        """Number of samples in flight that this part counts as."""
        return self.job.cost.slots(self.num)


class SamplingService:
    """Accepts sampling requests and carries them out.

    Attributes:
        failures: latest failed requests, newest first.
        speeds: generated tokens per second, by model, or by base model for its own samples.
    """

    def __init__(
        self, samplers: Samplers, *, engines: Engines, futures: Futures, usage: Usage, max_in_flight: int,
        others: Mapping[str, Engines] = MappingProxyType({}),
    ) -> None:
        """Set up an empty queue.

        Args:
            engines: engines of the trained model, with the adapters on them.
            max_in_flight: number of samples generated at once; large ones count as several.
            others: engines of base models that are only sampled, by name.
        """
        self.samplers = samplers
        self.speeds = Speeds()
        self.failures: deque[FailedRequest] = deque(maxlen=_FAILURES_KEPT)
        self._engines = engines
        self._others = others
        self._futures = futures
        self._usage = usage
        self._max_in_flight = max_in_flight
        self._in_flight: Counter[str] = Counter()
        self._asked: dict[str, float] = {}  # when each owner last asked, the longest ago first
        self._queue: FairQueue[SamplingPart] = FairQueue()
        self._jobs: dict[str, SamplingJob] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def sample(self, caller: Caller, request: SampleRequest, *, kept: bool = True) -> str:
        """Begin a request and return its ID; a request sent again is not begun again.

        Args:
            kept: whether its answer is kept, so that it can be fetched by the ID.

        Raises:
            UnknownError: there is no such sampler.
            OverLimitError: the owner has too much under way.
            RequestError: the request costs more than will ever be accepted, or there is no room on disk for its answer.
        """
        row = self.samplers.find(caller, request.sampling_session_id)
        request_id = sample_request(row.id, request.seq_id)
        if self._futures.find(request_id, caller.owner) is not None:
            return request_id
        cost = cost_of_samples(request, room=self._room(row, request), max_in_flight=self._max_in_flight)
        if cost.slots(1) > self._max_in_flight > 0:
            raise TooLargeError(
                f"a single sample of this request may take {cost.sample_bytes} bytes of memory, which is more than engines have for it; "
                "lower max_tokens or topk_sample_logprobs")
        self._usage.charge(caller.owner, **cost.whole.charge)
        future, _ = self._futures.open(request_id, owner=caller.owner, kind="sample", kept=kept)
        job = SamplingJob(request, row, future, cost)
        self._jobs[request_id] = job
        self._asked.pop(caller.owner, None)
        self._asked[caller.owner] = time.monotonic()
        parts = job.parts()
        job.left = len(parts)
        for part in parts:
            self._queue.push(caller.owner, -(-cost.whole.tokens * part.num // request.num_samples), part)
        future.pending = Pending("paused_capacity", f"{len(self._jobs)} requests for samples wait for engines")
        self._start()
        return request_id

    def ask(self, caller: Caller, request: SampleRequest) -> "asyncio.Task[Sampled]":
        """Begin a new request as `sample` does, and return a task that waits for its samples, which nobody else can fetch.

        Cancelling the task gives the request up, which frees its memory and its place in the queue. It raises RequestError if the request
        was at fault, and FailedError if it failed for another reason.
        """
        job = self._jobs[self.sample(caller, request, kept=False)]
        waiting = asyncio.create_task(_outcome(job), name=f"wait for {job.future.request_id}")
        waiting.add_done_callback(lambda done: self._give_up(job) if done.cancelled() else None)
        return waiting

    def standing(self) -> QueueStatus:
        """Return the state of the queue: requests that wait or run."""
        oldest = min((job.since for job in self._jobs.values()), default=time.monotonic())
        tokens = sum(job.cost.whole.tokens for job in self._jobs.values())
        return QueueStatus(len(self._jobs), tokens, round(time.monotonic() - oldest, 2))

    async def close(self) -> None:
        """Drop requests that have not ended; clients learn that they are lost when they ask the next server."""
        self._max_in_flight = 0
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _start(self) -> None:
        while (part := self._next()) is not None:
            job = part.job
            job.future.pending = Pending()
            self._in_flight[job.row.owner] += part.slots
            self._start_task(job, self._carry_out(part))

    def _start_task(self, job: SamplingJob, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work, name=f"sample {job.future.request_id}", context=job.context)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _next(self) -> SamplingPart | None:
        """Return the next part that may begin, or None.

        A part within its owner's share, or of an owner with nothing in flight, may exceed the limit. A part beyond the share may begin
        only within the limit, and only if its owner has few others in flight or no other owner has sampled lately.
        """
        total, most, long_ago = self._in_flight.total(), self._max_in_flight, time.monotonic() - _RECENT_S
        while self._asked and next(iter(self._asked.values())) < long_ago:
            del self._asked[next(iter(self._asked))]
        share = most // max(len({*self._in_flight, *self._queue.owners, *self._asked}), 1)
        burst = max(most // _BURST, share)

        def may(owner: str, part: SamplingPart) -> bool:
            held = self._in_flight[owner]
            if not held or held + part.slots <= share:
                return total + part.slots <= _MOST_BEYOND * most
            return held + part.slots <= burst and total + part.slots <= most

        try:
            return self._queue.pop(may)
        except LookupError:
            return None

    async def _carry_out(self, part: SamplingPart) -> None:
        job, owner = part.job, part.job.row.owner
        try:
            if job.failed is None:
                await self._try(part)
        finally:
            self._in_flight[owner] -= part.slots
            if not self._in_flight[owner]:
                del self._in_flight[owner]
            self._leave(job)
            self._start()
        if not job.left:
            await self._end_job(job)

    def _leave(self, job: SamplingJob, num_parts: int = 1) -> None:
        """Note that parts of a request have ended; with the last one its owner may have as much more under way."""
        job.left -= num_parts
        if not job.left:
            del self._jobs[job.future.request_id]
            self._usage.release_charge(job.row.owner, **job.cost.whole.charge)

    def _give_up(self, job: SamplingJob) -> None:
        """End a request whose samples nobody wants any more: waiting parts at once, running ones as soon as engines let go."""
        if not job.left:
            return
        job.failed = job.failed or _GIVEN_UP
        for scope in job.running:
            scope.reschedule(asyncio.get_running_loop().time())
        if waiting := self._queue.drop(job.row.owner, lambda part: part.job is job):
            self._leave(job, len(waiting))
            if not job.left:
                self._start_task(job, self._end_job(job))

    async def _end_job(self, job: SamplingJob) -> None:
        request, outcome = job.request, job.failed
        if outcome is None:
            outcome = await _made(
                len(request.prompt) * request.topk_prompt_logprobs, sampled, request,
                [job.sequences[i] for i in range(request.num_samples)], job.score)
        if isinstance(outcome, Failed) and outcome is not _GIVEN_UP:
            self.failures.appendleft(FailedRequest(steady_time(), job.future.request_id, job.row.owner, outcome.message))
        await self._futures.finish(job.future, outcome)

    async def _try(self, part: SamplingPart) -> None:
        """Carry out a part; the first part that fails determines how its request ends."""
        job = part.job
        with Caught() as caught:  # whatever is raised, the request waits for this part
            self._check_request(job.row, job.request)
            async with self.samplers.using(job.row) as adapter, asyncio.timeout(None) as scope:
                if job.failed is not None:  # while this part waited for the weights
                    return
                job.running.add(scope)
                try:
                    await self._sample(adapter, part)
                finally:
                    job.running.discard(scope)
        if (exc := caught.failure) is not None:
            job.failed = job.failed or _explain(job.future.request_id, exc)

    def _engines_of(self, row: SamplerRow) -> Engines:
        return self._engines if row.folder else self._others.get(row.base_model, self._engines)

    def _check_request(self, row: SamplerRow, request: SampleRequest) -> None:
        """Refuse a request that no engine can serve. The parser has already checked that its tokens are in the vocabulary."""
        length, context = len(request.prompt), self._engines_of(row).context
        if length >= context:
            raise RequestError(f"the prompt has {length} tokens, which leaves no room in the model's context of {context}; shorten it")

    def _room(self, row: SamplerRow, request: SampleRequest) -> int:
        """Return the number of tokens that a sample may have: as many as requested, up to the end of the context."""
        room = max(self._engines_of(row).context - len(request.prompt), 1)
        return room if request.max_tokens is None else min(request.max_tokens, room)

    async def _sample(self, adapter: str, part: SamplingPart) -> None:
        job, request = part.job, part.job.request
        engines = self._engines_of(job.row)
        sampling = engine_sampling(request, self._room(job.row, request), end_token_ids=engines.end_token_ids)
        asking = engines.sample(adapter, request.prompt, replace(sampling, first_sample=part.first), part.num, job.row.id)
        if part.first:
            samples = await asking
        else:
            samples, job.score = await both(asking, self._score_prompt(engines, adapter, request))
        self.speeds.note(job.row.run_id or job.row.base_model, sum(len(sample.tokens) for sample in samples))
        # Converted to arrays at once, because engines' answers about top tokens take fifty times as much memory.
        num_cells = sum(len(top) for sample in samples for top in sample.top_logprobs)
        sequences = await _made(num_cells, lambda: [sequence_of(sample, request.topk_sample_logprobs) for sample in samples])
        job.sequences.update(enumerate(sequences, part.first))

    async def _score_prompt(self, engines: Engines, adapter: str, request: SampleRequest) -> PromptScore | None:
        """Score the prompt as requested; None if no scores are wanted, or the prompt is a single token, which has no score."""
        top_k, targets, draws = request.topk_prompt_logprobs, request.target_prompt_logprobs, draws_of(request)
        if len(request.prompt) < 2 or not (request.prompt_logprobs or top_k or targets is not None or draws is not None):
            return None
        rows = None if targets is None else target_rows(targets)
        return await engines.score(adapter, request.prompt, top_k, rows, draws)


async def _outcome(job: SamplingJob) -> Sampled:
    outcome = await job.future.ended()
    if isinstance(outcome, Failed):
        raise (RequestError if outcome.category == "user" else FailedError)(outcome.message)
    assert isinstance(outcome, Sampled), "a request for samples has no other outcome"
    return outcome


async def _made(num_cells: int, make: Make[T], *args: object) -> T:
    """Call `make`, on a thread if it has to put many top tokens into an answer."""
    return make(*args) if num_cells <= _CELLS_AT_ONCE else await asyncio.to_thread(make, *args)


def _explain(request_id: str, exc: Exception) -> Failed:
    """Log an error and turn it into an outcome."""
    if isinstance(exc, RequestError | RefusedError):
        _log.info("%s is refused: %s", request_id, exc)
        said = exc.said if isinstance(exc, RefusedError) else ""
        return Failed(outside(said or str(exc), name=request_id), "user")
    if isinstance(exc, CheckpointError):
        _log.error("%s failed: %s", request_id, exc)
        return Failed(outside(str(exc), name=request_id), "server")
    if isinstance(exc, OffbeatError):
        _log.warning("%s failed: %s", request_id, exc)
        return Failed(f"the engines could not do this, and the server's log has the reason under {request_id}; send it again", "server")
    _log.error("%s failed", request_id, exc_info=exc)
    return Failed("the server failed in a way that it did not expect; its log has the reason", "server")
