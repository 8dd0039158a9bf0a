"""Decides when a model is loaded whether its rows run packed or each sequence by itself, and whether ranks share them; proves the result.

`settle_rows` is called once by the trainer's `load_policy`, and `spread_rows` where a group of ranks runs each row together. Families of
models differ in ways that no list of ours keeps up with. So a model trains only if its log-probabilities on a small row equal the
results of transformers' own forward pass of each sequence.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from offbeat.data.batch import Batch, SharedPrompts
from offbeat.data.packing import PackedRow, pack_row
from offbeat.errors import ModelError, first_line
from offbeat.model.attention import ATTENTION_KINDS, PACKED
from offbeat.model.context import ContextGroup, share_of, spread
from offbeat.model.divided_read import WholeOnlyError
from offbeat.model.images import language_attention
from offbeat.model.logprobs import UnpackedError, head_outputs, packs_rows, scored_positions, token_logprobs
from offbeat.model.values import ValueHead

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.5}
"""Largest mean difference of log-probabilities between a row and each sequence alone; in bfloat16 correct models stay below 0.1."""

STATE_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""Largest error of states that reach a value model's head, as a share of their norm."""

SPREAD_TOLERANCE = 0.1
"""Largest error of the states of a spread row's tokens, as a share of their norm: above the error of bfloat16 in many layers, and below the
error of tokens with a wrong context."""

_PROMPT, _ANSWERS = 4, (3, 2)


def settle_rows(model: PreTrainedModel, *, share_prefix: bool, computes: torch.dtype | None = None) -> None:
    """Let a model with plain attention pack its rows if it can, and check the result.

    Args:
        model: a model from `load_causal_lm(attention=None)`; afterwards `packs_rows` tells how its rows run. With a value head, the states
            that reach the head are compared.
        share_prefix: whether rows will share prompts, which requires packing.
        computes: the format in which its layers compute, where that is not the format of its weights.

    Raises:
        ModelError: it cannot share prompts, or its log-probabilities differ from its own forward pass.
        WholeOnlyError: it has a value head and cannot pack its rows, so that it is to be settled with the head that it was loaded with.
    """
    try:
        expected = _alone(model)
        obstacle = _pack(model)
    except ModelError:
        raise
    except RAW_ERRORS as exc:
        raise ModelError(f"{type(model).__name__} cannot run on a row of tokens: {first_line(exc)}; use another model") from exc
    if obstacle and share_prefix:
        raise ModelError(f"{type(model).__name__} {obstacle}, so that each sequence must run by itself; set train.share_prefix to false")
    if obstacle and _gives_values(model):
        raise WholeOnlyError(obstacle)
    check_rows(model, probe(model, share_prefix=share_prefix), expected, computes=computes)


def spread_rows(model: nn.Module, context: ContextGroup) -> None:
    """Let the ranks of a group run each row of a model together, and check the result; collective.

    The model, bare or wrapped, has been through `settle_rows` with the same weights on all ranks, and is on its device.

    Raises:
        ModelError: its sequences run one by one, its heads cannot be divided among the ranks, or the states of its tokens would differ; on
            all ranks alike.
    """
    bare = _bare(model)
    if not packs_rows(bare):
        raise ModelError(
            f"{type(bare).__name__} runs each sequence by itself, so that no row can be spread over ranks; set train.parallel.cp to 1")
    expected = score_states(model)
    spread(bare, context)
    error = ((score_states(model) - expected).norm() / expected.norm()).item()
    if not error <= SPREAD_TOLERANCE:
        raise ModelError(
            f"{type(bare).__name__} gives the tokens of a row that is spread over {context.size} ranks other states, by {error:.1%} of"
            " their norm; set train.parallel.cp to 1")


RAW_ERRORS = (RuntimeError, TypeError, ValueError, AttributeError, KeyError, IndexError, NotImplementedError)
"""Errors that a model's own code raises when it is called in a way that its authors did not intend."""


def _pack(model: PreTrainedModel) -> str:
    """Switch to packed attention; if that is impossible, leave the model unchanged and return why, as the end of a sentence about it."""
    layer_types = getattr(model.config.get_text_config(), "layer_types", None) or ()
    if others := sorted(set(layer_types) - ATTENTION_KINDS):
        return f"has {others[0]} layers"
    plain = model.config._attn_implementation or "eager"
    model.set_attn_implementation(language_attention(model.config, PACKED))
    if not packs_rows(model):
        return "computes attention by code of its own"
    try:
        probe(model, share_prefix=True)
    except UnpackedError as exc:
        model.set_attn_implementation(language_attention(model.config, plain))
        return f"lets packed attention reach {exc.num_calls} of its {exc.num_layers} layers"
    return ""


