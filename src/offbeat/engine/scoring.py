"""Log-probabilities of given tokens: waiting requests of any adapters share forward passes, which touch no cache. Used by the engine.

The engine decides when a batch runs; this module decides which requests are in it: the oldest, and as many others of similar length as
fit. Numbers do not depend on the rest of the batch.
"""

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from offbeat.data.image_store import FIRST_ID, is_image
from offbeat.engine.adapters import EngineAdapters
from offbeat.engine.forward import Forward
from offbeat.engine.request import MAX_TOP, Event, Scored, ScoreJob
from offbeat.engine.sampler import row_keys, uniforms
from offbeat.errors import BusyError, EngineError, RefusedError
from offbeat.inference.sampling import TopTokens
from offbeat.model.uploads import upload
from offbeat.types import Version

_DRAWS = 0x5DEECE66D
"""Separates the seeds of draws from the seeds of samples, which would otherwise see the same random numbers."""


@dataclass(frozen=True, eq=False)
class Wanted:
    """Numbers to read from the logits of N jobs. Row n * L + i of the logits [N * L, V] is the distribution after token i of job n.

    Attributes:
        length: L, length of the longest job.
        next_ids: [N * L] int64, the token that follows each row; arbitrary where none does, or an image.
        num_top: number of most likely tokens to read in `top_rows`.
        top_rows: [R] int64, ascending, the rows whose most likely tokens are read.
        target_rows, target_ids: [M] int64 each, rows ascending, further tokens to read.
        draw_rows: [D] int64, ascending, the rows from which tokens are drawn.
        temperatures: [D] float32, temperature of the draws.
        uniforms: [D, K] float64 in [0, 1), the random number of each draw.
    """

    length: int
    next_ids: np.ndarray
    num_top: int
    top_rows: np.ndarray
    target_rows: np.ndarray
    target_ids: np.ndarray
    draw_rows: np.ndarray
    temperatures: np.ndarray
    uniforms: np.ndarray

    @classmethod
    def of(cls, jobs: Sequence[ScoreJob], tokens: np.ndarray) -> "Wanted":
        """Collect the requests of the jobs; `tokens` [N, L] int64 are their tokens, padded."""
        length = tokens.shape[1]
        top_rows = [n * length + np.arange(len(job.tokens) - 1) for n, job in enumerate(jobs) if job.top_k]
        targets = [(n * length + i, token) for n, job in enumerate(jobs) for i, ids in enumerate((job.targets or [])[1:]) for token in ids]
        rows, ids = np.array(targets, np.int64).reshape(-1, 2).T
        drawn = [(n, job, np.arange(len(job.tokens) - 1)) for n, job in enumerate(jobs) if job.draws]
        uniforms_DK = np.zeros((sum(len(places) for _, _, places in drawn), max(job.draws for job in jobs)))
        start = 0
        for _, job, places in drawn:
            uniforms_DK[start : start + len(places), : job.draws] = _draw_numbers(job, places)
            start += len(places)
        return cls(
            length, np.where(is_image(follows := np.roll(tokens, -1, axis=1)), 0, follows).ravel(), max(job.top_k for job in jobs),
            np.concatenate([np.zeros(0, np.int64), *top_rows]), rows, ids,
            np.concatenate([np.zeros(0, np.int64), *(n * length + places for n, _, places in drawn)]),
            np.concatenate([np.zeros(0, np.float32), *(np.full(len(places), job.temperature, np.float32) for _, job, places in drawn)]),
            uniforms_DK)


