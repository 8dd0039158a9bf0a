"""Requests for samples: queued fairly over owners, generated and scored by the engines, and answered through futures.

What a request wants of its prompt is scored beside its generation. A request ends in an outcome whatever happens, unless the server ends
before it.

    Sampling._start   consumes the fair queue; produces one task per request, up to a number of samples in flight; woken by `sample` and by
                      each request that ends
"""

import asyncio
import logging
import secrets
import time
from collections import deque
from collections.abc import Mapping
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Protocol

import numpy as np

from offbeat.aio import both
from offbeat.errors import OffbeatError, RefusedError
from offbeat.inference.sampling import Draws, PromptScore, Sample
from offbeat.inference.sampling import Sampling as EngineSampling
from offbeat.inference.sampling import TopTokens as EngineTopTokens
from offbeat.service.errors import RequestError
from offbeat.service.fair import FairQueue
from offbeat.service.futures import Future, Futures
from offbeat.service.ids import sample_request
from offbeat.service.limits import Usage
from offbeat.service.samplers import Samplers
from offbeat.service.speeds import Speeds
from offbeat.service.tables import SamplerRow
from offbeat.service.types import Caller, Failed, Failure, Outcome, Pending, QueueStatus, Sampled, SampledSequence, SampleRequest, TopTokens

_log = logging.getLogger(__name__)
_FAILURES_KEPT = 50


class Engines(Protocol):
    """What sampling needs of `offbeat.service.backend.Backend`."""

    @property
    def context(self) -> int: ...

    @property
    def end_token_ids(self) -> tuple[int, ...]: ...

    async def sample(self, adapter: str, prompt: tuple[int, ...], sampling: EngineSampling, n: int, session: str) -> list[Sample]: ...

    async def score(
        self, adapter: str, tokens: tuple[int, ...], top_k: int, targets: tuple[tuple[int, ...], ...] | None, draws: Draws | None,
    ) -> PromptScore: ...


@dataclass(eq=False)
class Job:
    """One request under way.

    Attributes:
        tokens: what it may cost.
        context: of the call that asked for it, so that log lines carry that call's id.
    """

    request: SampleRequest
    row: SamplerRow
    future: Future
    tokens: int
    since: float = field(default_factory=time.monotonic)
    context: Context = field(default_factory=copy_context)


