"""Reads back the weights that a vLLM worker computes with and compares them with the files that it loaded. Used by `vllm_inside`.

vLLM fuses weights and packs them for its kernels, so that most no longer exist in their original form. But a linear layer can be probed:
one-hot rows as input return columns of its matrix, exactly, by the kernel that serves. Of experts (`vllm_experts`) such columns are read
from the kernel's memory. A tensor is compared where that works, which is tried on the weights that the server started with; the others are
counted, and nothing is claimed about them. With tensor parallelism each worker compares its share of a tensor. Rounded weights (`rounding`)
are compared with what rounding the tensor gives: columns, all scales and, where the kernel's memory shows them, all numbers. Adapters keep
their original form and are compared completely.
"""

import json
import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from rounding import Rounded, round_matrix
from torch import Tensor, nn
from vllm_experts import Expert
from vllm_files import files_of, read_files

_NUM_COLUMNS = 8
_NUM_NUMBERS = 4096
"""Of small matrices, such as routers, so many columns are read that they hold as many numbers: in 16 bits a step changes few of them."""
_NUM_SUMS = 4
"""Signed sums of whole rows; one number that is wrong changes all of them."""
_HEAD = "lm_head.weight"
_LORA = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])\.weight")


class ReadBack:
    """Reads back the weights that a model computes with."""

    def __init__(self, model: nn.Module, files: Sequence[str]) -> None:
        """`files` hold the model's current weights in their original form; without files nothing can be read back."""
        self._modules = {name.replace(".base_layer", ""): module for name, module in model.named_modules()}
        self._prefixes = prefixes_of(model)
        self._fused: dict[str, Sequence[str]] = {}
        for module in model.modules():  # a model with images has its language part's names there
            self._fused |= getattr(module, "packed_modules_mapping", None) or {}
        self._tied = bool(getattr(getattr(model, "config", None), "tie_word_embeddings", False))
        self._turn = 0
        self._readable: set[str] = set()
        self._readable = {name for name, same in self._compare(files, every=True) if same}

    def check(self, files: Sequence[str]) -> tuple[list[str], list[str]]:
        """Return names of the files' tensors that differ from the weights in use, and names of those that cannot be compared."""
        found = dict(self._compare(files, every=False))
        wrong = dict.fromkeys(name.partition(":")[0] for name, same in found.items() if same is False)
        return list(wrong), [name for name, same in found.items() if same is None]

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
                    same, stored = _compare_live(place, name, tensor, part, self._turn)
                except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError):
                    same, stored = None if every else False, {}
                yield label, same
                for what, equal in stored.items():
                    if every or f"{label}: {what}" in self._readable:
                        yield f"{label}: {what}", equal

    def _places(self, name: str, *, tied: bool) -> Iterable[tuple[str, nn.Module | Expert | None, int | None]]:
        """Yield the places of a tensor: a label, the module, and the number of the tensor among its fused parts; None for all of it.

        The embedding has two places where it is tied to the head.
        """
        place = name
        for prefix, own in self._prefixes.items():
            place = own + place.removeprefix(prefix) if place.startswith(prefix) else place
        if (expert := Expert.of_tensor(self._modules, place)) is not None:
            yield name, expert, None
            return
        path, _, _ = place.rpartition(".")
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


def prefixes_of(model: nn.Module) -> dict[str, str]:
    """Return beginnings of the names of a checkpoint that vLLM replaces in its own, in order, such as "model.visual." by "visual."."""
    table = getattr(getattr(model, "hf_to_vllm_mapper", None), "orig_to_new_prefix", {})
    return {prefix: own for prefix, own in table.items() if own is not None}


def _compare_live(module: Any, name: str, tensor: Tensor, part: int | None, turn: int) -> tuple[bool, dict[str, bool]]:
    """Compare a tensor with the numbers in use in its place: rows [N, I] or [N]; of a matrix a few columns, different ones each turn.

    Returns whether they are the same; and of a rounded matrix, whether the kernel's memory has the same "scales" and "numbers", where it
    may.

    Raises:
        ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError: they cannot be read here.
    """
    if isinstance(module, Expert):
        return _compare_expert(module, tensor, turn), {}
    rows, own = _rows(module, tensor, part)
    kind = name.rpartition(".")[2]
    if kind != "weight" or tensor.ndim != 2 or not hasattr(module, "quant_method") or type(module).__name__ == "VocabParallelEmbedding":
        return _equal(getattr(module, kind)[rows], tensor[own]), {}
    width, first = _width(module, tensor)
    columns = _columns(width, len(tensor[own]), turn)
    asked = torch.zeros(len(columns), width)
    asked[torch.arange(len(columns)), columns] = 1
    form = form_of(module.quant_method)
    if not form:
        return _equal(_ask(module, asked)[:, rows].T, tensor[own, first + columns]), {}
    rounded = round_matrix(form, tensor[own].to(module.orig_dtype), first=first, width=width)
    told, wanted = _ask(module, asked)[:, rows].T, rounded.columns(columns)
    if form == "int8" and told.dtype == torch.float32:  # 16 bits would not tell such a sum from the next
        signs = torch.randint(0, 2, (_NUM_SUMS, width), generator=torch.Generator().manual_seed(turn)) * 2.0 - 1
        told, wanted = torch.cat([told, _ask(module, signs)[:, rows].T], 1), torch.cat([wanted.double(), rounded.signed_sums(signs)], 1)
    return _close(told, wanted), _compare_stored(module, rounded, rows)


