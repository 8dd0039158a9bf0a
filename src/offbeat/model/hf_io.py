"""Reads and writes weights in Hugging Face folders (config.json and safetensors).

Called by publishing, checkpoints and the tiny model. A folder appears complete or not at all: it is written under another name beside its
destination and renamed. Where the folder exists already, files are moved into it one by one, config.json last.
"""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from offbeat.data.model_folder import WEIGHT_FILES, read_model_config
from offbeat.disk import discard
from offbeat.errors import ModelError, StorageError
from offbeat.pulse import progress

_SINGLE_FILE, _INDEX_FILE = WEIGHT_FILES
_COMPANIONS = (
    *("config.json", "generation_config.json"),
    *("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"),
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "chat_template*", "vocab.*", "merges.txt"),
)
"""Files of a complete folder besides its weights."""


def write_safetensors(
    state: Mapping[str, Tensor], folder: str | Path, *, config_from: PreTrainedModel | str | Path, max_shard_bytes: int = 5 << 30
) -> None:
    """Write a complete model folder.

    Args:
        state: weights by their Hugging Face names, such as "lm_head.weight" [V, H], on any device; not modified. Tied weights
            are written once.
        folder: parents are created; files of earlier weights in it are replaced, others stay.
        config_from: a model whose configurations are written, or a folder whose configuration and tokenizer files are copied.
        max_shard_bytes: larger weights are split into several files with an index.

    Raises:
        StorageError: the disk is full or the folder cannot be written; earlier weights are intact.
    """
    folder = Path(folder)
    staging = folder.parent / f".{folder.name}.{os.getpid()}.partial"
    try:
        staging.mkdir(parents=True)
        write_companions(staging, config_from)
        _write_shards(without_tied(state, config_from), staging, max_shard_bytes)
        _move_into_place(staging, folder)
    except (OSError, SafetensorError) as exc:
        raise StorageError(f"the model could not be written to {folder}: {exc}; free space or choose another folder") from exc
    finally:
        discard(staging)


def read_safetensors(folder: str | Path) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, CPU tensor) of every weight in a folder, such as ("lm_head.weight", [V, H]), one file after another.

    Raises ModelError if the folder holds no safetensors, or one that cannot be read.
    """
    for file in _weight_files(Path(folder)):
        yield from read_file(file)


def read_file(file: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, CPU tensor) of every tensor of a file, such as ("lm_head.weight", [V, H]); errors as of `read_safetensors`."""
    try:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                yield name, tensors.get_tensor(name)
    except (OSError, SafetensorError) as exc:
        raise ModelError(f"{file} cannot be read as safetensors: {exc}") from exc


def without_tied(state: Mapping[str, Tensor], config_from: PreTrainedModel | str | Path) -> dict[str, Tensor]:
    """Return the weights without those that are tied to others, as `write_safetensors` writes them."""
    if isinstance(config_from, PreTrainedModel):
        tied = set(config_from.all_tied_weights_keys)
    else:
        tied = {"lm_head.weight"} if read_model_config(str(config_from)).get("tie_word_embeddings") else set()
    return {name: tensor.detach() for name, tensor in state.items() if name not in tied}


def write_companions(staging: Path, config_from: PreTrainedModel | str | Path) -> None:
    """Write a model's configurations, or copy a folder's configuration and tokenizer files; see `write_safetensors`."""
    if isinstance(config_from, PreTrainedModel):
        config_from.config.save_pretrained(staging)
        if config_from.generation_config is not None:
            config_from.generation_config.save_pretrained(staging)
        return
    read_model_config(str(config_from))
    for pattern in _COMPANIONS:
        for file in Path(config_from).glob(pattern):
            shutil.copyfile(file, staging / file.name)


def _write_shards(state: dict[str, Tensor], staging: Path, max_shard_bytes: int) -> None:
    total = sum(tensor.nbytes for tensor in state.values())
    check_room(staging, total)
    shards = _split(state, max_shard_bytes)
    weight_map = {}
    for number, names in enumerate(shards, start=1):
        file = weight_file(number, len(shards))
        save_weights({name: state[name] for name in names}, staging / file)
        weight_map.update(dict.fromkeys(names, file))
    if len(shards) > 1:
        write_index(staging, weight_map, num_bytes=total)


def check_room(folder: Path, num_bytes: int) -> None:
    """Check that a model fits into the free space where `folder` is. Raises StorageError if it does not."""
    if num_bytes > (free := shutil.disk_usage(folder).free):
        raise StorageError(
            f"the model needs {num_bytes} bytes in {folder.parent}, where {free} are free; free space or choose another folder")


def weight_file(number: int, count: int) -> str:
    """Return the name of file `number` of `count` files of weights, from 1 on, such as "model-00001-of-00003.safetensors"."""
    return _SINGLE_FILE if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"


def save_weights(state: Mapping[str, Tensor], file: Path) -> None:
    """Write one file of weights, from any device. Raises OSError or SafetensorError."""
    progress("write_weights")
    save_file({name: tensor.cpu().contiguous() for name, tensor in state.items()}, file, metadata={"format": "pt"})


def write_index(folder: Path, weight_map: Mapping[str, str], *, num_bytes: int) -> None:
    """Write which file of a folder holds each weight."""
    index = {"metadata": {"total_size": num_bytes}, "weight_map": dict(weight_map)}
    (folder / _INDEX_FILE).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def _split(state: dict[str, Tensor], max_shard_bytes: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    size = 0
    for name, tensor in state.items():
        if shards[-1] and size + tensor.nbytes > max_shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += tensor.nbytes
    return shards


def _move_into_place(staging: Path, folder: Path) -> None:
    if not folder.exists():
        staging.rename(folder)
        return
    stale = [file for pattern in ("model*.safetensors", _INDEX_FILE) for file in folder.glob(pattern) if not (staging / file.name).exists()]
    for file in sorted(staging.iterdir(), key=lambda file: file.name == "config.json"):
        file.replace(folder / file.name)
    for file in stale:
        file.unlink()


def _weight_files(folder: Path) -> list[Path]:
    if (folder / _INDEX_FILE).is_file():
        weight_map = json.loads((folder / _INDEX_FILE).read_text(encoding="utf-8"))["weight_map"]
        return [folder / name for name in sorted(set(weight_map.values()))]
    if (folder / _SINGLE_FILE).is_file():
        return [folder / _SINGLE_FILE]
    raise ModelError(f"{folder} holds no {_SINGLE_FILE} or {_INDEX_FILE}; give a folder with weights in the safetensors format")
