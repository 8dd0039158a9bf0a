"""Applies `Shaping` to the logits of samples: masks, biases, penalties, min_p. Used by `rows` and `sampler`.

`ShapedSample` follows the tokens of one sample; `ShapedRows` holds the samples of a batch, made anew when rows come or go. A batch without
such samples has no `ShapedRows`. The numbers of a row depend on its own tokens alone. Memory per sample grows with the distinct tokens
that are penalised, not with the vocabulary; allowed tokens and biases are shared by the samples of a request.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from offbeat.data.tokenizer import Tokenizer
from offbeat.engine.request import SamplingParams
from offbeat.engine.structure import Grammar
from offbeat.model.uploads import upload

_NO_IDS = np.zeros(0, np.int64)


def bad_word_ids(words: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Return the tokens of each word, after other text and after a space; none of one with a character that the tokenizer lacks."""
    known = [before + word for word in words if not tokenizer.unknown_in(word) for before in ("", " ")]
    written = [tuple(tokenizer.encode_continuation(word)) for word in known]
    return tuple(dict.fromkeys(ids for ids in written if ids and tokenizer.unknown_id not in ids))


class TokenCounts:
    """Counts of the tokens in a growing sample; tokens of the prompt are known with a count of 0."""

    def __init__(self, prompt: Sequence[int]) -> None:
        known = np.unique(np.array(prompt, np.int64))
        self._num = len(known)
        self._ids = np.concatenate([known, np.zeros(max(64, self._num), np.int64)])
        self._counts = np.zeros(len(self._ids), np.float32)
        self._place = {token: place for place, token in enumerate(known.tolist())}

    @property
    def ids(self) -> np.ndarray:
        """[U] int64, the tokens seen."""
        return self._ids[: self._num]

    @property
    def counts(self) -> np.ndarray:
        """[U] float32, how often the sample holds each."""
        return self._counts[: self._num]

    def add(self, token: int) -> None:
        place = self._place.setdefault(token, self._num)
        if place == self._num:
            if place == len(self._ids):
                self._ids, self._counts = (np.pad(column, (0, place)) for column in (self._ids, self._counts))
            self._ids[place] = token
            self._num += 1
        self._counts[place] += 1


class ShapedSample:
    """The shaping of one sample, as its tokens come.

    Attributes:
        min_p: as in `shaping`, 0 for a greedy sample, whose token it does not change.
        grammar: the place of the sample in its structure; None without one.
        seen: the tokens that penalties apply to; None without penalties.
        bans: whether tokens may be banned because of earlier ones, such as the last token of a bad word.
    """

    def __init__(
        self, params: SamplingParams, *, prompt: Sequence[int], end_ids: Sequence[int], bad_words: tuple[tuple[int, ...], ...] = (),
        grammar: Grammar | None = None,
    ) -> None:
        """`prompt` are the prompt's tokens, and `end_ids` those that end the sample, which `min_tokens` holds off.

        `bad_words` are tokens of `bad_word_ids`, and the grammar is of this sample alone, at the beginning of its text.
        """
        self.grammar = grammar
        self.shaping = shaping = params.shaping
        self.min_p = shaping.min_p if params.temperature else 0.0
        self._bad_words = bad_words
        self._end_ids = tuple(end_ids)
        self._num = 0
        self._last: list[int] = []
        self._longest = max(map(len, bad_words), default=1) - 1
        self.bans = bool(bad_words or shaping.min_tokens)
        repeats = shaping.repetition_penalty != 1
        penalised = repeats or shaping.presence_penalty or shaping.frequency_penalty
        self.seen = TokenCounts(prompt if repeats else ()) if penalised else None

    def push(self, token: int) -> None:
        self._num += 1
        if self.grammar is not None:
            self.grammar.push(token)
        if self.seen is not None:
            self.seen.add(token)
        if self._longest:
            self._last = [*self._last, token][-self._longest :]

    def banned(self) -> list[int]:
        """Return the tokens that must not come next: the last ones of bad words, and end tokens while the sample is too short."""
        last = [ids[-1] for ids in self._bad_words if len(ids) == 1 or tuple(self._last[len(self._last) - len(ids) + 1 :]) == ids[:-1]]
        return [*last, *self._end_ids] if self._num < self.shaping.min_tokens else last


