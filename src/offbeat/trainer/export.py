"""A Hugging Face folder of a trained model, which any tool can load: a run's export, and each published version.

Called on rank 0, with the whole weights, or when each rank has written its part of them. The folder appears complete or not at all.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from offbeat.data.model_folder import TOKENIZER_FILES
from offbeat.disk import discard, put_in_place
from offbeat.errors import StorageError
from offbeat.model.hf_io import write_companions, write_index, write_safetensors


def export_folder(
    state: Mapping[str, Tensor], folder: Path, *, model_folder: Path, tokenizer_folder: Path | None = None,
    dtype: Literal["float32", "bfloat16"], add: Callable[[Path], None] | None = None,
) -> None:
    """Write a model folder, replacing an existing one.

    Args:
        state: all weights by their Hugging Face names, such as "lm_head.weight" [V, H], in `dtype`.
        folder: destination; parents are created.
        model_folder: folder of the original model; its configuration, and its tokenizer if it has one, are copied.
        tokenizer_folder: folder to take the tokenizer from instead.
        dtype: number format, recorded in the configuration.
        add: writes further files of the folder; called with the temporary folder in which it is built.

    Raises:
        StorageError: the disk is full or the folder cannot be written; an earlier folder is intact.
    """
    part = folder.with_name(f".{folder.name}.export")
    try:
        discard(part)
        write_safetensors(state, part, config_from=model_folder)
        _note_dtype(part, dtype)
        if tokenizer_folder is not None:
            _copy_tokenizer(tokenizer_folder, part)
        if add is not None:
            add(part)
        put_in_place(part, folder)
    except OSError as exc:
        if isinstance(exc, StorageError):
            raise
        raise StorageError(f"the model could not be written to {folder}: {exc}; free space or choose another folder") from exc
    finally:
        discard(part)


def complete_folder(
    part: Path, folder: Path, *, weight_map: Mapping[str, str], num_bytes: int, model_folder: Path, dtype: Literal["float32", "bfloat16"],
) -> None:
    """Complete `part`, which holds all files of weights, to a model folder, and put it in the place of `folder`.

    Args:
        weight_map: file of each weight by its Hugging Face name, e.g. "lm_head.weight": "model-00001-of-00003.safetensors".

    Raises:
        OSError, StorageError: it cannot be written.
    """
    write_companions(part, model_folder)
    if len(set(weight_map.values())) > 1:
        write_index(part, weight_map, num_bytes=num_bytes)
    _note_dtype(part, dtype)
    put_in_place(part, folder)


def change_config(folder: Path, settings: Mapping[str, Any]) -> None:
    """Replace settings in the config.json of a folder; of a model of several parts, also in its text model's part, where this has them."""
    file = folder / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    if isinstance(text := config.get("text_config"), dict):
        config["text_config"] = text | {name: value for name, value in settings.items() if name in text}
    file.write_text(json.dumps(config | dict(settings), indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _note_dtype(folder: Path, dtype: str) -> None:
    file = folder / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    config.pop("torch_dtype", None)  # the key of older versions, which readers would prefer to ours
    file.write_text(json.dumps(config | {"dtype": dtype}, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _copy_tokenizer(source: Path, target: Path) -> None:
    for pattern in TOKENIZER_FILES:
        for file in source.glob(pattern):
            shutil.copyfile(file, target / file.name)
