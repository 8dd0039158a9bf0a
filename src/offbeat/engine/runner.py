"""What the engine computes with its model: the logits of running samples, and their caches. Called by `engine.Engine`, between whose steps
the rows change; the runner itself decides nothing.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from offbeat.engine.adapters import Adapters
from offbeat.engine.cache import PromptRows, SlotCache
from offbeat.engine.forward import Forward
from offbeat.engine.request import Request
from offbeat.engine.rows import Rows
from offbeat.engine.scheduler import plan_prefill


class Runner:
    """One model with the cache of the running samples."""

    def __init__(self, forward: Forward, cache: SlotCache, rows: Rows, adapters: Adapters, *, max_prefill_tokens: int) -> None:
        self._forward = forward
        self._cache = cache
        self._rows = rows
        self._adapters = adapters
        self._max_prefill_tokens = max_prefill_tokens

    @torch.inference_mode()
    def next_logits(self, admitted: Sequence[Request]) -> Tensor:
        """Compute the logits of the next token of every row, [B, V]: old rows decode; the last ones, of admitted requests, prefill."""
        counts = [request.n for request in admitted]
        old = len(self._rows) - sum(counts)
        parts = []
        self._adapters.place(self._rows.adapters())
        if old:
            step = self._cache.step(self._rows.length[:old] - 1)
            lora = self._adapters.rows(self._rows.adapters()[:old])
            parts.append(self._forward.decode(self._send(self._rows.last_tokens(old)), step, lora=lora))
        if admitted:
            prompts = np.repeat(np.arange(len(admitted)), counts)
            sequences = [np.array(request.prompt) for request in admitted]
            adapters = [request.adapter for request in admitted]
            logits = self._prefill(sequences, adapters, slots=np.arange(old, len(self._rows)), prompts=prompts)
            parts.append(logits[self._send(prompts)])
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    @torch.inference_mode()
    def recompute(self) -> None:
        """Recompute the cache of all running samples under the live weights."""
        if not self._rows.samples:
            return
        sequences = [self._rows.cached_tokens(row) for row in range(len(self._rows))]
        rows = np.arange(len(sequences))
        self._adapters.place(self._rows.adapters())
        self._prefill(sequences, self._rows.adapters(), slots=rows, prompts=rows)

    def _prefill(self, sequences: list[np.ndarray], adapters: Sequence[str], *, slots: np.ndarray, prompts: np.ndarray) -> Tensor:
        """Write the keys and values of sequence `prompts[i]` to slot `slots[i]`; returns the logits after each sequence, [P, V]."""
        lengths = np.array([len(s) for s in sequences])
        self._cache.reserve(slots=len(self._rows), positions=int(self._rows.length[: len(self._rows)].max()))
        logits: Tensor | None = None
        for chunk in plan_prefill(lengths, max_tokens=self._max_prefill_tokens):
            tokens = np.zeros((len(chunk), lengths[chunk].max()), np.int64)
            for row, i in enumerate(chunk):
                tokens[row, : lengths[i]] = sequences[i]
            place = np.full(len(sequences), -1)
            place[chunk] = np.arange(len(chunk))
            here = place[prompts] >= 0
            rows = PromptRows(self._send(slots[here]), self._send(place[prompts[here]]))
            lora = self._adapters.rows([adapters[int(i)] for i in chunk], repeat=tokens.shape[1])
            new = self._forward.prefill(self._send(tokens), self._send(lengths[chunk]), cache=self._cache, rows=rows, lora=lora)
            if logits is None:
                logits = new.new_empty(len(sequences), new.shape[-1])
            logits[self._send(chunk)] = new
        assert logits is not None, "a prefill has at least one sequence"
        return logits

    def _send(self, array: np.ndarray) -> Tensor:
        """Copy a host array to the model's device, with its dtype."""
        return torch.from_numpy(array).to(self._forward.device)
