"""Reads and writes LoRA adapters as PEFT folders (adapter_config.json and adapter_model.safetensors).

An adapter of fused experts (`fused_experts`) has a pair of matrices for each expert here. In PEFT's files (its `target_parameters`, as of
PEFT 0.21) those of a fused tensor lie in one pair: A [E * rank, in], one expert after the other, and B [out, rank * E], whose columns are
ordered by rank and then by expert.

Written by the trainer at a publish, read by the embedded engine and by runs that continue from an adapter. A folder appears complete or
not at all, and nothing in it is executed or unpickled.
"""

import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save_file
from torch import Tensor

from offbeat.disk import discard
from offbeat.errors import ModelError, StorageError
from offbeat.model.fingerprint import fingerprint
from offbeat.model.fused_experts import PARTS, split_name
from offbeat.pulse import progress

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_INNER = ".base_layer"
"""PEFT wraps a module once for each of its adapted parameters, the first one innermost."""
_KEY = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])\.weight")
_UNSUPPORTED = {
    "use_dora": (False, None), "modules_to_save": (None, []), "rank_pattern": (None, {}), "alpha_pattern": (None, {}),
    "bias": ("none", None), "lora_bias": (False, None), "fan_in_fan_out": (False, None), "layer_replication": (None, []),
    "trainable_token_indices": (None, [], {}), "alora_invocation_tokens": (None, []),
    "use_qalora": (False, None), "use_bdlora": (False, None), "arrow_config": (None,), "kasa_config": (None,), "monteclora_config": (None,),
    # Other values change the base model's weights when PEFT loads the adapter.
    "init_lora_weights": (True, False, None, "gaussian", "orthogonal", "eva"),
}
"""Settings that would make an adapter more than A and B beside linear layers, with the values that would not."""


@dataclass(frozen=True, eq=False)
class Adapter:
    """One LoRA adapter: it adds scaling * (x A') B' to the output of each adapted linear layer.

    `pairs` are A [rank, in] and B [out, rank], float32, by the layer's name in the base model, such as model.layers.0.self_attn.q_proj.
    """

    rank: int
    scaling: float
    pairs: Mapping[str, tuple[Tensor, Tensor]]

    def named_tensors(self) -> dict[str, Tensor]:
        """Return the tensors, A [R, I] and B [O, R] with R the rank, under their names in PEFT's file."""
        return {
            f"{_PREFIX}{module}.lora_{side}.weight": tensor
            for module, pair in self.pairs.items() for side, tensor in zip("AB", pair, strict=True)}

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.named_tensors().values())

    def fingerprint(self) -> str:
        """Compute `offbeat.model.fingerprint` of the tensors in float32."""
        return fingerprint((name, _bytes(tensor)) for name, tensor in self.named_tensors().items())


def write_adapter(adapter: Adapter, folder: Path, *, base_model: str, dropout: float = 0.0) -> None:
    """Write a new PEFT folder. Raises StorageError if the folder exists already, or cannot be written."""
    if folder.exists():
        raise StorageError(f"the adapter folder {folder} exists; a version is written once, so choose another name")
    part = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    progress("write_adapter")
    try:
        part.mkdir(parents=True)
        tensors = {name: tensor.detach().to("cpu", torch.float32).contiguous() for name, tensor in _joined(adapter).items()}
        save_file(tensors, part / WEIGHTS_FILE, metadata={"format": "pt"})
        config = json.dumps(_config(adapter, base_model, dropout), indent=2, sort_keys=True)
        (part / CONFIG_FILE).write_text(config + "\n", encoding="utf-8")
        part.rename(folder)
    except (OSError, SafetensorError) as exc:
        raise StorageError(f"the adapter could not be written to {folder}: {exc}; free space or choose another folder") from exc
    finally:
        discard(part)


def read_adapter(folder: str | Path) -> Adapter:
    """Read a PEFT folder. Raises ModelError if it is damaged, or is anything but A and B of linear layers; the message says which."""
    folder = Path(folder)
    config = _read_config(folder)
    sides: dict[str, dict[str, Tensor]] = {}
    for name, tensor in _read_tensors(folder / WEIGHTS_FILE).items():
        match = _KEY.fullmatch(name)
        if match is None:
            raise ModelError(f"{folder} holds {name!r}, which is not A or B of a linear layer; only plain LoRA adapters can be used")
        sides.setdefault(match["module"], {})[match["side"]] = tensor.to(torch.float32)
    rank = config["r"]
    sides = _by_expert(sides, config, folder)
    for module, pair in sides.items():
        if pair.keys() != {"A", "B"} or pair["A"].ndim != 2 or pair["B"].ndim != 2 or not len(pair["A"]) == pair["B"].shape[1] == rank:
            raise ModelError(f"{folder} is damaged: A and B of {module} do not both have rank {rank}, as its {CONFIG_FILE} says")
    if not sides:
        raise ModelError(f"{folder} holds no adapted layer")
    if not all(tensor.isfinite().all() for pair in sides.values() for tensor in pair.values()):
        raise ModelError(f"{folder} holds numbers that are not finite")
    alpha = float(config["lora_alpha"])
    scaling = alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank
    return Adapter(rank, scaling, {module: (pair["A"], pair["B"]) for module, pair in sides.items()})


