"""Draws the next token of every running sample in one batch, with parameters per row. Called by `engine.Engine` once per step.

Tokens are drawn by inverting the cumulative distribution at one uniform number per row: for 256 rows of 49 tokens that is 25 times cheaper
than one exponential number per logit, and the uniform number can be a pure function of (row key, position). So a sample depends on its key
alone, never on the rest of the batch.

Logits are changed in this order: masks, biases and penalties (`shaping`), temperature, min_p, top-k, top-p. The log-probability returned
belongs to the distribution sampled from, after all of them with renormalisation ("as sampled"), or, where a row requests it, to the one
after temperature alone, as the trainer computes it ("as trained"). At temperature 0 (greedy) it is the log-softmax at temperature 1.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from offbeat.data.sample_supports import BITS, KEPT, LEFT_OUT, WORD_BITS, Supports
from offbeat.engine.shaping import ShapedRows
from offbeat.model.uploads import upload

_BLOCKED_FROM = 4096
"""Smallest vocabulary for which tokens are drawn by blocks."""

_BLOCK = 256
"""Number of tokens in a block."""

_IN_CACHE = 1 << 18
"""Number of logits processed at a time, so that they stay in a CPU's cache."""

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


def mix(words: np.ndarray) -> np.ndarray:
    """Finaliser of SplitMix64 on uint64 of any shape, such as [N]: a bijection whose outputs behave like independent random numbers.

    Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
    """
    words = (words ^ (words >> np.uint64(30))) * _MIX[0]
    words = (words ^ (words >> np.uint64(27))) * _MIX[1]
    return words ^ (words >> np.uint64(31))


def row_keys(seed: int, n: int) -> np.ndarray:
    """Return the keys of the N = n samples of one request, [N] uint64; any integer is a valid seed."""
    word = mix(np.array([seed % 2**64], dtype=np.uint64))
    return mix(word + _GOLDEN * np.arange(1, n + 1, dtype=np.uint64))