def _compare_expert(expert: Expert, tensor: Tensor, turn: int) -> bool:
    """Compare a tensor of an expert as `_compare_live` does. True if another worker has the expert."""
    own = expert.share(tensor)
    if own is None:
        return True
    columns = _columns(own.shape[1], len(own), turn)
    return _equal(expert.columns(columns, len(own)), own[:, columns])


def _columns(width: int, num_rows: int, turn: int) -> Tensor:
    """Return the numbers of the columns, of `width`, that are read of so many rows: other ones each turn, far apart."""
    count = min(width, max(_NUM_COLUMNS, _NUM_NUMBERS // num_rows))
    return ((torch.linspace(0, width - 1, count).long() + turn) % width).unique()


def form_of(method: Any) -> str:
    """Return the form in which a layer's method rounds its weights, one of `rounding.FORMS`; empty if it keeps them whole."""
    return "fp8" if type(method).__name__ == "Fp8PtpcOnlineLinearMethod" else getattr(method, "form", "")


def _ask(module: Any, asked: Tensor) -> Tensor:
    """Return what the kernel makes of rows [K, I]: [K, O]."""
    if form_of(module.quant_method):
        device, dtype = module.weight_scale.device, module.orig_dtype
    else:
        device, dtype = module.weight.device, module.weight.dtype
    return module.quant_method.apply(module, asked.to(device, dtype))


def _equal(live: Tensor, wanted: Tensor) -> bool:
    return live.shape == wanted.shape and torch.equal(live, wanted.to(live.device, live.dtype))


def _close(live: Tensor, wanted: Tensor) -> bool:
    """Whether numbers are the same but for the kernel's last rounding, which is less than the distance of two 8-bit numbers."""
    wanted = wanted.to(live.device, torch.float64)
    slack = max(0.51 * torch.finfo(live.dtype).eps, 1e-6)
    return live.shape == wanted.shape and bool(((live.double() - wanted).abs() <= slack * wanted.abs()).all())


def _compare_stored(module: Any, rounded: Rounded, rows: slice) -> dict[str, bool]:
    """Compare what lies in the kernel's memory, as far as it has a form that is known here."""
    scales = module.weight_scale
    scales = scales[rows] if scales.shape[1] == rounded.scales.shape[1] else scales.T[rows]
    same = {"scales": _equal(scales, rounded.scales)}
    if (numbers := _stored_numbers(module)) is not None and numbers.shape[1] == rounded.numbers.shape[1]:
        same["numbers"] = torch.equal(numbers[rows].float(), rounded.numbers.to(numbers.device).float())
    return same


def _stored_numbers(module: Any) -> Tensor | None:
    """Return the numbers [O, I] in a kernel's memory: 8-bit floats, or whole numbers of 4 bits in vLLM's layout for CPUs."""
    weight, packed = getattr(module, "weight", None), getattr(module, "weight_packed", None)
    if weight is not None and weight.dtype == torch.float8_e4m3fn and weight.ndim == 2:
        return weight.T
    if packed is not None and packed.ndim == 2 and packed.shape[1] == 2 * module.input_size_per_partition:
        blocks = packed.view(len(packed), -1, 2)  # 16 outputs of each input, as two words of 8 numbers
        words = torch.stack([(blocks >> shift) & 15 for shift in range(0, 32, 4)], dim=-1).flatten(2)
        return words.transpose(1, 2).flatten(0, 1) - 8
    return None


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
    """Compare the weights in use for the adapter that vLLM's `LoRAModelManager` knows by this number with its folder.

    Returns names of tensors in the folder that differ from the weights in use, and of layers that use weights not in the folder; and names
    of tensors that cannot be compared.
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
        if (own := _lora_share(module, match["side"], tensor, part, live)) is None:
            unread.append(name)
            continue
        seen.add((module, part))
        wanted = torch.zeros_like(live)
        given = own.to(live.device, live.dtype) * (1.0 if match["side"] == "A" else scaling)
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
        if isinstance(parts, tuple) and part < len(parts):
            return module, part
    return None


def _lora_share(module: Any, side: str, tensor: Tensor, part: int, live: Tensor) -> Tensor | None:
    """Return this worker's share of A [r, I] or B [O, r] in an adapted layer, in the form of `live`; None if it is split in another way."""
    if getattr(module, "tp_size", 1) == 1:
        return tensor
    if getattr(getattr(module, "lora_config", None), "fully_sharded_loras", False):  # along the rank, too
        return None
    if side == "A":
        width, first = _width(module.base_layer, tensor)
        return tensor[:, first : first + width] if width == live.shape[1] else None
    _, own = _rows(module.base_layer, tensor, part)
    return tensor[own] if own.stop - own.start == len(live) else None


def _scaling(folder: str) -> float:
    """Return the factor that B is multiplied by when it is loaded."""
    config = json.loads((Path(folder) / "adapter_config.json").read_text(encoding="utf-8"))
    return config["lora_alpha"] / (math.sqrt(config["r"]) if config.get("use_rslora") else config["r"])
