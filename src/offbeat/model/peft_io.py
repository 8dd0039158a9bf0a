"""Reads and writes LoRA adapters as PEFT folders (adapter_config.json and adapter_model.safetensors).

Written by the trainer at a publish, read by the embedded engine and by runs that continue from an adapter. A folder appears complete or
not at all, and nothing in it is executed or unpickled.
"""

import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from offbeat.disk import discard
from offbeat.errors import ModelError, StorageError
from offbeat.model.fingerprint import fingerprint
from offbeat.pulse import progress

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_KEY = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])\.weight")
_UNSUPPORTED = {
    "use_dora": (False, None), "modules_to_save": (None, []), "rank_pattern": (None, {}), "alpha_pattern": (None, {}),
    "bias": ("none", None), "lora_bias": (False, None), "fan_in_fan_out": (False, None), "layer_replication": (None, []),
    "target_parameters": (None, []), "trainable_token_indices": (None, [], {}), "alora_invocation_tokens": (None, []),
    "use_qalora": (False, None), "use_bdlora": (False, None), "arrow_config": (None,), "kasa_config": (None,), "monteclora_config": (None,),
    # Other values change the base model's weights when PEFT loads the adapter.
    "init_lora_weights": (True, False, None, "gaussian", "orthogonal", "eva"),
}
"""Settings that would make an adapter more than A and B beside linear layers, with the values that would not."""


@dataclass(frozen=True, eq=False)
class Adapter:
    """One LoRA adapter: it adds scaling * (x A') B' to the output of each adapted linear layer.

    Attributes:
        pairs: A [rank, in] and B [out, rank], float32, by the layer's name in the base model, such as model.layers.0.self_attn.q_proj.
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
    """Write a new PEFT folder.

    Raises:
        StorageError: the folder exists already, or cannot be written.
    """
    if folder.exists():
        raise StorageError(f"the adapter folder {folder} exists; a version is written once, so choose another name")
    part = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    progress("write_adapter")
    try:
        part.mkdir(parents=True)
        tensors = {name: tensor.detach().to("cpu", torch.float32).contiguous() for name, tensor in adapter.named_tensors().items()}
        save_file(tensors, part / WEIGHTS_FILE, metadata={"format": "pt"})
        config = json.dumps(_config(adapter, base_model, dropout), indent=2, sort_keys=True)
        (part / CONFIG_FILE).write_text(config + "\n", encoding="utf-8")
        part.rename(folder)
    except (OSError, SafetensorError) as exc:
        raise StorageError(f"the adapter could not be written to {folder}: {exc}; free space or choose another folder") from exc
    finally:
        discard(part)


def read_adapter(folder: str | Path) -> Adapter:
    """Read a PEFT folder.

    Raises:
        ModelError: it is no LoRA adapter, is damaged, or has more than A and B of linear layers; the message says which.
    """
    folder = Path(folder)
    config = _read_config(folder)
    sides: dict[str, dict[str, Tensor]] = {}
    for name, tensor in _read_tensors(folder / WEIGHTS_FILE):
        match = _KEY.fullmatch(name)
        if match is None:
            raise ModelError(f"{folder} holds {name!r}, which is not A or B of a linear layer; only plain LoRA adapters can be used")
        sides.setdefault(match["module"], {})[match["side"]] = tensor.to(torch.float32)
    rank = config["r"]
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


def _config(adapter: Adapter, base_model: str, dropout: float) -> dict[str, Any]:
    return {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base_model, "r": adapter.rank,
        "lora_alpha": adapter.scaling * adapter.rank, "lora_dropout": dropout, "bias": "none", "inference_mode": True,
        "target_modules": sorted({module.rpartition(".")[2] for module in adapter.pairs}),
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


def _read_tensors(file: Path) -> Iterable[tuple[str, Tensor]]:
    try:
        with safe_open(file, framework="pt") as tensors:
            return [(name, tensors.get_tensor(name)) for name in tensors.keys()]  # noqa: SIM118
    except (OSError, SafetensorError) as exc:
        raise ModelError(f"{file} cannot be read as safetensors: {exc}") from exc


def _bytes(tensor: Tensor) -> Any:
    return tensor.detach().to("cpu", torch.float32).contiguous().view(-1).view(torch.uint8).numpy()
