"""Builds an engine from its options: model, forward path, tokenizer. Called by the server and by in-process users."""

from typing import Any

import torch

from offbeat.data.tokenizer import load_tokenizer
from offbeat.engine.engine import EmbeddedEngine
from offbeat.engine.forward import Forward, check_forward, ordinary_tokens
from offbeat.engine.forward_direct import DirectForward, supports
from offbeat.engine.forward_hf import HFForward
from offbeat.engine.options import EngineOptions
from offbeat.errors import ModelError
from offbeat.model.load import load_causal_lm
from offbeat.sync.platform import current_platform


def load_engine(options: EngineOptions) -> EmbeddedEngine:
    """Load model and tokenizer, and check that decoding agrees with a full forward pass.

    Raises:
        ModelError: the model or tokenizer cannot be used, or not with the requested forward path.
    """
    tokenizer = load_tokenizer(options.tokenizer or options.model)
    return EmbeddedEngine(load_forward(options), tokenizer, options)


@torch.inference_mode()
def load_forward(options: EngineOptions) -> Forward:
    """Load a model on this process's device with the forward path that suits it, and check it.

    Raises:
        ModelError: the model cannot be loaded, or the path's results differ from transformers' own code.
    """
    model = load_causal_lm(options.model, dtype=options.dtype, attention=None)
    place: dict[str, Any] = {"dtype": getattr(torch, options.dtype), "device": current_platform.device}
    tokens = ordinary_tokens(model.config.get_text_config().vocab_size)
    reference = model(input_ids=tokens[None], use_cache=False).logits[0]
    direct = supports(model.config)
    if options.forward == "direct" and not direct:
        raise ModelError(
            f"the direct forward does not compute {options.model} (model type {model.config.model_type!r}); use forward = auto or hf"
        )
    if direct and options.forward != "hf":
        forward: Forward = DirectForward(model.config, {n: p.detach() for n, p in model.named_parameters()}, **place)
    else:
        forward = HFForward(model, **place)
    check_forward(forward, reference)
    return forward
