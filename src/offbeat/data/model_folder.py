"""Model folders without torch: where a model is, whether the folder is complete, and the sizes in its config.json.

Called by the controller and the command line before any process starts, and by `offbeat.model.load`, so that both give the same errors.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from offbeat.errors import ConfigError, ModelError
from offbeat.extras import missing_modules

TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "chat_template*", "vocab.*", "merges.txt")
"""Patterns of the files of a tokenizer."""
WEIGHT_FILES = ("model.safetensors", "model.safetensors.index.json")

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_LOCAL = ("models", "runs", "checkpoints")
"""Common names of folders of models, none of which is a known owner of models on the hub."""
_HUB_FILES = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]

CONTEXT_LENGTH_NAMES = ("max_position_embeddings", "n_positions", "max_seq_len")
"""Names that configurations use for the longest sequence in tokens; the first one present counts."""
WIDTH_NAMES = ("hidden_size", "n_embd", "d_model", "dim")
"""Names that configurations use for the width of the residual stream; the first one present counts."""


def check_model_folder(path: str) -> Path:
    """Return the local folder of a model, fetched from the hub if `path` is not a folder.

    Raises:
        ModelError: the folder does not exist and is not on the hub (or there is no network), or has no config.json or safetensors weights.
    """
    folder = _local(path) or Path(_fetch(path))
    read_model_config(str(folder))
    if not any((folder / name).is_file() for name in WEIGHT_FILES):
        raise ModelError(f"{folder} holds no {' or '.join(WEIGHT_FILES)}; give a folder with weights in the safetensors format")
    return folder


def read_model_config(path: str) -> dict[str, Any]:
    """Return the contents of a model's config.json; of a model on the hub only this file is fetched.

    Raises ModelError as `check_model_folder`, or if config.json is not a JSON object with a model_type.
    """
    folder = _local(path)
    file = folder / "config.json" if folder else Path(_fetch(path, file="config.json"))
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as exc:
        raise ModelError(f"{path} is not a model folder: it has no config.json; give the folder that save_pretrained wrote") from exc
    except (OSError, ValueError) as exc:
        raise ModelError(f"{file} cannot be read as JSON: {exc}") from exc
    if not isinstance(config, dict) or "model_type" not in config:
        raise ModelError(f"{file} names no model_type; it must be the config.json of a Hugging Face model")
    return config


def _read_text_config(path: str) -> dict[str, Any]:
    """Return the part of config.json that is about text; of a model of text alone that is all of it."""
    config = read_model_config(path)
    return config.get("text_config") or config


def read_context_length(path: str) -> int:
    """Return the longest sequence in tokens that config.json allows and that does not depend on other sequences; see `rope_limit`.

    Raises ModelError as `read_model_config`, or if the configuration states none.
    """
    text_config = _read_text_config(path)
    for name in CONTEXT_LENGTH_NAMES:
        if isinstance(length := text_config.get(name), int):
            ropes, original = text_config.get("rope_parameters") or text_config.get("rope_scaling"), "original_max_position_embeddings"
            return min(length, rope_limit(ropes, context=length, original=text_config.get(original)) or length)
    raise ModelError(f"the configuration of {path} names no max_position_embeddings; add it to its config.json")


def read_width(path: str) -> int:
    """Return the width of the model's residual stream; raises ModelError as `read_model_config`, or if the configuration states none."""
    text_config = _read_text_config(path)
    for name in WIDTH_NAMES:
        if isinstance(width := text_config.get(name), int) and width > 0:
            return width
    raise ModelError(f"the config.json of {path} has no hidden_size, by which a learning rate would be chosen; give the rate as a number")


def read_vocab_size(path: str) -> int | None:
    """Return the number of rows of the model's embedding, by its config.json; None if it does not say. Raises as `read_model_config`."""
    config = read_model_config(path)
    size = (config.get("text_config") or config).get("vocab_size", config.get("vocab_size"))
    return size if isinstance(size, int) and size > 0 else None