@dataclass(frozen=True, eq=False)
class Found:
    """The log-probabilities that were read.

    Attributes:
        own: [N * L] float32, of `Wanted.next_ids`.
        top_ids, top: [R, num_top] int64 and float32, the most likely tokens.
        targets: [M] float32.
        draw_ids, draws: [D, K] int64 and float32, the drawn tokens.
    """

    own: np.ndarray
    top_ids: np.ndarray
    top: np.ndarray
    targets: np.ndarray
    draw_ids: np.ndarray
    draws: np.ndarray

    @classmethod
    def read(cls, blocks: Iterable[Tensor], wanted: Wanted) -> "Found":
        """Read logits that arrive in consecutive blocks [N, V]; no more than one block is held at a time."""
        own, top_ids, top, targets, draw_ids, draws, start = [], [], [], [], [], [], 0
        for logits in blocks:
            table = logits.float().log_softmax(dim=-1)
            device, stop = table.device, start + len(table)
            own.append(table.gather(1, upload(wanted.next_ids[start:stop], device)[:, None]).squeeze(1))
            if wanted.num_top:
                here = slice(*np.searchsorted(wanted.top_rows, (start, stop)))
                values, ids = table[upload(wanted.top_rows[here] - start, device)].topk(min(wanted.num_top, table.shape[1]))
                top.append(values)
                top_ids.append(ids)
            if len(wanted.target_rows):
                here = slice(*np.searchsorted(wanted.target_rows, (start, stop)))
                targets.append(table[upload(wanted.target_rows[here] - start, device), upload(wanted.target_ids[here], device)])
            if len(wanted.draw_rows):
                here = slice(*np.searchsorted(wanted.draw_rows, (start, stop)))
                rows = table[upload(wanted.draw_rows[here] - start, device)]
                draw_ids.append(_draw(rows, upload(wanted.temperatures[here], device), upload(wanted.uniforms[here], device)))
                draws.append(rows.gather(1, draw_ids[-1]))
            start = stop
        found = (own, top_ids, top, targets, draw_ids, draws)
        return cls(*(torch.cat(parts).cpu().numpy() if parts else np.zeros(0) for parts in found))


class Scorer:
    """The waiting score requests of one engine, on its thread."""

    def __init__(self, forward: Forward, adapters: EngineAdapters, *, max_context: int, max_queued: int, max_tokens: int) -> None:
        """`max_context` bounds the tokens of a request, `max_queued` the waiting requests, urgent ones aside.

        `max_tokens` bounds the tokens of a batch, padding included, unless it is a single request.
        """
        self._forward = forward
        self._adapters = adapters
        self._max_context = max_context
        self._max_queued = max_queued
        self._max_tokens = max_tokens
        self._waiting: deque[ScoreJob] = deque()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def adapters_in_use(self) -> set[str]:
        return {job.adapter for job in self._waiting}

    def submit(self, job: ScoreJob) -> None:
        """Queue a request; raises RefusedError, with the reason, if it can never be served, BusyError if too many are waiting."""
        self.check(job)
        if job.urgent:
            self._waiting.appendleft(job)
            return
        if self.num_waiting >= self._max_queued:
            raise BusyError(f"{self.num_waiting} requests wait to be scored, as many as max_queued allows; try again later")
        self._waiting.append(job)

    def check(self, job: ScoreJob) -> None:
        """Check that a request can be served, or raise RefusedError; marks its adapter as used."""
        tokens, targets, vocab = job.tokens, job.targets, self._forward.vocab_size
        if not 2 <= len(tokens) <= self._max_context:
            raise RefusedError(f"scoring takes 2 to {self._max_context} tokens, got {len(tokens)}")
        if not 0 <= job.top_k <= MAX_TOP:
            raise RefusedError(f"top_k of a score must be 0 to {MAX_TOP}, got {job.top_k}")
        if not (0 <= job.draws <= MAX_TOP and 0 <= job.temperature < math.inf):
            raise RefusedError(
                f"draws of a score must be 0 to {MAX_TOP} at a finite temperature of at least 0, got {job.draws} at {job.temperature}")
        if targets is not None and len(targets) != len(tokens):
            raise RefusedError(f"targets hold one list for each of the {len(tokens)} tokens, got {len(targets)} lists")
        of_text = [token for token in tokens if token < FIRST_ID] if self._forward.reads_images else tokens
        for ids in (of_text, *(targets or ())):
            if ids and not 0 <= min(ids) <= max(ids) < vocab:
                raise RefusedError(f"tokens to score must lie in the vocabulary of {vocab} tokens")
        self._adapters.use(job.adapter)

    def remove_job(self, job_id: str) -> None:
        """Drop a waiting request; an unknown one is no error."""
        self._waiting = deque(job for job in self._waiting if job.id != job_id)

    def drop_waiting(self) -> list[ScoreJob]:
        """Empty the queue and return its requests."""
        dropped, self._waiting = list(self._waiting), deque()
        return dropped

    def run(self, version: Version, *, beside: Iterable[str]) -> list[Event]:
        return self.compute(self._take(), version, beside=beside)

    def _take(self) -> list[ScoreJob]:
        """Take the oldest request, and others in order that are no more than twice as long or half as long, while they fit."""
        batch, left, longest = [], deque[ScoreJob](), 0
        first = len(self._waiting[0].tokens)
        for job in self._waiting:
            length = max(longest, len(job.tokens))
            alike = first <= 2 * len(job.tokens) and len(job.tokens) <= 2 * first
            if not batch or (alike and length * (len(batch) + 1) <= self._max_tokens):
                batch.append(job)
                longest = length
            else:
                left.append(job)
        self._waiting = left
        return batch

    @torch.inference_mode()
    def compute(self, jobs: Sequence[ScoreJob], version: Version, *, beside: Iterable[str] = ()) -> list[Event]:
        """Score requests together with the forward path that serves; adapters `beside` stay placed for running samples.

        The events hold results, or errors where logits are not finite, or an adapter took part in no layer.
        """
        length = max(len(job.tokens) for job in jobs)
        tokens = np.zeros((len(jobs), length), np.int64)
        for row, job in zip(tokens, jobs, strict=True):
            row[: len(job.tokens)] = job.tokens
        names = [job.adapter for job in jobs]
        self._adapters.place([*beside, *names])
        wanted, ids, lora = Wanted.of(jobs, tokens), upload(tokens, self._forward.device), self._adapters.rows(names, repeat=length)
        if lora is not None:
            lora.reached.clear()
        found = Found.read(self._forward.score(ids, lora=lora), wanted)
        unbound = lora is not None and not lora.reached
        return [
            Event(job.id, _unbound(job) if unbound and job.adapter else _result(job, n, version, wanted, found))
            for n, job in enumerate(jobs)]


