"""Reads back the weights that a vLLM worker computes with and compares them with the files that it loaded. Used by `vllm_inside`.

vLLM fuses weights and packs them for its kernels, so that most no longer exist in their original form. But a linear layer can be probed:
one-hot rows as input return columns of its matrix, exactly, by the kernel that serves. A tensor is compared where that works, which is
tried on the weights that the server started with; the others are counted, and nothing is claimed about them. With tensor parallelism each
worker compares its share of a tensor. Adapters keep their original form and are compared completely.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from vllm_files import files_of, read_files

_NUM_COLUMNS = 8
_HEAD = "lm_head.weight"
_LORA = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])\.weight")


class ReadBack:
    """Reads back the weights that a model computes with."""

    def __init__(self, model: nn.Module, files: Sequence[str]) -> None:
        """`files` hold the model's current weights in their original form; without files nothing can be read back."""
        self._modules = {name.replace(".base_layer", ""): module for name, module in model.named_modules()}
        self._fused: Mapping[str, Sequence[str]] = getattr(model, "packed_modules_mapping", None) or {}
        self._tied = bool(getattr(getattr(model, "config", None), "tie_word_embeddings", False))
        self._turn = 0
        self._readable: set[str] = set()
        self._readable = {name for name, same in self._compare(files, every=True) if same}

    def check(self, files: Sequence[str]) -> tuple[list[str], list[str]]:
        """Compare the tensors in the files with the weights in use.

        Returns:
            Names of tensors that differ from those in use, and names of tensors that cannot be compared.
        """
        found = dict(self._compare(files, every=False))
        return [name for name, same in found.items() if same is False], [name for name, same in found.items() if same is None]

    @torch.inference_mode()
    def _compare(self, files: Sequence[str], *, every: bool) -> Iterable[tuple[str, bool | None]]:
        """Yield for each tensor whether it equals the one in use; None where that cannot be read."""
        self._turn += 1
        tied = self._tied and all(name != _HEAD for name, _ in read_files(files))
        for name, tensor in read_files(files):
            for label, place, part in self._places(name, tied=tied):
                if not (every or label in self._readable):
                    yield label, None
                    continue
                try:
                    live, wanted = _live(place, name, tensor, part, self._turn)
                    yield label, live.shape == wanted.shape and torch.equal(live, wanted.to(live.device, live.dtype))
                except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError):
                    yield label, None if every else False

    def _places(self, name: str, *, tied: bool) -> Iterable[tuple[str, nn.Module | None, int | None]]:
        """Yield the places of a tensor: a label, the module, and the number of the tensor among its fused parts; None for all of it.

        The embedding has two places where it is tied to the head.
        """
        path, _, _ = name.rpartition(".")
        last = path.rpartition(".")[2]
        parent = path.removesuffix(last)
        module, part = self._modules.get(path), None
        for fused, parts in self._fused.items() if module is None else ():
            if last in parts and (module := self._modules.get(f"{parent}{fused}")) is not None:
                part = list(parts).index(last)
                break
        yield name, module, part
        if tied and type(module).__name__ == "VocabParallelEmbedding":
            yield from ((_HEAD, head, None) for head in self._modules.values() if type(head).__name__ == "ParallelLMHead")


def _live(module: Any, name: str, tensor: Tensor, part: int | None, turn: int) -> tuple[Tensor, Tensor]:
    """Return the numbers in use in a tensor's place, and the numbers that they must equal.

    They are rows [N, I] or [N] of the tensor; of a matrix, a few columns [O, K], different ones each turn.

    Raises:
        ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError: they cannot be read here.
    """
    rows, own = _rows(module, tensor, part)
    kind = name.rpartition(".")[2]
    if kind != "weight" or tensor.ndim != 2 or not hasattr(module, "quant_method") or type(module).__name__ == "VocabParallelEmbedding":
        return getattr(module, kind)[rows], tensor[own]
    width, first = _width(module, tensor)
    columns = ((torch.linspace(0, width - 1, _NUM_COLUMNS).long() + turn) % width).unique()
    asked = torch.zeros(len(columns), width)
    asked[torch.arange(len(columns)), columns] = 1
    weight = module.weight
    told = module.quant_method.apply(module, asked.to(weight.device, weight.dtype))
    return told[:, rows].T, tensor[own, first + columns]