def uniforms(keys: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return one number in [0, 1) per row, [B] float64, a function of its key [B] uint64 and position [B] integer alone."""
    words = mix(keys + _GOLDEN * (positions.astype(np.uint64) + np.uint64(1)))
    # 52 bits, not 53: the largest value times a total must stay below the total after rounding.
    return (words >> np.uint64(12)) * 2.0**-52


class SamplingRows:
    """Parameters of the rows of a batch; made anew when rows come or go, and used for all steps in between.

    Attributes:
        greedy: [B] bool; None if no row is greedy.
        scale: [B, 1] float32, divisor of the logits; None if it is 1 everywhere.
        shaped: the rows whose logits are masked, biased or penalised; None if there are none.
        restricted: int64 indices of the rows with top-k or top-p; None if there are none.
        top_p, top_k: parameters of the restricted rows, as `restrict` takes them.
        scaled: int64 indices of the shaped and restricted rows that report log-probabilities as trained; None if there are none.
        supported: [R] int64 indices of the shaped and restricted rows that report supports, on the host.
        changes: whether the logits of any row are changed before a token is drawn.
        top: int64 indices of the rows that report most likely tokens; None if there are none.
        num_top: the largest number of most likely tokens that a row requests.
    """

    def __init__(
        self, *, temperature: np.ndarray, top_p: np.ndarray, top_k: np.ndarray, scaled: np.ndarray, num_top: np.ndarray,
        device: torch.device, shaped: ShapedRows | None = None,
    ) -> None:
        """All arrays are [B]. Temperature 0 is greedy; top_p 1 and top_k 0 set no limit; num_top is 0 where nothing is reported."""
        greedy = temperature == 0
        restricted = np.flatnonzero(~greedy & ((top_p < 1) | (top_k > 0)))
        scale = np.where(greedy, 1, temperature).astype(np.float32)
        self.greedy = upload(greedy, device) if greedy.any() else None
        self.scale = upload(scale, device)[:, None] if (scale != 1).any() else None
        self.restricted = upload(restricted, device) if restricted.size else None
        self.top_p = upload(top_p[restricted], device)[:, None]
        self.top_k = upload(top_k[restricted], device)[:, None]
        self.shaped = shaped
        changed = np.union1d(restricted, () if shaped is None else shaped.row_numbers).astype(np.int64)
        self.scaled = upload(changed[scaled[changed]], device) if scaled[changed].any() else None
        self._changed, self.supported = changed, changed[:0]
        self.changes = self.scale is not None or self.restricted is not None or shaped is not None
        self.num_top = int(num_top.max(initial=0))
        self.top = upload(np.flatnonzero(num_top), device) if self.num_top else None

    def report_supports(self, wanted: np.ndarray) -> None:
        """Let those of the rows `wanted` [B] bool report supports whose logits do not allow every token."""
        self.supported = self._changed[wanted[self._changed]]


@dataclass(frozen=True, eq=False)
class Drawn:
    """One token per row.

    Attributes:
        tokens: [B] int64.
        logprobs: [B] float32, log-probabilities of the tokens; the module's docstring says under which distribution.
        valid: [B] bool, False where the logits define no distribution (NaN or infinite), so that the token is meaningless.
        empty: rows whose shaping leaves no token to draw; they are not valid either.
        top_ids, top_logprobs: [R, num_top] int64 and float32, the most likely tokens of the R rows in `SamplingRows.top`, -inf for those
            that cannot be drawn; None where there are no such rows.
        supports: of the rows in `SamplingRows.supported`; None where there are none.
    """

    tokens: np.ndarray
    logprobs: np.ndarray
    valid: np.ndarray
    top_ids: np.ndarray | None = None
    top_logprobs: np.ndarray | None = None
    empty: tuple[int, ...] = ()
    supports: Supports | None = None


def restrict(logits: Tensor, *, top_p: Tensor, top_k: Tensor) -> Tensor:
    """Set the logits outside top-k and top-p to -inf. The most likely token always stays.

    Args:
        logits: [B, V] float32, already divided by the temperature.
        top_p: [B, 1], 1 for no limit. A token stays if the mass of more likely tokens, within top-k, is below top_p.
        top_k: [B, 1], 0 for no limit.
    """
    values, order = logits.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(logits.shape[-1], device=logits.device)
    values = values.masked_fill((rank >= top_k) & (top_k > 0), -torch.inf)
    probs = values.softmax(dim=-1)
    before = probs.cumsum(dim=-1, dtype=torch.float64) - probs
    # A top_p of 1 keeps everything, since rounding may bring the mass before the last tokens to 1.
    values = values.masked_fill((before >= top_p) & (top_p < 1) & (rank > 0), -torch.inf)
    return torch.empty_like(logits).scatter_(1, order, values)


def sample(logits: Tensor, rows: SamplingRows, uniform: np.ndarray) -> Drawn:
    """Draw one token per row. The host waits for the device once, for everything that `Drawn` holds.

    Args:
        logits: [B, V] float, on any device.
        uniform: [B] float64 in [0, 1), see `uniforms`.
    """
    if rows.changes:
        logits = logits.float()
    raw = full = logits
    empty = torch.zeros(len(raw), 1, dtype=torch.float64, device=raw.device)
    if rows.scale is not None:
        full = logits = raw / rows.scale
    if rows.shaped is not None:
        changed, none_left = rows.shaped.change(raw, rows.scale)
        logits = logits.index_copy(0, rows.shaped.rows, changed)
        empty.index_copy_(0, rows.shaped.rows, none_left.double()[:, None])
    if rows.restricted is not None:
        kept = restrict(logits[rows.restricted], top_p=rows.top_p, top_k=rows.top_k)
        logits = logits.index_copy(0, rows.restricted, kept)
    draw = _draw_by_blocks if logits.shape[-1] >= _BLOCKED_FROM else _draw
    tokens, table, normalizer, total = draw(logits, upload(uniform, logits.device)[:, None])
    if rows.greedy is not None:
        tokens = torch.where(rows.greedy[:, None], logits.argmax(dim=-1, keepdim=True), tokens)
    if rows.scaled is not None:
        table = table.index_copy(0, rows.scaled, torch.log_softmax(full[rows.scaled], dim=-1))
        normalizer = normalizer.index_fill(0, rows.scaled, 0.0)
    logprobs = table.gather(1, tokens).float() - normalizer
    drawn = torch.cat([tokens.double(), logprobs.double(), total, empty], dim=1)
    supports = find_supports(logits[upload(rows.supported, logits.device)]) if rows.supported.size else None
    if rows.top is None:
        return replace(_drawn(drawn.cpu().numpy()), supports=supports)
    top = table[rows.top].topk(min(rows.num_top, table.shape[-1]), dim=-1)
    both = torch.stack([top.indices.double(), (top.values.float() - normalizer[rows.top]).double()])
    found = torch.cat([drawn.flatten(), both.flatten()]).cpu().numpy()
    ids, top_logprobs = found[drawn.numel() :].reshape(both.shape)
    return replace(
        _drawn(found[: drawn.numel()].reshape(drawn.shape)), top_ids=ids.astype(np.int64), top_logprobs=top_logprobs.astype(np.float32),
        supports=supports)


def find_supports(logits: Tensor) -> Supports:
    """Return the supports of logits [R, V], which are -inf for tokens that cannot be drawn."""
    num, vocab = logits.shape
    kept = logits > -torch.inf
    num_kept = kept.sum(dim=-1).cpu().numpy()
    num_words = -(-vocab // WORD_BITS)
    forms = np.where(num_kept <= num_words, KEPT, BITS)
    forms[vocab - num_kept <= np.minimum(num_kept, num_words)] = LEFT_OUT
    pieces: list[np.ndarray] = [np.zeros(0, np.int32)] * num
    listed, bits = np.flatnonzero(forms != BITS), np.flatnonzero(forms == BITS)
    if listed.size:
        inverted = upload(forms[listed] == LEFT_OUT, logits.device)[:, None]
        ids = (kept[upload(listed, logits.device)] ^ inverted).nonzero()[:, 1].int().cpu().numpy()
        ends = np.cumsum(np.where(forms == KEPT, num_kept, vocab - num_kept)[listed])
        for row, words in zip(listed.tolist(), np.split(ids, ends[:-1]), strict=True):
            pieces[row] = words
    if bits.size:
        padded = torch.nn.functional.pad(kept[upload(bits, logits.device)], (0, num_words * WORD_BITS - vocab)).unflatten(1, (-1, 8))
        weights = 1 << torch.arange(8, device=logits.device)
        for row, words in zip(bits.tolist(), (padded * weights).sum(dim=-1).to(torch.uint8).cpu().numpy(), strict=True):
            pieces[row] = words.view("<i4").astype(np.int32, copy=False)
    return Supports.of_pieces(list(zip(forms.tolist(), pieces, strict=True)))


def _drawn(columns: np.ndarray) -> Drawn:
    """Return the tokens drawn, from [B, 4] float64: tokens, log-probabilities, totals and whether no token was left."""
    tokens, logprobs, total, empty = columns.T
    return Drawn(tokens.astype(np.int64), logprobs.astype(np.float32), np.isfinite(total), empty=tuple(np.flatnonzero(empty).tolist()))


def _draw(logits: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Invert each row's cumulative distribution.

    Args:
        logits: [B, V] float.
        uniform: [B, 1] float64.

    Returns:
        tokens: [B, 1] int64, meaningless where there is no distribution.
        table: [B, V] float, unnormalised log-probabilities of all tokens.
        normalizer: [B, 1] float32, to be subtracted from `table`.
        total: [B, 1] float64, not finite where there is no distribution.
    """
    logprobs = torch.log_softmax(logits, dim=-1, dtype=torch.float32)
    cumulative = logprobs.exp().cumsum(dim=-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    # Take the first entry above the target, whose own probability cannot be 0. Without a distribution there may be none: clamp the index.
    tokens = torch.searchsorted(cumulative, uniform * total, right=True).clamp_(max=logits.shape[-1] - 1)
    return tokens, logprobs, logprobs.new_zeros(len(logprobs), 1), total


def _draw_by_blocks(logits: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Do as `_draw` for a large vocabulary [B, V]: draw a block of tokens, then a token in it, which shortens cumulative sums."""
    num, vocab = logits.shape
    num_blocks = -(-vocab // _BLOCK)
    largest, masses = torch.empty(num, 1, device=logits.device), torch.empty(num, num_blocks, device=logits.device)
    step = max(1, _IN_CACHE // vocab) if logits.device.type == "cpu" else num
    weights = masses.new_zeros(min(step, num), num_blocks * _BLOCK)  # of a few rows at a time, which stay in the cache
    for some, top, mass in zip(logits.split(step), largest.split(step), masses.split(step), strict=True):
        some = some.float()
        torch.amax(some, dim=-1, keepdim=True, out=top)
        torch.sub(some, top, out=weights[: len(some), :vocab]).exp_()
        torch.sum(weights[: len(some)].unflatten(1, (-1, _BLOCK)), dim=-1, out=mass)
    cumulative = masses.cumsum(dim=-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    target = uniform * total
    block = torch.searchsorted(cumulative, target, right=True).clamp_(max=num_blocks - 1)
    after = cumulative.gather(1, block)
    before = torch.where(block > 0, cumulative.gather(1, (block - 1).clamp_(min=0)), 0.0)
    members = block * _BLOCK + torch.arange(_BLOCK, device=logits.device)
    chosen = (logits.gather(1, members.clamp(max=vocab - 1)).float() - largest).exp_().masked_fill_(members >= vocab, 0.0)
    within = chosen.cumsum(dim=-1, dtype=torch.float64)
    # Rescale to the block's own sum, which rounds differently from its share in the row, and stay strictly below it, so that the token has
    # a positive probability.
    mass = within[:, -1:]
    target = torch.minimum((target - before) / (after - before) * mass, torch.nextafter(mass, torch.zeros_like(mass)))
    inside = torch.searchsorted(within, target, right=True)
    tokens = (block * _BLOCK + inside).clamp_(max=vocab - 1)
    return tokens, logits, largest + total.log().float(), total