def _draw_numbers(job: ScoreJob, places: np.ndarray) -> np.ndarray:
    """Return a number in [0, 1) for each draw, [N, K] float64 with K = `job.draws`, from the job's seed and the place alone."""
    keys = row_keys(job.seed ^ _DRAWS, job.draws)
    return uniforms(np.broadcast_to(keys, (len(places), job.draws)), places[:, None])


def _draw(logprobs: Tensor, temperatures: Tensor, numbers: Tensor) -> Tensor:
    """Draw K tokens from each of D rows, [D, K] int64, by inverting the cumulative distribution; the most likely token at temperature 0.

    Of the arguments, `logprobs` are [D, V] float32 at temperature 1, `temperatures` [D] float32, and `numbers` [D, K] float64 in [0, 1).
    """
    greedy = temperatures == 0
    scaled = logprobs / torch.where(greedy, 1.0, temperatures)[:, None]
    cumulative = scaled.softmax(dim=-1).cumsum(dim=-1, dtype=torch.float64)
    tokens = torch.searchsorted(cumulative, numbers * cumulative[:, -1:], right=True).clamp_(max=logprobs.shape[1] - 1)
    return torch.where(greedy[:, None], logprobs.argmax(dim=-1, keepdim=True), tokens)


def _unbound(job: ScoreJob) -> EngineError:
    return EngineError(
        f"adapter {job.adapter} took part in none of the model's layers, so that the engine answers for it as the base model does")


def _result(job: ScoreJob, n: int, version: Version, wanted: Wanted, found: Found) -> Scored | EngineError:
    first, last = n * wanted.length, (n + 1) * wanted.length
    own = found.own[first : first + len(job.tokens) - 1]
    if not np.isfinite(own).all():
        weights = f"adapter {job.adapter}" if job.adapter else f"version {version}"
        return EngineError(f"the logits of {weights} are not finite: its weights have diverged or are damaged")
    top, targets, draws = (slice(*np.searchsorted(rows, (first, last))) for rows in (wanted.top_rows, wanted.target_rows, wanted.draw_rows))
    logprobs = iter(found.targets[targets].tolist())
    return Scored(
        version, own.tolist(), _pairs(found.top_ids[top, : job.top_k], found.top[top, : job.top_k]) if job.top_k else None,
        None if job.targets is None else [[next(logprobs) for _ in ids] for ids in job.targets[1:]],
        _pairs(found.draw_ids[draws, : job.draws], found.draws[draws, : job.draws]) if job.draws else None)


def _pairs(ids: np.ndarray, logprobs: np.ndarray) -> list[TopTokens]:
    """Return the tokens [R, K] of each row with their log-probabilities."""
    return [tuple(zip(*row, strict=True)) for row in zip(ids.tolist(), logprobs.tolist(), strict=True)]
