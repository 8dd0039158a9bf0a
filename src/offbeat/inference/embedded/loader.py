"""Builds an engine from its options: model, forward path, tokenizer. Called by the server and by in-process users."""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from offbeat.data.tokenizer import load_tokenizer
from offbeat.dist.platform import current_platform
from offbeat.errors import ModelError
from offbeat.inference.embedded.engine import Engine
from offbeat.inference.embedded.forward import Forward, check_forward
from offbeat.inference.embedded.forward_direct import DirectForward, supports
from offbeat.inference.embedded.forward_hf import HFForward
from offbeat.inference.embedded.options import EngineOptions
from offbeat.model.load import load_causal_lm

AGREEMENT = {torch.float32: 1e-3, torch.bfloat16: 0.5}
"""Largest mean difference of a log-probability between a forward path and transformers' own; in bfloat16 correct ones stay below 0.1."""

_TOKENS = torch.arange(3, 35, 3)


def load_engine(options: EngineOptions) -> Engine:
    """Load everything and check that decoding agrees with a full forward.

    Raises:
        ModelError: the model or tokenizer cannot be used, or not with the forward path asked for.
    """
    tokenizer = load_tokenizer(options.tokenizer or options.model)
    return Engine(load_forward(options), tokenizer, options)


@torch.inference_mode()
def load_forward(options: EngineOptions) -> Forward:
    """The forward path for a model on this process's device, checked.

    Raises:
        ModelError: the model cannot be loaded, or the path does not compute what transformers' own code does.
    """
    model = load_causal_lm(options.model, dtype=options.dtype, attention=None)
    place: dict[str, Any] = {"dtype": getattr(torch, options.dtype), "device": current_platform.device}
    expected = _logprobs(model(input_ids=_tokens(model)[None], use_cache=False).logits[0], model)
    direct = supports(model.config)
    if options.forward == "direct" and not direct:
        raise ModelError(
            f"the direct forward does not compute {options.model} (model type {model.config.model_type!r}); use forward = auto or hf"
        )
    if direct and options.forward != "hf":
        forward: Forward = DirectForward(model.config, {n: p.detach() for n, p in model.named_parameters()}, **place)
    else:
        forward = HFForward(model, **place)
    check_forward(forward)
    _check_agrees(forward, expected, model)
    return forward


def _check_agrees(forward: Forward, expected: Tensor, model: PreTrainedModel) -> None:
    got = _logprobs(torch.cat(list(forward.score(_tokens(model)[None].to(forward.device)))).cpu(), model)
    error = (got - expected).abs().mean().item()
    if not error <= AGREEMENT[forward.cache_shape.dtype]:
        raise ModelError(
            f"the embedded engine's log-probabilities of {type(model).__name__} are off by {error:.3g} nats on average from those of"
            " transformers' own code; use another engine")


def _logprobs(logits: Tensor, model: PreTrainedModel) -> Tensor:
    return logits[:-1].float().log_softmax(-1).gather(1, _tokens(model)[1:, None])


def _tokens(model: PreTrainedModel) -> Tensor:
    return _TOKENS % model.config.get_text_config().vocab_size