def _read_tensors(file: Path) -> dict[str, Tensor]:
    """Read a whole file. `safe_open` of safetensors 0.8 leaks 56 bytes for every tensor, which engines would notice after days of loads."""
    try:
        return load(file.read_bytes())
    except (OSError, SafetensorError) as exc:
        raise ModelError(f"{file} cannot be read as safetensors: {exc}") from exc


def _joined(adapter: Adapter) -> dict[str, Tensor]:
    """Return the tensors under their names in PEFT's file, with those of a fused tensor's experts in one pair."""
    plain: dict[str, tuple[Tensor, Tensor]] = {}
    fused: dict[str, dict[str, dict[int, tuple[Tensor, Tensor]]]] = {}
    for name, pair in adapter.pairs.items():
        if (of_expert := split_name(name)) is None:
            plain[name] = pair
        else:
            module, part, expert = of_expert
            fused.setdefault(module, {}).setdefault(part, {})[expert] = pair
    for module, parts in fused.items():
        there = [part for part in PARTS if part in parts]
        for depth, part in enumerate(reversed(there)):
            pairs = [parts[part][expert] for expert in range(len(parts[part]))]
            b = torch.stack([b for _, b in pairs], dim=-1)  # [out, rank, E]
            plain[module + _INNER * depth] = torch.cat([a for a, _ in pairs]), b.flatten(1)
    return replace(adapter, pairs=plain).named_tensors()


def _by_expert(sides: Mapping[str, dict[str, Tensor]], config: Mapping[str, Any], folder: Path) -> dict[str, dict[str, Tensor]]:
    """Return A and B by layer, with those of a fused tensor taken apart; the inverse of `_joined`.

    Raises ModelError if other parameters than fused experts are adapted, or the folder does not have what its configuration says.
    """
    named = config.get("target_parameters") or []
    parts = [part for part in PARTS if any(str(name).rpartition(".")[2] == part for name in named)]
    if others := [name for name in named if str(name).rpartition(".")[2] not in PARTS]:
        raise ModelError(
            f"{folder} is an adapter with target_parameters = {others}, which is not offered; of parameters, only {' and '.join(PARTS)} of"
            " experts can be adapted")
    rank, found = config["r"], {}
    for module, pair in sides.items():
        bare, depth = module.removesuffix(_INNER), int(module.endswith(_INNER))
        if not parts or not bare.endswith("experts"):
            found[module] = pair
            continue
        whole = pair.keys() == {"A", "B"} and all(side.ndim == 2 for side in pair.values())
        num_experts = len(pair["A"]) // rank if whole else 0
        if not num_experts or depth >= len(parts) or num_experts * rank != len(pair["A"]) or len(pair["A"]) != pair["B"].shape[1]:
            raise ModelError(f"{folder} is damaged: A and B of {module} are not those of experts with rank {rank}")
        part = parts[-1 - depth]
        for expert, (a, b) in enumerate(zip(pair["A"].split(rank), pair["B"].unflatten(1, (rank, num_experts)).unbind(-1), strict=True)):
            found[f"{bare}.{part}.{expert}"] = {"A": a.contiguous(), "B": b.contiguous()}
    return found


def _config(adapter: Adapter, base_model: str, dropout: float) -> dict[str, Any]:
    experts = [of_expert for module in adapter.pairs if (of_expert := split_name(module)) is not None]
    linear = sorted({module.rpartition(".")[2] for module in adapter.pairs if split_name(module) is None})
    # Only where there are experts: older readers do not know the key.
    parameters = {f"{module.rpartition('.')[2]}.{part}" for module, part, _ in experts}
    return {
        **({"target_parameters": sorted(parameters)} if parameters else {}),
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base_model, "r": adapter.rank,
        "lora_alpha": adapter.scaling * adapter.rank, "lora_dropout": dropout, "bias": "none", "inference_mode": True,
        "target_modules": linear or None,
    }


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as exc:
        raise ModelError(f"{folder} is no adapter: its {CONFIG_FILE} cannot be read; give a folder in PEFT's format") from exc
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise ModelError(f"{folder} is not a LoRA adapter: its peft_type is not LORA")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not (isinstance(rank, int) and rank >= 1 and isinstance(alpha, int | float) and math.isfinite(alpha)):
        raise ModelError(f"{folder} is damaged: its {CONFIG_FILE} has r = {rank!r} and lora_alpha = {alpha!r}")
    for name, plain in _UNSUPPORTED.items():
        if config.get(name, plain[0]) not in plain:
            raise ModelError(f"{folder} is an adapter with {name} = {config[name]!r}, which is not offered; only plain LoRA can be used")
    return config


def _bytes(tensor: Tensor) -> Any:
    return tensor.detach().to("cpu", torch.float32).contiguous().view(-1).view(torch.uint8).numpy()