def _rows(module: Any, tensor: Tensor, part: int | None) -> tuple[slice, slice]:
    """Return the rows of a tensor [O, I] or [O] in its layer, and the rows of the tensor that they hold: all, or this worker's share.

    A layer that is split has an equal share of each part on every worker. Where a part has fewer heads than there are workers, each head is
    on several of them.
    """
    if (vocabulary := getattr(module, "shard_indices", None)) is not None:
        own = slice(vocabulary.org_vocab_start_index, vocabulary.org_vocab_end_index)
        return slice(own.stop - own.start), own
    sizes = list(getattr(module, "output_partition_sizes", [len(tensor)]))
    offset, size = (0, sum(sizes)) if part is None else (sum(sizes[:part]), sizes[part])
    share = getattr(module, "tp_rank", 0) * (len(tensor) // size) // getattr(module, "tp_size", 1)
    return slice(offset, offset + size), slice(share * size, (share + 1) * size)


def _width(module: Any, tensor: Tensor) -> tuple[int, int]:
    """Return I, the number of a layer's inputs, and the column of the tensor [O, I] or [O, I * num_ranks] that the first one multiplies.

    Raises:
        ValueError: the tensor has another form than the layer, which must not be probed: kernels for CPUs do not check the width of their
            input, and corrupt memory.
    """
    names = ("input_size_per_partition", "input_size", "embedding_dim")
    width = next((getattr(module, name) for name in names if hasattr(module, name)), 0)
    num_ranks = getattr(module, "tp_size", 1)
    if tensor.shape[1] == width:
        return width, 0
    if tensor.shape[1] == width * num_ranks:
        return width, width * module.tp_rank
    raise ValueError(f"a tensor {list(tensor.shape)} is no matrix of {width} inputs")


@torch.inference_mode()
def check_adapter(manager: Any, number: int, folder: str) -> tuple[list[str], list[str]]:
    """Compare the weights in use for an adapter with its folder.

    Args:
        manager: vLLM's `LoRAModelManager`.
        number: the number by which vLLM knows the adapter.

    Returns:
        Names of tensors in the folder that differ from the weights in use, and of layers that use weights not in the folder; and names of
        tensors that cannot be compared.
    """
    tensors = dict(read_files(files_of(folder)))
    slots = list(getattr(manager, "lora_index_to_id", ()))
    if number not in slots:  # it was evicted, and will be read from its folder again when it is requested
        return [], list(tensors)
    slot, scaling = slots.index(number), _scaling(folder)
    wrong, unread, seen = [], [], set()
    for name, tensor in tensors.items():
        match = _LORA.fullmatch(name)
        place = match and _lora_place(manager, match["module"])
        if not place:
            unread.append(name)
            continue
        module, part = place
        live = (module.lora_a_stacked if match["side"] == "A" else module.lora_b_stacked)[part][slot, 0]
        seen.add((module, part))
        wanted = torch.zeros_like(live)
        given = tensor.to(live.dtype) * (1.0 if match["side"] == "A" else scaling)
        wanted[: given.shape[0], : given.shape[1]] = given
        wrong += [] if torch.equal(live, wanted) else [name]
    for name, module in manager.modules.items() if not unread else ():
        stacked = module.lora_b_stacked  # a tuple, except for the output head
        for part, outputs in enumerate((stacked,) if isinstance(stacked, Tensor) else stacked):
            wrong += [name] if (module, part) not in seen and outputs[slot].any() else []
    return wrong, unread


def _lora_place(manager: Any, path: str) -> tuple[Any, int] | None:
    """Return the adapted layer and the part of it; None where the weights are stored in another form."""
    parent, _, last = path.rpartition(".")
    places = {path: 0} | {
        f"{parent}.{fused}": list(parts).index(last) for fused, parts in manager.packed_modules_mapping.items() if last in parts}
    for place, part in places.items():
        module = manager.modules.get(place)
        parts = getattr(module, "lora_b_stacked", ())
        if isinstance(parts, tuple) and part < len(parts) and getattr(module, "tp_size", 1) == 1:
            return module, part
    return None


def _scaling(folder: str) -> float:
    """Return the factor that B is multiplied by when it is loaded."""
    config = json.loads((Path(folder) / "adapter_config.json").read_text(encoding="utf-8"))
    return config["lora_alpha"] / (math.sqrt(config["r"]) if config.get("use_rslora") else config["r"])