class Sampling:
    """Takes requests for samples, and carries them out.

    Attributes:
        samplers: that can be sampled.
        failures: the last requests that failed, the newest first.
        speeds: of generated tokens, by model, or by base model where it was that.
    """

    def __init__(
        self, samplers: Samplers, *, engines: Engines, futures: Futures, usage: Usage, max_in_flight: int,
        others: Mapping[str, Engines] = MappingProxyType({}),
    ) -> None:
        """
        Args:
            max_in_flight: how many samples are generated at once; a request that wants more than are left still begins.
            others: engines of base models that are only sampled, by their names.
        """
        self.samplers = samplers
        self.speeds = Speeds()
        self.failures: deque[Failure] = deque(maxlen=_FAILURES_KEPT)
        self._engines = engines
        self._others = others
        self._futures = futures
        self._usage = usage
        self._max_in_flight = max_in_flight
        self._in_flight = 0
        self._queue: FairQueue[Job] = FairQueue()
        self._jobs: set[Job] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    def sample(self, caller: Caller, request: SampleRequest) -> str:
        """Begin a request, and give its id; one that is sent again is not begun again.

        Raises:
            UnknownError: there is no such sampler.
            OverLimitError: too many of the owner's tokens are under way.
        """
        row = self.samplers.find(caller, request.sampling_session_id)
        request_id = sample_request(row.id, request.seq_id)
        if self._futures.find(request_id, caller.owner) is not None:
            return request_id
        tokens = len(request.prompt) + request.num_samples * self._room(row, request)
        self._usage.charge(caller.owner, queued_tokens=tokens)
        future, _ = self._futures.open(request_id, owner=caller.owner, kind="sample")
        job = Job(request, row, future, tokens)
        self._jobs.add(job)
        self._queue.push(caller.owner, tokens, job)
        future.pending = Pending("paused_capacity", f"{len(self._queue)} requests for samples wait for engines")
        self._start()
        return request_id

    def standing(self) -> QueueStatus:
        """Requests that wait or run."""
        oldest = min((job.since for job in self._jobs), default=time.monotonic())
        return QueueStatus(len(self._jobs), sum(job.tokens for job in self._jobs), round(time.monotonic() - oldest, 2))

    async def close(self) -> None:
        """Drop what has not ended; its clients learn that it is lost when they ask a server that runs."""
        self._max_in_flight = 0
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # -- carrying out ------------------------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        while len(self._queue) and self._in_flight < self._max_in_flight:
            job = self._queue.pop()
            job.future.pending = Pending()
            self._in_flight += job.request.num_samples
            task = asyncio.create_task(self._carry_out(job), name=f"sample {job.future.request_id}", context=job.context)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _carry_out(self, job: Job) -> None:
        try:
            outcome = await self._outcome(job)
        finally:
            self._in_flight -= job.request.num_samples
            self._jobs.discard(job)
            self._usage.release(job.row.owner, queued_tokens=job.tokens)
            self._start()
        if isinstance(outcome, Failed):
            self.failures.appendleft(Failure(time.time(), job.future.request_id, job.row.owner, outcome.message))
        await self._futures.finish(job.future, outcome)

    async def _outcome(self, job: Job) -> Outcome:
        try:
            self._check(job.row, job.request)
            async with self.samplers.using(job.row) as adapter:
                return await self._sampled(adapter, job)
        except (RequestError, RefusedError) as exc:
            _log.info("%s is refused: %s", job.future.request_id, exc)
            return Failed(str(exc), "user")
        except OffbeatError as exc:
            _log.warning("%s failed: %s", job.future.request_id, exc)
            return Failed(str(exc), "server")
        except Exception:
            _log.exception("%s failed", job.future.request_id)
            return Failed("the server failed in a way that it did not expect; its log has the reason", "server")

    def _engines_of(self, row: SamplerRow) -> Engines:
        return self._engines if row.folder else self._others.get(row.base_model, self._engines)

    def _check(self, row: SamplerRow, request: SampleRequest) -> None:
        """Refuse what no engine can do; that the tokens are the model's, whoever read the request has seen to."""
        length, context = len(request.prompt), self._engines_of(row).context
        if length >= context:
            raise RequestError(f"the prompt has {length} tokens, which leaves no room in the model's context of {context}; shorten it")

    def _room(self, row: SamplerRow, request: SampleRequest) -> int:
        """Tokens that a sample may have: as many as asked for, up to the end of the context."""
        room = max(self._engines_of(row).context - len(request.prompt), 1)
        return room if request.max_tokens is None else min(request.max_tokens, room)

    async def _sampled(self, adapter: str, job: Job) -> Sampled:
        request, engines = job.request, self._engines_of(job.row)
        sampling = engine_sampling(request, self._room(job.row, request), end_token_ids=engines.end_token_ids)
        samples, score = await both(
            engines.sample(adapter, request.prompt, sampling, request.num_samples, job.row.id), self._score(engines, adapter, request))
        self.speeds.note(job.row.run_id or job.row.base_model, sum(len(sample.token_ids) for sample in samples))
        return sampled(request, samples, score)

    async def _score(self, engines: Engines, adapter: str, request: SampleRequest) -> PromptScore | None:
        """What is wanted of the prompt; None if nothing is, or nothing can be said of a single token."""
        top_k, targets, draws = request.topk_prompt_logprobs, request.target_prompt_logprobs, draws_of(request)
        if len(request.prompt) < 2 or not (request.prompt_logprobs or top_k or targets is not None or draws is not None):
            return None
        rows = None if targets is None else tuple(tuple(row[row != -1].tolist()) for row in _rows(targets))
        return await engines.score(adapter, request.prompt, top_k, rows, draws)


