"""Decides when a model is loaded whether its rows run packed or each sequence by itself, and proves the result.

Called once by the trainer's `load_policy`. Families of models differ in ways that no list of ours keeps up with. So a model trains only if
its log-probabilities on a small row equal those of transformers' own forward pass of each sequence.
"""

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from offbeat.data.batch import Batch
from offbeat.data.packing import pack_row
from offbeat.errors import ModelError, first_line
from offbeat.model.attention import ATTENTION_KINDS, PACKED
from offbeat.model.logprobs import UnpackedError, packs_rows, token_logprobs

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.5}
"""Largest mean difference of log-probabilities between a row and each sequence alone; in bfloat16 correct models stay below 0.1."""

_PROMPT, _ANSWERS = 4, (3, 2)


def settle_rows(model: PreTrainedModel, *, share_prefix: bool) -> None:
    """Let a model with plain attention pack its rows if it can, and check the result.

    Args:
        model: a model from `load_causal_lm(attention=None)`; afterwards `packs_rows` tells how its rows run.
        share_prefix: whether rows will share prompts, which requires packing.

    Raises:
        ModelError: it cannot share prompts, or its log-probabilities differ from those of its own forward pass.
    """
    try:
        expected = _alone(model)
        obstacle = _pack(model)
    except ModelError:
        raise
    except _RAW_ERRORS as exc:
        raise ModelError(f"{type(model).__name__} cannot run on a row of tokens: {first_line(exc)}; use another model") from exc
    if obstacle and share_prefix:
        raise ModelError(
            f"{type(model).__name__} {obstacle}, so that each sequence must run by itself; set train.share_prefix to false")
    _compare(model, expected, share_prefix=share_prefix)


_RAW_ERRORS = (RuntimeError, TypeError, ValueError, AttributeError, KeyError, IndexError, NotImplementedError)
"""Errors that a model's own code raises when it is called in a way that its authors did not intend."""


def _pack(model: PreTrainedModel) -> str:
    """Switch to packed attention; if that is impossible, leave the model unchanged and return why, as the end of a sentence about it."""
    layer_types = getattr(model.config.get_text_config(), "layer_types", None) or ()
    if others := sorted(set(layer_types) - ATTENTION_KINDS):
        return f"has {others[0]} layers"
    plain = model.config._attn_implementation or "eager"
    model.set_attn_implementation(PACKED)
    if not packs_rows(model):
        return "computes attention by code of its own"
    try:
        _score(model, share_prefix=True)
    except UnpackedError as exc:
        model.set_attn_implementation(plain)
        return f"lets packed attention reach {exc.num_calls} of its {exc.num_layers} layers"
    return ""


def _compare(model: PreTrainedModel, expected: Tensor, *, share_prefix: bool) -> None:
    error = (_score(model, share_prefix=share_prefix) - expected).abs().mean().item()
    dtype = next(model.parameters()).dtype
    if not error <= TOLERANCE[dtype]:
        raise ModelError(
            f"{type(model).__name__} gives the tokens of a row log-probabilities that are off by {error:.3g} nats on average from those of"
            " each sequence alone; use another model")


@torch.no_grad()
def _score(model: PreTrainedModel, *, share_prefix: bool) -> Tensor:
    lengths = [_PROMPT + answer for answer in _ANSWERS]
    trained = np.concatenate([np.arange(length) >= _PROMPT for length in lengths])
    batch = Batch.of_next_tokens(
        np.concatenate(list(_sequences(model))).astype(np.int32), trained, lengths=lengths, columns={}, losses=(),
        group_ids=np.zeros(len(lengths), np.int64), prefix_lens=np.full(len(lengths), _PROMPT))
    return token_logprobs(model, pack_row(batch, share_prefix=share_prefix))


@torch.no_grad()
def _alone(model: PreTrainedModel) -> Tensor:
    """Compute the same log-probabilities with transformers' plain code in eval mode, one sequence after the other."""
    training, found = model.training, []
    model.eval()
    for tokens in map(torch.from_numpy, _sequences(model)):
        logits = model(input_ids=tokens[None].to(model.device), use_cache=False).logits[0].float().log_softmax(-1)
        found.append(logits[_PROMPT - 1 : -1].gather(1, tokens[_PROMPT:, None].to(model.device))[:, 0])
    model.train(training)
    return torch.cat(found)


def _sequences(model: PreTrainedModel) -> Iterable[np.ndarray]:
    vocab_size = model.config.get_text_config().vocab_size
    for number, answer in enumerate(_ANSWERS):
        answer_ids = 11 + 5 * number + 3 * np.arange(answer)
        yield np.concatenate([2 + 7 * np.arange(_PROMPT), answer_ids]) % vocab_size
