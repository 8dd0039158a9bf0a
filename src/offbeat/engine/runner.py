"""Computes the logits of running samples, and their caches. Called by `engine.Engine`, between whose steps the rows change; the runner
itself decides nothing.
"""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from offbeat.data.image_store import FIRST_ID
from offbeat.engine.adapters import EngineAdapters
from offbeat.engine.cache import SlotCache
from offbeat.engine.forward import Forward
from offbeat.engine.prefixes import Begun, PrefixCache
from offbeat.engine.request import Request
from offbeat.engine.rows import Rows
from offbeat.engine.scheduler import PromptPart, RoundPrompts, plan_prefill
from offbeat.errors import RefusedError
from offbeat.model.images import has_images
from offbeat.model.uploads import upload


class Runner:
    """One model with the cache of the running samples, and kept prefixes of samples that ended.

    Attributes:
        prefixes: beginnings of prompts that need not be computed again.
        num_cached_tokens: number of prompt tokens found there since the start.
    """

    def __init__(
        self, forward: Forward, cache: SlotCache, rows: Rows, adapters: EngineAdapters, *, prefixes: PrefixCache, max_prefill_tokens: int
    ) -> None:
        self.prefixes = prefixes
        self.num_cached_tokens = 0
        self._forward = forward
        self._cache = cache
        self._rows = rows
        self._adapters = adapters
        self._max_prefill_tokens = max_prefill_tokens
        self._num_known_of_begun = 0  # fewer than were planned where room for its slot has dropped prefixes

    def check(self, request: Request) -> None:
        """Raise RefusedError if a request wants routes, and the model gives none."""
        if request.params.routes and not self._cache.shape.num_routes:
            raise RefusedError(
                "return_routed_experts needs a model whose routers tell the experts that they choose, and this one has none; leave it out")

    def num_known(self, request: Request) -> int:
        (owner,) = self._adapters.of([request.adapter])
        return self.prefixes.find_beginning(owner, np.array(request.prompt)).num_tokens

    def end_of_part(self, request: Request, stop: int) -> int:
        prompt = request.prompt
        while self._forward.sees_whole and stop < len(prompt) and prompt[stop] == prompt[stop - 1] >= FIRST_ID:
            stop += 1
        return stop

    @torch.inference_mode()
    def next_logits(self, prompts: RoundPrompts) -> Tensor | None:
        """Compute the logits of the next token of every row, [B, V]: old rows decode; the last ones, of requests that start, prefill.

        A part of a prompt is stored in the slot after all rows, and gives no logits; None if there is nothing else.
        """
        part, begun = prompts.part, prompts.begun
        old = len(self._rows) - sum(request.n for request in prompts.requests)
        self._cache.likely = prompts.likely
        self._adapters.place([*self._rows.adapters(), *([part.request.adapter] if part else [])])
        if (stored := part or begun) is not None:  # its slot must stay when the cache grows for the rows before it
            self._reserve(slots=old + 1, positions=stored.stop)
        logits = [self._decode_rows(old)] if old else []
        if part is not None:
            tokens, begun_at = np.array(part.request.prompt[: part.stop]), part.start if part.start > part.known else 0
            _, known = self._prefill([tokens], [part.request.adapter], slots=np.array([old]), begun=begun_at)
            if not begun_at:
                self._num_known_of_begun = int(known[0])
        if prompts.requests:
            logits.append(self._start_requests(prompts.requests, begun, old))
        return torch.cat(logits) if len(logits) > 1 else next(iter(logits), None)

    def _decode_rows(self, count: int) -> Tensor:
        """Decode the first rows; returns their logits [count, V]."""
        step = self._cache.step(self._rows.length[:count] - 1)
        lora = self._adapters.rows(self._rows.adapters()[:count])
        shifts = np.array([sample.shift for sample in self._rows.samples[:count]]) if self._forward.reads_images else None
        return self._forward.decode(self._send(self._rows.last_tokens(count)), step, lora=lora, shifts=shifts)

    def _start_requests(self, requests: Sequence[Request], begun: PromptPart | None, old: int) -> Tensor:
        """Prefill requests whose rows are those from `old` on; the first of them may be begun. Returns the rows' logits [N, V]."""
        counts = [request.n for request in requests]
        first = old + np.cumsum([0, *counts[:-1]])
        sequences = [np.array(request.prompt) for request in requests]
        logits, known = self._prefill(
            sequences, [request.adapter for request in requests], slots=first, begun=0 if begun is None else begun.stop)
        if begun is not None:
            known[0] = self._num_known_of_begun
        self.num_cached_tokens += int(known.sum())
        repeats = np.arange(old, len(self._rows))
        prompts = np.repeat(np.arange(len(requests)), counts)
        shifts = [self._forward.shift_of(sequence) if self._forward.reads_images else 0 for sequence in sequences]
        for sample, num_cached, prompt in zip(self._rows.samples[old:], known[prompts].tolist(), prompts.tolist(), strict=True):
            sample.num_cached, sample.shift = num_cached, shifts[prompt]
        copies = repeats != first[prompts]
        self._cache.move(first[prompts][copies].tolist(), repeats[copies].tolist(), positions=max(map(len, sequences)))
        return logits[self._send(prompts)]

    def new_weights(self, *, recompute: bool) -> None:
        """Forget the prefixes of earlier weights, and with `recompute` compute the cache of all running samples again."""
        self.prefixes.release()
        if recompute:
            if self._cache.slots:  # a sleep has kept them
                self.keep_routes()
            self.recompute()
        else:
            for sample in self._rows.samples:
                sample.mixed = True

    @torch.inference_mode()
    def routes_of(self, row: int) -> np.ndarray | None:
        """Return the routes of a row's tokens but the last, [L - 1, num_routes], each as when the next was sampled; None if unwanted."""
        sample = self._rows.samples[row]
        if not sample.request.params.routes:
            return None
        length, kept = len(self._rows.cached_tokens(row)), sample.routes
        first = 0 if kept is None else len(kept)
        new = self._cache.routes()[row, first:length].cpu().numpy()
        return new.copy() if kept is None else np.concatenate([kept, new])

    def keep_routes(self) -> None:
        """Keep the routes of running samples, before their cache is dropped or computed again under other weights."""
        for row, sample in enumerate(self._rows.samples):
            sample.routes = self.routes_of(row)

    @torch.inference_mode()
    def recompute(self) -> None:
        """Recompute the cache of all running samples under the live weights."""
        if not self._rows.samples:
            return
        sequences = [self._rows.cached_tokens(row) for row in range(len(self._rows))]
        self._adapters.place(self._rows.adapters())
        self._prefill(sequences, self._rows.adapters(), slots=np.arange(len(sequences)))
        for sample in self._rows.samples:
            sample.mixed = False

    @torch.inference_mode()
    def keep(self, rows: Sequence[int]) -> None:
        """Keep the cache of rows that end, for prompts that go on from their answers. A request of several samples is no turn of a chat."""
        ended = [row for row in rows if self._rows.samples[row].request.n == 1 and not self._rows.samples[row].mixed]
        owners = self._adapters.of(self._rows.adapters()[row] for row in ended)
        self.prefixes.store(zip(owners, map(self._rows.cached_tokens, ended), ended, strict=True), self._cache)

    def _prefill(
        self, sequences: list[np.ndarray], adapters: Sequence[str], *, slots: np.ndarray, begun: int = 0
    ) -> tuple[Tensor, np.ndarray]:
        """Write the keys and values of each sequence to its slot, of which that of the first holds `begun` tokens already.

        Sequences that begin alike wait for the first of them, and go on from its keys and values. Returned are the logits after each
        sequence, [P, V], and the number of its tokens that were known, [P] int64.
        """
        lengths = np.array([len(s) for s in sequences])
        owners = self._adapters.of(adapters)
        self._reserve(slots=int(slots.max()) + 1, positions=int(lengths.max()))
        starts = np.zeros_like(lengths)
        logits: Tensor | None = None
        waiting = list(range(len(sequences)))
        while waiting:
            found = {i: self.prefixes.find_beginning(owners[i], sequences[i]) for i in waiting}
            now, waiting = _first_of_their_kind(found)
            ready = {0: begun} if begun and 0 in now else {}
            self.prefixes.load(((int(slots[i]), found[i]) for i in now if i not in ready), self._cache)
            starts[now] = [ready.get(i, found[i].num_tokens) for i in now]
            for chunk in self._chunks(np.array(now), lengths, starts):
                new = self._compute(chunk, sequences, adapters, slots=slots, starts=starts)
                if logits is None:
                    logits = new.new_empty(len(sequences), new.shape[-1])
                logits[self._send(chunk)] = new
            self.prefixes.store(((owners[i], sequences[i], int(slots[i])) for i in now), self._cache)
        assert logits is not None, "a prefill has at least one sequence"
        return logits, starts

    def _reserve(self, *, slots: int, positions: int) -> None:
        """Make room in the cache for these slots and positions beside all rows."""
        longest = int(self._rows.length[: len(self._rows)].max(initial=0))
        self._cache.reserve(slots=max(slots, len(self._rows)), positions=max(positions, longest))

    def _chunks(self, which: np.ndarray, lengths: np.ndarray, starts: np.ndarray) -> Iterable[np.ndarray]:
        """Split the sequences at `which` [N] into batches; those without a known prefix need no mask and no copy of cached positions."""
        known = starts[which] > 0
        for part in (which[~known], which[known]):
            for chunk in plan_prefill(lengths[part] - starts[part], max_tokens=self._max_prefill_tokens):
                yield part[chunk]

    def _compute(
        self, chunk: np.ndarray, sequences: list[np.ndarray], adapters: Sequence[str], *, slots: np.ndarray, starts: np.ndarray
    ) -> Tensor:
        """Compute the unknown rest of a batch of sequences; returns the logits after each, [N, V]."""
        rests = [sequences[i][starts[i] :] for i in chunk]
        lengths = np.array([len(rest) for rest in rests])
        tokens = np.zeros((len(chunk), lengths.max()), np.int64)
        for row, rest in enumerate(rests):
            tokens[row, : len(rest)] = rest
        step = self._cache.prefill(slots[chunk], starts=starts[chunk], lengths=lengths)
        lora = self._adapters.rows([adapters[int(i)] for i in chunk], repeat=tokens.shape[1])
        images = self._forward.reads_images and any(map(has_images, (sequences[i] for i in chunk)))
        whole = [sequences[i] for i in chunk] if images else None
        return self._forward.prefill(self._send(tokens), step, lora=lora, sequences=whole)

    def _send(self, array: np.ndarray) -> Tensor:
        return upload(array, self._forward.device)


def _first_of_their_kind(begun: Mapping[int, Begun]) -> tuple[list[int], list[int]]:
    """Split prompts into those to compute now, each with a different next block, and those that can then begin with one of these blocks."""
    now, later, coming = [], [], set()
    for i, known in begun.items():
        (later if known.next in coming else now).append(i)
        if known.next is not None:
            coming.add(known.next)
    return now, later