# -- between the engines' terms and the service's --------------------------------------------------------------------------------------


def engine_sampling(request: SampleRequest, max_new_tokens: int, *, end_token_ids: tuple[int, ...]) -> EngineSampling:
    """How engines are to sample, given what ends a sample unless the request says that nothing does."""
    stop = request.stop or ()
    ends = () if request.stop == () else dict.fromkeys([*end_token_ids, *(s for s in stop if isinstance(s, int))])
    return EngineSampling(
        max_new_tokens, temperature=request.temperature, top_p=request.top_p, top_k=request.top_k, seed=request.seed,
        stop=tuple(s for s in stop if isinstance(s, str)), stop_token_ids=tuple(ends),
        ignore_eos=request.stop == (), scaled_logprobs=True, top_logprobs=request.topk_sample_logprobs)


def draws_of(request: SampleRequest) -> Draws | None:
    """Tokens that are to be drawn at each position of the prompt; by chance where the request has no seed."""
    if not request.prompt_alt_tokens_k:
        return None
    seed = secrets.randbits(63) if request.seed is None else request.seed
    return Draws(request.prompt_alt_tokens_k, request.temperature, seed)


def sampled(request: SampleRequest, samples: list[Sample], score: PromptScore | None) -> Sampled:
    """The answer to a request."""
    length, last_n = len(request.prompt), request.prompt_logprobs_last_n
    score = score or PromptScore((np.nan,), 0)
    unscored = 0 if last_n is None else max(length - last_n, 0)
    logprobs = np.array(score.logprobs, np.float32)
    logprobs[:unscored] = np.nan
    top = ((),) * unscored + (score.top or ((),) * length)[unscored:]
    return Sampled(
        tuple(_sequence(sample, request.topk_sample_logprobs) for sample in samples),
        prompt_logprobs=logprobs if request.prompt_logprobs else None,
        topk_prompt=top_tokens(top, request.topk_prompt_logprobs) if request.topk_prompt_logprobs else None,
        target_prompt_logprobs=_target_logprobs(request.target_prompt_logprobs, score),
        prompt_alt=top_tokens(score.draws or ((),) * length, request.prompt_alt_tokens_k) if request.prompt_alt_tokens_k else None)


def top_tokens(rows: tuple[EngineTopTokens, ...], k: int) -> TopTokens:
    """At most k tokens at each position as arrays; -1 where there are fewer."""
    ids, logprobs = np.full((len(rows), k), -1, np.int32), np.zeros((len(rows), k), np.float32)
    for i, row in enumerate(rows):
        for j, (token, logprob) in enumerate(row[:k]):
            ids[i, j], logprobs[i, j] = token, logprob
    return TopTokens(ids, logprobs)


def _sequence(sample: Sample, top_k: int) -> SampledSequence:
    return SampledSequence(
        np.array(sample.token_ids, np.int32), np.array(sample.logprobs, np.float32), "stop" if sample.finish_reason == "stop" else "length",
        top_tokens(sample.top_logprobs, top_k) if top_k else None)


def _target_logprobs(targets: np.ndarray | None, score: PromptScore) -> np.ndarray | None:
    """Of the wanted tokens in the form in which they were asked for; 0 where there is none."""
    if targets is None:
        return None
    found = np.zeros(targets.shape, np.float32)
    for place, wanted, row in zip(_rows(found), _rows(targets), score.target_logprobs, strict=False):
        place[wanted != -1] = np.nan_to_num(np.array(row, np.float32))
    return found


def _rows(array: np.ndarray) -> np.ndarray:
    """[P] or [P, K] as [P, K]; a view."""
    return array.reshape(len(array), -1)
