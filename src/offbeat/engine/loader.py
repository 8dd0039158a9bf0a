"""Builds an engine from its options: model, forward path, tokenizer. Called by the server and by in-process users."""

import logging
from dataclasses import replace
from typing import Any

import torch

from offbeat.data.image_reader import images_for
from offbeat.data.image_sources import ImageLimits
from offbeat.data.image_store import ImageStore
from offbeat.data.tokenizer import load_tokenizer
from offbeat.engine.batch_invariant import is_invariant
from offbeat.engine.engine import EmbeddedEngine
from offbeat.engine.forward import Forward, check_forward, check_quantised, ordinary_tokens
from offbeat.engine.forward_direct import DirectForward, supports
from offbeat.engine.forward_hf import HFForward
from offbeat.engine.int8 import Int8Matrices
from offbeat.engine.options import EngineOptions
from offbeat.errors import ModelError
from offbeat.model.load import load_causal_lm
from offbeat.sync.platform import current_platform

logger = logging.getLogger(__name__)


def load_engine(options: EngineOptions) -> EmbeddedEngine:
    """Load model and tokenizer, and check that decoding agrees with a full forward pass.

    Raises:
        ModelError: the model or tokenizer cannot be used, or not with the requested forward path.
        MissingExtraError: it is to read images, and Pillow is not installed.
    """
    tokenizer, forward = load_tokenizer(options.tokenizer or options.model), load_forward(options)
    if forward.reads_images:
        store = ImageStore(options.images, most_bytes=options.max_stored_bytes)
        tokenizer = replace(tokenizer, images=images_for(options.model, store, ImageLimits(in_data=False)))
    return EmbeddedEngine(forward, tokenizer, options)


@torch.inference_mode()
def load_forward(options: EngineOptions) -> Forward:
    """Load a model on this process's device with the forward path that suits it, and check it.

    Raises ModelError if the model cannot be loaded, or the path's results differ from transformers' own code.
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
    fast = direct and options.forward != "hf"
    if options.quantization != "none":
        _check_quantises(options, direct=direct, device=place["device"])
    exact = fast and (options.quantization, options.dtype) == ("none", "float32") and place["device"].type == "cpu"
    if options.batch_invariant is True and not exact:
        raise ModelError(
            f"inference.batch_invariant must be false or auto for {options.model}, got true; a token's bits are the same in every batch in"
            " float32, on a CPU, with the direct forward alone")
    if not fast:
        forward = HFForward(model, **place)
        check_forward(forward, reference)
        if options.images:
            forward.read_images(ImageStore(options.images))
        return forward
    state = {name: parameter.detach() for name, parameter in model.named_parameters()}
    direct_forward = DirectForward(model.config, state, **place, batch_invariant=exact and bool(options.batch_invariant))
    if direct_forward.row_multiple > 1 and not is_invariant(direct_forward):
        if options.batch_invariant is True:
            raise ModelError("inference.batch_invariant must be false or auto on this processor, got true: a token's bits differ here")
        logger.warning("the engine is not batch-invariant: on this processor, a token's bits differ between batches")
        direct_forward = DirectForward(model.config, state, **place)
    check_forward(direct_forward, reference)
    if options.quantization == "none":
        return direct_forward
    matrices = Int8Matrices(direct_forward.input_ranges())
    direct_forward.release()  # before the quantised weights are made
    quantised = DirectForward(model.config, state, **place, matrices=matrices)
    check_quantised(quantised, reference)
    return quantised


def _check_quantises(options: EngineOptions, *, direct: bool, device: torch.device) -> None:
    for met, what in (
        (not direct, f"it has no fast path for {options.model}"),
        (options.forward == "hf", "it does not compute with them by forward = hf"),
        (device.type != "cpu", f"it has no kernel for them on {device.type}"),
    ):
        if met:
            raise ModelError(f'the embedded engine cannot have int8 weights here, because {what}; use quantization = "none"')