def router_loss_note(path: str, *, coefficient: float) -> str:
    """Return advice for a mixture of experts whose config.json has a coefficient of the routers' load-balancing loss; "" for others.

    With train.router_aux_loss_coefficient, such as 0.001, there is no advice. Raises ConfigError if it is given and there are no experts,
    and ModelError as `read_model_config`.
    """
    text = _read_text_config(path)
    if coefficient:
        if "expert" not in json.dumps(text):
            raise ConfigError(
                f"train.router_aux_loss_coefficient must be 0 for {path}, got {coefficient:g}; its config.json names no experts, so leave"
                " it out")
        return ""
    own = text.get("router_aux_loss_coef")
    if not isinstance(own, (int, float)) or not own:
        return ""
    return (f"the load-balancing loss of the routers is not trained on; train.router_aux_loss_coefficient = {own:g}, as in the config.json"
            f" of {path}, would keep the experts evenly used")


def read_end_token_ids(folder: str) -> tuple[int, ...]:
    """Return the end tokens in a local model's generation_config.json, or in its config.json if it has no generation_config.json.

    Raises ModelError as `read_model_config`, or if the file is not JSON, or its eos_token_id is not a token or a list of tokens.
    """
    file = Path(folder) / "generation_config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        file, config = Path(folder) / "config.json", read_model_config(folder)
        config = {**(config.get("text_config") or {}), **config}
    except (OSError, ValueError) as exc:
        raise ModelError(f"{file} cannot be read as JSON: {exc}") from exc
    ids = config.get("eos_token_id") if isinstance(config, dict) else None
    ids = [] if ids is None else ids if isinstance(ids, list) else [ids]
    if not all(type(token) is int and token >= 0 for token in ids):
        raise ModelError(f"eos_token_id of {file} must be a token id or a list of them, got {ids!r}")
    return tuple(ids)


def rope_limit(ropes: Mapping[str, Any] | None, *, context: int, original: int | None = None) -> int | None:
    """Return the longest sequence up to which a model's rotary frequencies are the same for all sequences; None where they always are.

    LongRoPE changes them for a whole call whose longest sequence exceeds the original context, and dynamic NTK where it exceeds the
    configured one, so that the numbers of a longer sequence would depend on its neighbours, on the engine, and on its current length.

    Args:
        ropes: `rope_parameters` of a configuration, or `rope_scaling` of an older one; may hold one entry per kind of layer.
        original: `original_max_position_embeddings` of the configuration, where it is not among the parameters.
    """
    limits = []
    for rope in (ropes, *ropes.values()) if ropes else ():
        kind = (rope.get("rope_type") or rope.get("type") or "") if isinstance(rope, Mapping) else ""
        if kind in ("longrope", "su"):
            limits.append(rope.get("original_max_position_embeddings") or original or context)
        elif "dynamic" in kind:
            limits.append(context)
    return min(limits, default=None)


def _local(path: str) -> Path | None:
    folder = Path(path).expanduser()
    return folder if path and folder.is_dir() else None


def _fetch(path: str, *, file: str | None = None) -> str:
    """Return the path of a hub model's snapshot, or of one file of it."""
    if not _HUB_ID.fullmatch(path):
        raise ModelError(f"model folder {path!r} does not exist; give an existing folder or a hub id such as 'Qwen/Qwen3-0.6B'")
    if missing := missing_modules(["huggingface_hub"]):
        raise ModelError(f"model {path!r} is fetched by {missing} not installed; run pip install 'offbeat[train]', or give a local folder")
    from huggingface_hub import hf_hub_download, snapshot_download  # noqa: PLC0415 - an optional dependency
    from huggingface_hub.errors import HfHubHTTPError  # noqa: PLC0415

    try:
        return hf_hub_download(path, file) if file else snapshot_download(path, allow_patterns=_HUB_FILES)
    except (HfHubHTTPError, OSError, ValueError) as exc:
        if _looks_local(path):
            raise ModelError(
                f"model folder {path!r} does not exist, and no such model could be fetched from the hub either ({type(exc).__name__});"
                " give the folder of a model, such as .models/smollm2-135m-instruct, which 'make smollm2' makes in a clone of the"
                " repository, or a hub id"
            ) from exc
        raise ModelError(
            f"model {path!r} is neither a folder nor could it be fetched from the hub ({type(exc).__name__}); "
            "check the name, and HF_TOKEN if it is private, or download it where there is a network and give its folder"
        ) from exc


def _looks_local(path: str) -> bool:
    """Whether a possible hub id is rather a folder: it begins as paths of models do, such as "models/qwen", or with an existing folder."""
    first, separator, _ = path.partition("/")
    return bool(separator) and (first in _LOCAL or Path(first).is_dir())
