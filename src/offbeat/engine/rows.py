"""Bookkeeping of running samples: numpy columns indexed by slot, so that a step is a handful of array operations. Used by the engine."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from offbeat.data.image_store import FIRST_ID
from offbeat.data.sample_supports import Supports
from offbeat.data.tokenizer import Tokenizer
from offbeat.engine.cache import BUCKET, round_up
from offbeat.engine.request import FinishReason, Output, Request
from offbeat.engine.sample_ends import end_ids, text_to_stop
from offbeat.engine.sampler import Drawn, SamplingRows, uniforms
from offbeat.engine.shaping import ShapedRows, ShapedSample, bad_word_ids
from offbeat.engine.text import TextStream
from offbeat.inference.sampling import TopTokens
from offbeat.types import Version

NO_TOKEN = -1


@dataclass(eq=False)
class RunningSample:
    """One of the n samples of a running request.

    Attributes:
        text: decodes the text where the request has stop strings, else None.
        top: the most likely tokens at each position so far, where the request wants them, else None.
        sent: number of generated tokens already sent to a streaming request.
        shaped: follows the tokens where the request has a shaping, else None.
        num_cached: number of prompt tokens that were not computed; see `Output`.
        mixed: whether weights that served before have computed a part of its cache.
        shift: what its rotary positions are ahead of its number of tokens; of a prompt with images it may be below 0.
        supports: the tokens among which each was drawn so far, as pieces of `Supports`; empty where they are not wanted, or all whole.
        routes: routes of its first tokens, [l, num_routes], where they are not in the cache any more; see `Runner.routes_of`.
    """

    request: Request
    index: int
    text: TextStream | None
    top: list[TopTokens] | None
    sent: int = 0
    shaped: ShapedSample | None = None
    num_cached: int = 0
    mixed: bool = False
    shift: int = 0
    routes: np.ndarray | None = None
    supports: list[tuple[int, np.ndarray]] = field(default_factory=list)


class Rows:
    """Slots 0..B-1, one running sample each. A row's `length` counts its prompt and generated tokens.

    The newest token's keys and values are not in the cache yet: it is the input of the next decode step, at position `length - 1`.
    """

    def __init__(self, *, max_rows: int, device: torch.device) -> None:
        self.samples: list[RunningSample] = []
        self.length = np.zeros(max_rows, np.int64)
        self._prompt_len = np.zeros(max_rows, np.int64)
        self._num_begun = np.zeros(max_rows, np.int64)
        self._limit = np.zeros(max_rows, np.int64)
        self._key = np.zeros(max_rows, np.uint64)
        self._temperature = np.zeros(max_rows, np.float32)
        self._top_p = np.zeros(max_rows, np.float32)
        self._top_k = np.zeros(max_rows, np.int64)
        self._scaled = np.zeros(max_rows, bool)
        self._num_top = np.zeros(max_rows, np.int64)
        self._stop_ids = np.full((max_rows, 1), NO_TOKEN, np.int64)
        self._tokens = np.zeros((max_rows, 0), np.int64)
        self._logprobs = np.zeros((max_rows, 0), np.float32)
        self._versions = np.zeros((max_rows, 0), np.int64)
        self._device = device
        self._sampling: SamplingRows | None = None
        self._watched: list[int] | None = None
        self._adapters: tuple[str, ...] | None = None

    def __len__(self) -> int:
        return len(self.samples)

    def add(self, request: Request, *, keys: np.ndarray, tokenizer: Tokenizer) -> None:
        """Append the N samples of a request; `keys` [N] uint64 determine their random numbers (see `sampler.row_keys`)."""
        params, first = request.params, len(self.samples)
        stop_ids = end_ids(params, tokenizer)
        rows = slice(first, first + request.n)
        prompt_len = len(request.prompt)
        self._reserve(positions=prompt_len + params.max_new_tokens, stop_ids=len(stop_ids))
        self._tokens[rows, :prompt_len] = request.prompt
        self.length[rows] = self._prompt_len[rows] = prompt_len
        self._num_begun[rows] = request.num_begun
        self._limit[rows] = prompt_len + params.max_new_tokens
        self._key[rows] = keys
        self._temperature[rows], self._top_p[rows], self._top_k[rows] = params.temperature, params.top_p, params.top_k
        self._scaled[rows], self._num_top[rows] = params.scaled_logprobs, params.top_logprobs
        self._stop_ids[rows] = NO_TOKEN
        self._stop_ids[rows, : len(stop_ids)] = stop_ids
        self.samples += [
            RunningSample(request, i, text_to_stop(params, tokenizer, begun=request.begun), [] if params.top_logprobs else None)
            for i in range(request.n)]
        if not params.shaping.is_plain:
            words = bad_word_ids(params.shaping.bad_words, tokenizer)
            for sample in self.samples[first:]:
                known = [token for token in request.prompt if token < FIRST_ID]
                sample.shaped = ShapedSample(
                    params, prompt=known, end_ids=stop_ids, bad_words=words, grammar=request.grammar and request.grammar.for_sample())
        self._sampling = self._watched = self._adapters = None

    def _reserve(self, *, positions: int, stop_ids: int) -> None:
        wider = round_up(positions, BUCKET) - self._tokens.shape[1]
        if wider > 0:
            grow = ((0, 0), (0, wider))
            self._tokens, self._logprobs, self._versions = (np.pad(a, grow) for a in (self._tokens, self._logprobs, self._versions))
        wider = stop_ids - self._stop_ids.shape[1]
        if wider > 0:
            self._stop_ids = np.pad(self._stop_ids, ((0, 0), (0, wider)), constant_values=NO_TOKEN)

    def sampling(self) -> SamplingRows:
        """Sampling parameters of all rows, on the device."""
        if self._sampling is None:
            rows = slice(0, len(self))
            wanting = np.array([sample.request.params.supports for sample in self.samples], np.bool_)
            self._sampling = SamplingRows(
                temperature=self._temperature[rows], top_p=self._top_p[rows], top_k=self._top_k[rows], scaled=self._scaled[rows],
                num_top=self._num_top[rows], device=self._device, shaped=self._shaped_rows(),
            )
            self._sampling.report_supports(wanting)
        return self._sampling

    def _shaped_rows(self) -> ShapedRows | None:
        shaped = {row: sample.shaped for row, sample in enumerate(self.samples) if sample.shaped is not None}
        return ShapedRows(list(shaped), list(shaped.values()), device=self._device) if shaped else None

    def trouble(self, row: int) -> str:
        """Return why a row's structure allows no token; empty if it is not the cause."""
        shaped = self.samples[row].shaped
        why = shaped.grammar.trouble if shaped is not None and shaped.grammar is not None else ""
        return why and f"the structure of the answer cannot be kept any further: {why}"

    def watched(self) -> list[int]:
        """Rows that must be inspected after every token: those that stream or have stop strings."""
        if self._watched is None:
            self._watched = [row for row, sample in enumerate(self.samples) if sample.request.stream or sample.text is not None]
        return self._watched

    def adapters(self) -> tuple[str, ...]:
        """[B], the adapter of each row, empty for the base model."""
        if self._adapters is None:
            self._adapters = tuple(sample.request.adapter for sample in self.samples)
        return self._adapters

    def uniforms(self) -> np.ndarray:
        """[B] float64 in [0, 1), the random number of each row's next token."""
        rows = slice(0, len(self))
        return uniforms(self._key[rows], self.length[rows] - self._prompt_len[rows] + self._num_begun[rows])

    def last_tokens(self, rows: int) -> np.ndarray:
        """[N] int64, the input of the next decode step for the first N = `rows` rows."""
        return self._tokens[np.arange(rows), self.length[:rows] - 1]

    def cached_tokens(self, row: int) -> np.ndarray:
        """[L - 1] int64, the tokens of a row of length L whose keys and values are in the cache: all but the last."""
        return self._tokens[row, : self.length[row] - 1]

    def append(self, drawn: Drawn, *, version: Version) -> tuple[np.ndarray, np.ndarray]:
        """Append its new token to every row.

        Returns [B] bool twice: whether the token is one of the row's stop ids or ends its structure, and whether the row is at its limit.
        """
        count = len(self)
        rows, position = np.arange(count), self.length[:count]
        self._tokens[rows, position], self._logprobs[rows, position] = drawn.tokens, drawn.logprobs
        self._versions[rows, position] = version
        self.length[:count] += 1
        if drawn.top_ids is not None and drawn.top_logprobs is not None:
            self._append_top(drawn.top_ids, drawn.top_logprobs)
        if drawn.supports is not None:
            for row, piece in zip(self.sampling().supported.tolist(), drawn.supports.forms_and_words, strict=True):
                self.samples[row].supports.append(piece)
        stopped = (self._stop_ids[:count] == drawn.tokens[:, None]).any(axis=1)
        if (shaped := self.sampling().shaped) is not None:
            shaped.push(drawn.tokens)
            stopped[shaped.ended()] = True
        return stopped, self.length[:count] >= self._limit[:count]

    def _append_top(self, ids: np.ndarray, logprobs: np.ndarray) -> None:
        """Record the most likely tokens, [R, K] each, for the rows that want them; tokens that cannot be drawn are left out."""
        wanting = [sample for sample in self.samples if sample.top is not None]
        for sample, row_ids, row_logprobs in zip(wanting, ids.tolist(), logprobs.tolist(), strict=True):
            assert sample.top is not None, "it wants them"
            pairs = list(zip(row_ids, row_logprobs, strict=True))[: sample.request.params.top_logprobs]
            sample.top.append(tuple(pair for pair in pairs if pair[1] > -np.inf))

    def output(self, row: int, reason: FinishReason | None) -> Output:
        """Generated tokens of a row; for a streaming request, those not sent yet."""
        sample = self.samples[row]
        span = slice(self._prompt_len[row] + sample.sent, self.length[row])
        top = sample.top and sample.top[sample.sent :]
        if sample.request.stream:
            sample.sent = int(self.length[row] - self._prompt_len[row])
        return Output(
            sample.index, *self._of(row, span), finish_reason=reason, top_logprobs=top,
            num_cached=sample.num_cached, supports=Supports.of_pieces(sample.supports) if sample.supports else None)

    def _of(self, row: int, span: slice) -> Iterable[Any]:
        """Yield the tokens, log-probabilities and versions of a row in a span."""
        return (column[row, span].tolist() for column in (self._tokens, self._logprobs, self._versions))

    def running(self, have: Mapping[str, Sequence[int]]) -> dict[str, list[Output]]:
        """Return what the running samples of requests have beyond their first tokens, whose numbers are given by request and sample."""
        found: dict[str, list[Output]] = {name: [] for name in have}
        for row, sample in enumerate(self.samples):
            if (own := found.get(sample.request.id)) is not None and sample.index < len(have[sample.request.id]):
                span = slice(self._prompt_len[row] + have[sample.request.id][sample.index], self.length[row])
                own.append(Output(sample.index, *self._of(row, span), finish_reason=None))
        return found

    def compact(self, sources: list[int], targets: list[int], *, running: int) -> None:
        """Move rows as returned by `Scheduler.compact`, and drop those from `running` on."""
        columns = (self.length, self._prompt_len, self._num_begun, self._limit, self._key, self._temperature, self._top_p, self._top_k)
        for column in (*columns, self._scaled, self._num_top, self._stop_ids, self._tokens, self._logprobs, self._versions):
            column[targets] = column[sources]
        for source, target in zip(sources, targets, strict=True):
            self.samples[target] = self.samples[source]
        del self.samples[running:]
        self._sampling = self._watched = self._adapters = None
