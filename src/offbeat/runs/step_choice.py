"""Chooses precision and activation checkpointing of a training step, where the configuration leaves them open ("auto").

Called when devices have been chosen and before anything is started, so that a run's own `config.toml` states the choice; `offbeat doctor`
reports it with the reason, and so does `offbeat config check` on a machine with devices. Torch-free: it reads the driver's description of a
device and the model's `config.json`. The ranks check their own estimate of memory before they load anything.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from offbeat.config.for_processes import PlanConfig
from offbeat.data.model_folder import read_model_config
from offbeat.errors import ModelError
from offbeat.machine import Device
from offbeat.runs.memory import ModelShape, TrainedAdapter, rank_memory

_USABLE = 0.85
"""Share of a device's memory that an estimate by formula may take; a rank's own later estimate may take more."""

_BESIDE_ENGINES = 0.6
"""Share of a device that a rank has beside engines, which are told to take 0.4."""

_SELECTIVE = 0.65
"""Activations kept by "selective", as a share of the estimate of all: 0.61 was counted on Qwen3-1.7B, 0.63 on Qwen3-8B (docs/gpu.md)."""

_GIB = 2**30


@dataclass(frozen=True)
class Choice:
    """Value of a setting, "auto" while it is open, and the reason; e.g. "train.precision", "float32", "as configured"."""

    setting: str
    value: str
    why: str

    def __str__(self) -> str:
        return f"{self.setting} = {self.value}: {self.why}"


def shape_of(config: PlanConfig) -> ModelShape | None:
    """Return the sizes of a run's model; None if there is no model yet, or it is no dense decoder, for which there is no formula."""
    try:
        found = read_model_config(config.model.path) if config.model.path else {}
        own = found.get("text_config") or found
        return None if any("experts" in name and own[name] for name in own) else ModelShape.of(found)
    except (ModelError, KeyError, TypeError):
        return None


def choose_step(config: PlanConfig, *, device: Device | None, shape: ModelShape | None) -> PlanConfig:
    """Return the sections with the values of `step_choices` in place of "auto"."""
    found = {choice.setting: choice.value for choice in step_choices(config, device=device, shape=shape)}
    updates: dict[str, Any] = {name: found[f"train.{name}"] for name in ("precision", "gradient_checkpointing")}
    return config.model_copy(update={"train": config.train.model_copy(update=updates)})


def step_choices(config: PlanConfig, *, device: Device | None, shape: ModelShape | None) -> Iterator[Choice]:
    """Yield the choices for a training step; `config` has its devices chosen, and a driver has described `device`, if ranks have one."""
    train = config.train
    precision = _precision(config, device) if train.precision == "auto" else Choice("train.precision", train.precision, "as configured")
    yield precision
    yield (
        _recomputation(config, device, shape, mixed=precision.value == "bf16_mixed") if train.gradient_checkpointing == "auto"
        else Choice("train.gradient_checkpointing", train.gradient_checkpointing, "as configured"))
    why_not = "try it where they are off" if train.devices_per_rank else "seldom pays on a CPU"
    yield Choice("train.compile", str(train.compile).lower(), (
        "as configured" if train.compile
        else f"compiling takes a minute and a C compiler, and excludes activations that are computed again; {why_not}"))
    yield _attention(device, mixed=precision.value == "bf16_mixed")


def _precision(config: PlanConfig, device: Device | None) -> Choice:
    value, why = "float32", ""
    if not config.train.devices_per_rank:
        why = "train ranks compute on CPUs, which are seldom faster in bfloat16"
    elif not config.model.path:
        why = "a tiny model gains nothing from bfloat16"
    elif device is None:
        why = "it is not known whether the ranks' devices compute in bfloat16"
    elif not device.has_bf16:
        why = f"{device.name} does not compute in bfloat16"
    else:
        value, why = "bf16_mixed", f"{device.name} computes in bfloat16; weights, moments and sums of gradients stay float32"
    return Choice("train.precision", value, why)


def _recomputation(config: PlanConfig, device: Device | None, shape: ModelShape | None, *, mixed: bool) -> Choice:
    train, lora = config.train, config.model.lora.rank
    value, why = "off", ""
    if not train.devices_per_rank:
        why = "train ranks compute on CPUs, where memory is seldom what ends first"
    elif not config.model.path:
        why = "a tiny model fits anywhere"
    elif train.compile:
        why = "torch leaves layers that it computes again uncompiled"
    elif device is None or shape is None:
        value, why = "full", f"the {'size of the model' if shape is None else 'memory of the devices'} is not known, so little is kept"
    else:
        tokens, num_shards = -(-train.max_tokens_per_microbatch // train.parallel.cp), train.parallel.shard * train.parallel.tp
        adapter = TrainedAdapter(lora, half=config.model.number_format == "bfloat16", form=config.model.quantization) if lora else None
        found = rank_memory(shape, tokens=tokens, num_shards=num_shards, mixed=mixed, offloads=train.offload_optimizer, adapter=adapter)
        another = rank_memory(shape, tokens=0, num_shards=num_shards).weights
        states = found.total - found.activations
        states += another * (config.algorithm.needs_reference and not lora) + 4 * another * config.algorithm.needs_critic
        room = _USABLE * device.total_bytes * (_BESIDE_ENGINES if config.cluster.computes_beside_engines else 1) - states
        kept = found.activations // train.parallel.tp
        fits = {"off": kept, **({} if lora else {"selective": int(_SELECTIVE * kept)})}
        value = next((name for name, size in fits.items() if size <= room), "full")
        why = (
            f"beside {states / _GIB:.1f} GiB of weights and states, {max(room, 0) / _GIB:.1f} GiB of {device.name} are left for the"
            f" {kept / _GIB:.1f} GiB of activations of {train.max_tokens_per_microbatch} tokens")
    return Choice("train.gradient_checkpointing", value, why)


def _attention(device: Device | None, *, mixed: bool) -> Choice:
    if device is not None and mixed:
        return Choice("attention", "torch's flash kernel for rows of many lengths", "the ranks' devices compute in bfloat16")
    return Choice("attention", "torch's scaled_dot_product_attention, by sequences of similar length", (
        "the kernel for rows of many lengths is for CUDA in bfloat16"))