def check_rows(
    model: PreTrainedModel, found: Tensor, expected: Tensor, *, what: str = "of a row", computes: torch.dtype | None = None,
) -> None:
    """Check the result of `probe`, and raise ModelError if it differs by more than rounding; `what` says how the tokens run now.

    Both results are [N] float32 log-probabilities, or [N, H] float32 states, which may be on different devices. `computes` is as for
    `settle_rows`.
    """
    found, expected, dtype = found.cpu(), expected.cpu(), computes or next(model.parameters()).dtype
    if found.dim() == 2:
        error, bound = ((found - expected).norm() / expected.norm()).item(), STATE_TOLERANCE[dtype]
        off = f"states that are off by {error:.1%} of their norm"
    else:
        error, bound = (found - expected).abs().mean().item(), TOLERANCE[dtype]
        off = f"log-probabilities that are off by {error:.3g} nats on average"
    if not error <= bound:
        raise ModelError(f"{type(model).__name__} gives the tokens {what} {off} from those of each sequence alone; use another model")


def probe(model: PreTrainedModel, *, share_prefix: bool = False) -> Tensor:
    """Return a result that must not depend on how a model runs.

    It is the log-probabilities of the answers in `small_row`, [5] float32, or `score_states` [5, H] of a value model.
    """
    if _gives_values(model):
        return score_states(model, share_prefix=share_prefix)
    with torch.no_grad():
        return token_logprobs(model, small_row(model, share_prefix=share_prefix))


@torch.no_grad()
def score_states(model: nn.Module, *, share_prefix: bool = True) -> Tensor:
    """Return the states that reach the model's head where the answers in `small_row` are predicted, [5, H] float32."""
    share = share_of(model, small_row(_bare(model), share_prefix=share_prefix))
    source, inverse = np.unique(share.source, return_inverse=True)
    with _states(_bare(model)) as seen:
        head_outputs(model, share, positions := scored_positions(source))
    states = seen[-1] if len(seen[-1]) == len(positions) else seen[-1][positions]  # some models run the head on the whole row
    return share.gather(states[inverse].float())


@contextmanager
def _states(model: Any) -> Iterator[list[Tensor]]:
    """Collect the states [T, H] that reach a model's head, of the first sequence of each forward pass."""
    seen: list[Tensor] = []
    handle = model.get_output_embeddings().register_forward_pre_hook(lambda _head, inputs: seen.append(inputs[0][0]))
    try:
        yield seen
    finally:
        handle.remove()


def _gives_values(model: PreTrainedModel) -> bool:
    return isinstance(model.get_output_embeddings(), ValueHead)


def small_row(model: PreTrainedModel, *, share_prefix: bool = False) -> PackedRow:
    """Return a row of two fixed sequences with five targets."""
    lengths = [_PROMPT + answer for answer in _ANSWERS]
    trained = np.concatenate([np.arange(length) >= _PROMPT for length in lengths])
    batch = Batch.of_next_tokens(
        np.concatenate(list(_sequences(model))).astype(np.int32), trained, lengths=lengths, columns={}, losses=(),
        shared=SharedPrompts(np.zeros(len(lengths), np.int64), np.full(len(lengths), _PROMPT)))
    return pack_row(batch, share_prefix=share_prefix)


@torch.no_grad()
def _alone(model: PreTrainedModel) -> Tensor:
    """Compute `probe` with transformers' plain code in eval mode, one sequence after the other: [N], or states [N, H]."""
    training, found = model.training, []
    model.eval()
    for tokens in map(torch.from_numpy, _sequences(model)):
        with _states(model) if _gives_values(model) else nullcontext([]) as seen:
            logits = model(input_ids=tokens[None].to(model.device), use_cache=False).logits[0]
        if seen:
            found.append(seen[0][_PROMPT - 1 : -1].float())
        else:
            found.append(logits.float().log_softmax(-1)[_PROMPT - 1 : -1].gather(1, tokens[_PROMPT:, None].to(model.device))[:, 0])
    model.train(training)
    return torch.cat(found)


def _sequences(model: PreTrainedModel) -> Iterable[np.ndarray]:
    vocab_size = model.config.get_text_config().vocab_size
    for number, answer in enumerate(_ANSWERS):
        answer_ids = 11 + 5 * number + 3 * np.arange(answer)
        yield np.concatenate([2 + 7 * np.arange(_PROMPT), answer_ids]) % vocab_size


def _bare(model: nn.Module) -> Any:
    return getattr(model, "module", model)