class ShapedRows:
    """The shaped samples of a batch; `row_numbers` [S] int64, ascending, are their rows in it, and `rows` the same on the device."""

    def __init__(self, rows: Sequence[int], samples: Sequence[ShapedSample], *, device: torch.device) -> None:
        """`rows` [S] ascending are the rows of `samples` in the batch."""
        self._rows = rows
        self.row_numbers = np.array(rows, np.int64)
        self.rows = upload(self.row_numbers, device)
        self._samples = samples
        self._device = device
        settings = [sample.shaping for sample in samples]
        self._structured = [(at, sample.grammar) for at, sample in enumerate(samples) if sample.grammar is not None]
        self._allowed = [(at, self._send(np.array(s.allowed_token_ids))) for at, s in enumerate(settings) if s.allowed_token_ids]
        biases = [(at, token, bias) for at, s in enumerate(settings) for token, bias in s.logit_bias]
        places, tokens, values = zip(*biases, strict=True) if biases else ((), (), ())
        self._biased = (self._send(np.array(places, np.int64)), self._send(np.array(tokens, np.int64))) if biases else None
        self._bias = self._send(np.array(values, np.float32))
        self._penalised = [at for at, sample in enumerate(samples) if sample.seen is not None]
        columns = ((s.repetition_penalty, s.frequency_penalty, s.presence_penalty) for s in settings)
        self._penalties = np.array(list(columns), np.float32)
        self._banning = [at for at, sample in enumerate(samples) if sample.bans]
        floors = np.array([math.log(sample.min_p) if sample.min_p else -math.inf for sample in samples], np.float32)
        self._floor = self._send(floors)[:, None] if np.isfinite(floors).any() else None

    def push(self, tokens: np.ndarray) -> None:
        """Add the batch's new tokens [B] to the samples."""
        for row, sample in zip(self._rows, self._samples, strict=True):
            sample.push(int(tokens[row]))

    def ended(self) -> list[int]:
        """Return the rows of the batch whose structure has ended."""
        return [self._rows[at] for at, grammar in self._structured if grammar.ended]

    def change(self, logits: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the logits [S, V] float32 of the shaped rows, changed and divided by the temperature, and [S] bool, those without a token.

        The logits [B, V] float32 that the model gave stay as they are. `scale` [B, 1] float32 are the temperatures; None where all are 1.
        """
        changed = logits[self.rows]  # a copy
        self._mask(changed)
        if self._biased is not None:
            changed.index_put_(self._biased, self._bias, accumulate=True)
        if self._penalised:
            self._penalise(changed)
        if scale is not None:
            changed /= scale[self.rows]
        most = changed.amax(dim=-1, keepdim=True)
        if self._floor is not None:
            changed.masked_fill_(changed < most + self._floor, -torch.inf)
        return changed, most.isneginf().flatten()

    def _mask(self, logits: Tensor) -> None:
        """Set the logits [S, V] of tokens that must not be drawn to -inf."""
        if self._structured:
            allowed = self._send(np.stack([grammar.allowed(logits.shape[1]) for _, grammar in self._structured]))
            places = self._send(np.array([at for at, _ in self._structured]))
            logits[places] = logits[places].masked_fill(~allowed, -torch.inf)
        for at, ids in self._allowed:
            kept = logits[at, ids]
            logits[at] = -torch.inf
            logits[at, ids] = kept
        banned = [(at, token) for at in self._banning for token in self._samples[at].banned() if token < logits.shape[1]]
        if banned:
            places, tokens = self._send(np.array(banned, np.int64).T)
            logits[places, tokens] = -torch.inf

    def _penalise(self, logits: Tensor) -> None:
        """Apply the penalties of all rows to the logits [S, V] of the tokens that each has seen."""
        seen = [(at, counts) for at in self._penalised if (counts := self._samples[at].seen) is not None]
        places = np.repeat([at for at, _ in seen], [len(counts.ids) for _, counts in seen])
        ids = np.concatenate([_NO_IDS, *(counts.ids for _, counts in seen)])
        if not ids.size:
            return
        counts = self._send(np.concatenate([each.counts for _, each in seen]))
        repetition, frequency, presence = self._send(self._penalties[places].T.copy())
        flat, at = logits.view(-1), self._send(places * logits.shape[1] + ids)
        values = flat.index_select(0, at)
        values = torch.where(values > 0, values / repetition, values * repetition)
        flat.index_copy_(0, at, values - frequency * counts - presence * (counts > 0))

    def _send(self, array: np.ndarray) -> Tensor:
        return upload(array, self._device)
