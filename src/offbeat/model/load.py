"""Loads a Hugging Face language model, causal or of images and text, for training or scoring.

Called by the trainer and by tools. A model is loaded completely or not at all: missing weights are an error, never random numbers.
"""

from contextlib import nullcontext
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from offbeat.data.image_reader import reads_images
from offbeat.data.model_folder import CONTEXT_LENGTH_NAMES, check_model_folder, read_model_config, rope_limit
from offbeat.errors import ModelError, first_line
from offbeat.model.attention import PACKED
from offbeat.model.divided_read import Divide, DividedRead, GiveHead
from offbeat.model.norm import use_fast_norms

# Workers have no terminal, so a progress bar per process would only garble their logs.
disable_progress_bar()

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def load_causal_lm(
    path: str, *, dtype: str = "float32", attention: str | None = PACKED, divide: Divide | None = None, give_head: GiveHead | None = None,
) -> PreTrainedModel:
    """Load a model onto the CPU, or divided parts of it to the rank's device, in eval mode.

    Args:
        path: folder or hub id.
        dtype: "float32" or "bfloat16", number format of the weights.
        attention: "packed" for rows of several sequences (`offbeat.model.attention`); "sdpa" or "eager" for plain use; None for the better
            of these two that the model supports.
        divide: called before weights are read; of a DTensor, only this rank's part is read then.
        give_head: with `divide`, replaces the head before that; the checkpoint's is not read then.

    Raises:
        ModelError: there is no such model, its architecture is unknown, or weights are missing or have wrong shapes; or of `divide`.
        WholeOnlyError: the model cannot be divided before it is read.
    """
    if dtype not in DTYPES:
        raise ModelError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    folder = check_model_folder(path)
    sees = reads_images(read_model_config(str(folder)))
    kind = AutoModelForImageTextToText if sees else AutoModelForCausalLM
    parts = None if divide is None else DividedRead(divide, give_head)
    try:
        with nullcontext({}) if parts is None else parts.hooked() as more:
            loaded: Any = kind.from_pretrained(
                folder, dtype=DTYPES[dtype], attn_implementation=attention, local_files_only=True, output_loading_info=True, **more
            )
    except ModelError:
        raise
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError) as exc:
        raise ModelError(f"{folder} cannot be loaded as a causal language model: {first_line(exc)}") from exc
    model, report = loaded
    wrong = sorted([*report["missing_keys"], *(str(key) for key in report["mismatched_keys"])])
    if parts is not None:
        parts.complete(model, wrong)
    if wrong:
        raise ModelError(f"{folder} lacks or misshapes {len(wrong)} weights, {wrong[0]!r} first; its config.json must describe its weights")
    vars(model.config).pop("distributed_config", None)  # which no program that loads an export should see
    if parts is None:
        use_fast_norms(model)
    return model


def context_length(config: Any) -> int:
    """Return the longest sequence in tokens that a model's configuration allows, whatever else the batch holds; see `rope_limit`.

    Raises:
        ModelError: the configuration states none.
    """
    text_config = config.get_text_config()
    for name in CONTEXT_LENGTH_NAMES:
        if isinstance(length := getattr(text_config, name, None), int):
            return min(length, rope_limit_of(config) or length)
    raise ModelError(f"the configuration of model type {config.model_type!r} names no max_position_embeddings; add it to config.json")


def rope_limit_of(config: Any) -> int | None:
    text_config = config.get_text_config()
    ropes, context = getattr(text_config, "rope_parameters", None), getattr(text_config, "max_position_embeddings", 0)
    return rope_limit(ropes, context=context, original=getattr(text_config, "original_max_position_embeddings", None))
