"""What a vLLM worker computes with, read back and compared with what it was given. Used by `vllm_inside`, beside it in vLLM's processes.

vLLM fuses weights, and packs them for its kernels, so that most are not there any more as they came. But a linear layer can be asked: rows
that are zero but for a one give columns of its matrix, exactly, by the kernel that serves. A tensor is compared where that works at all,
which is tried on the weights that the server was started with; others are counted, and nothing is said of them. Adapters stay as
they came, and are compared whole.
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
    """Reads back what a model computes with."""

    def __init__(self, model: nn.Module, files: Sequence[str]) -> None:
        """`files` hold the weights that it has now, as they came; none where nobody knows them, and then nothing can be read back."""
        self._modules = {name.replace(".base_layer", ""): module for name, module in model.named_modules()}
        self._fused: Mapping[str, Sequence[str]] = getattr(model, "packed_modules_mapping", None) or {}
        self._tied = bool(getattr(getattr(model, "config", None), "tie_word_embeddings", False))
        self._turn = 0
        self._readable: set[str] = set()
        self._readable = {name for name, same in self._compare(files, every=True) if same}

    def check(self, files: Sequence[str]) -> tuple[list[str], list[str]]:
        """Names of tensors in the files that the model does not compute with, although it should; and of those of which nobody can tell."""
        found = dict(self._compare(files, every=False))
        return [name for name, same in found.items() if same is False], [name for name, same in found.items() if same is None]

    @torch.inference_mode()
    def _compare(self, files: Sequence[str], *, every: bool) -> Iterable[tuple[str, bool | None]]:
        """Whether each tensor serves; None where that cannot be read."""
        self._turn += 1
        shapes: dict[str, torch.Size] = {}
        for name, tensor in read_files(files):
            shapes[name] = tensor.shape
        for name, tensor in read_files(files):
            for label, place, offset in self._places(name, shapes):
                if not (every or label in self._readable):
                    yield label, None
                    continue
                try:
                    live, wanted = _live(place, name, tensor, offset, self._turn)
                    yield label, live.shape == wanted.shape and torch.equal(live, wanted.to(live.device, live.dtype))
                except (AttributeError, RuntimeError, TypeError, ValueError, NotImplementedError):
                    yield label, None if every else False

    def _places(self, name: str, shapes: Mapping[str, torch.Size]) -> Iterable[tuple[str, nn.Module | None, int]]:
        """Where a tensor serves: a label, the module, and the first of its rows there. The embedding of tied models serves twice."""
        path, _, kind = name.rpartition(".")
        last = path.rpartition(".")[2]
        parent = path.removesuffix(last)
        module, offset = self._modules.get(path), 0
        for fused, parts in self._fused.items() if module is None else ():
            if last in parts and (module := self._modules.get(f"{parent}{fused}")) is not None:
                before = [shapes.get(f"{parent}{part}.{kind}", (0,)) for part in parts[: list(parts).index(last)]]
                offset = sum(shape[0] for shape in before)
                break
        yield name, module, offset
        if self._tied and type(module).__name__ == "VocabParallelEmbedding" and _HEAD not in shapes:
            yield from ((_HEAD, head, 0) for head in self._modules.values() if type(head).__name__ == "ParallelLMHead")


def _live(module: Any, name: str, tensor: Tensor, offset: int, turn: int) -> tuple[Tensor, Tensor]:
    """What a module computes with in a tensor's place, and what it has to be: of a matrix, other columns each turn."""
    rows = slice(offset, offset + len(tensor))
    kind = name.rpartition(".")[2]
    if kind != "weight" or tensor.ndim != 2 or not hasattr(module, "quant_method") or type(module).__name__ == "VocabParallelEmbedding":
        return getattr(module, kind)[rows], tensor
    columns = ((torch.linspace(0, tensor.shape[1] - 1, _NUM_COLUMNS).long() + turn) % tensor.shape[1]).unique()
    asked = torch.zeros(len(columns), tensor.shape[1])
    asked[torch.arange(len(columns)), columns] = 1
    weight = module.weight
    told = module.quant_method.apply(module, asked.to(weight.device, weight.dtype))
    return told[:, rows].T, tensor[:, columns]


@torch.inference_mode()
def check_adapter(manager: Any, number: int, folder: str) -> tuple[list[str], list[str]]:
    """Compare what an adapter computes with against its folder.

    Args:
        manager: vLLM's `LoRAModelManager`.
        number: by which it knows the adapter.

    Returns:
        Names of tensors in the folder that are not computed with, and of layers that compute with something although they are not in it;
        and names of tensors of which nobody can tell.
    """
    tensors = dict(read_files(files_of(folder)))
    slots = list(getattr(manager, "lora_index_to_id", ()))
    if number not in slots:  # it has made room, and is read from its folder again when it is asked for
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
        stacked = module.lora_b_stacked  # a tuple, but of the head
        for part, outputs in enumerate((stacked,) if isinstance(stacked, Tensor) else stacked):
            wrong += [name] if (module, part) not in seen and outputs[slot].any() else []
    return wrong, unread


def _lora_place(manager: Any, path: str) -> tuple[Any, int] | None:
    """The layer that an adapted one has become, and which part of it; None where it lies otherwise than it came."""
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
    """What B is multiplied with when it is loaded."""
    config = json.loads((Path(folder) / "adapter_config.json").read_text(encoding="utf-8"))
    return config["lora_alpha"] / (math.sqrt(config["r"]) if config.get("use_rslora") else config["r"])
