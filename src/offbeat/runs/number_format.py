"""Chooses the number format of engines where `model.dtype` leaves it open ("auto"), and warns where a format is slow on this machine.

Called before anything is started, so that a run's own `config.toml` states the choice; `offbeat doctor` and `offbeat config check` report
it with the reason. Torch-free: devices are described by their driver, and the CPU by `offbeat.cpu`.
"""

from collections.abc import Iterator
from typing import Literal

from offbeat.config.for_processes import PlanConfig
from offbeat.config.inference import InferenceConfig
from offbeat.config.model import NumberFormat
from offbeat.cpu import Cpu, this_cpu
from offbeat.errors import ConfigError
from offbeat.extras import QLORA, require
from offbeat.machine import Device, smallest_device
from offbeat.runs.step_choice import Choice


def choose_number_format(config: PlanConfig) -> PlanConfig:
    """Return the sections, in which devices are chosen, with a format in place of "auto".

    Raises:
        ConfigError: engines' devices do not compute in the form that their weights are to have.
        MissingExtraError: what rounds the frozen weights of an adapter is not installed.
    """
    if config.model.quantization == "nf4" and not config.cluster.ray_address:
        require("qlora", QLORA, wanted_by="model.quantization = 'nf4'")
    device = smallest_device() if config.inference.devices_per_engine and not config.cluster.ray_address else None
    if config.inference.quantization == "fp8" and device is not None and device.has_fp8 is False:
        raise ConfigError(
            f"inference.quantization must be 'none', 'int8' or 'int4' on {device.name}, got 'fp8'; vLLM's kernels for it need a device of"
            " compute capability 8.9 or later")
    if config.model.dtype == "float32" and _needs_bf16(config.inference, this_cpu()):
        raise ConfigError(
            f"model.dtype must be 'bfloat16' or 'auto' with inference.quantization = '{config.inference.quantization}' here, got 'float32';"
            f" the kernels of {config.inference.engine} for devices, and for CPUs with AMX, take no other")
    if config.model.dtype != "auto":
        return config
    value = format_choice(config, device=device, cpu=this_cpu()).value
    return config.model_copy(update={"model": config.model.model_copy(update={"dtype": value})})


def format_choice(config: PlanConfig, *, device: Device | None, cpu: Cpu) -> Choice:
    """Return the engines' number format, such as "bfloat16", and the reason; `device` is an engine's, if its driver describes one."""
    model, inference = config.model, config.inference
    value, why = "float32", ""
    if model.dtype != "auto":
        return Choice("model.dtype", model.dtype, "as configured")
    if inference.form is not None:
        value = "bfloat16" if _needs_bf16(inference, cpu) else inference.form.formats[0]
        why = f"products are in {inference.quantization}, " + (
            "and the rest takes little time" if value == "float32" else f"which {inference.engine} makes of {value} alone here")
    elif not model.path:
        why = "a tiny model gains nothing from bfloat16"
    elif inference.urls:
        why = "engines by URL have a format of their own, and are given all digits"
    elif inference.devices_per_engine and device is None:
        why = "it is not known whether the engines' devices compute in bfloat16"
    elif inference.devices_per_engine and device is not None:
        value = "bfloat16" if device.has_bf16 else "float32"
        why = f"{device.name} {'computes' if device.has_bf16 else 'does not compute'} in bfloat16"
    elif config.cluster.ray_address:
        why = "it is not known which CPUs the cluster has"
    else:
        value = "bfloat16" if cpu.has_bf16 else "float32"
        why = f"the CPU ({cpu}) has {'' if cpu.has_bf16 else 'no '}instructions for products in bfloat16"
    return Choice("model.dtype", value, why)


def slow_formats(config: PlanConfig, *, cpu: Cpu) -> Iterator[str]:
    """Yield a sentence for each setting by which this CPU would compute in bfloat16 without instructions for it; devices are chosen."""
    if cpu.has_bf16 or config.cluster.ray_address:
        return
    serves = not (config.inference.devices_per_engine or config.inference.urls)
    asked = (
        (config.model.dtype == "bfloat16" and serves, "model.dtype = bfloat16", "takes float32 here"),
        (config.train.precision == "bf16_mixed" and not config.train.devices_per_rank, "train.precision = bf16_mixed", "is float32 here"))
    for acts, setting, instead in asked:
        if acts:
            yield _slow(setting, instead, cpu)


def engine_format(dtype: Literal["auto", NumberFormat], *, device: int | None) -> NumberFormat:
    """Return the format of an engine on its own, on the accelerator with this number or on the CPU."""
    if dtype != "auto":
        return dtype
    found = smallest_device() if device is not None else None
    return "bfloat16" if (this_cpu().has_bf16 if device is None else found is not None and found.has_bf16) else "float32"


def slow_dtype(dtype: NumberFormat, *, cpu: Cpu) -> str:
    """Return a warning for an engine that computes in a slow format on a CPU; "" if it is not slow."""
    return "" if cpu.has_bf16 or dtype == "float32" else _slow(f"--dtype {dtype}", "takes float32 here", cpu)


def _slow(setting: str, instead: str, cpu: Cpu) -> str:
    return (f"{setting} is many times slower than float32 on this CPU ({cpu}), which has no instructions for products in bfloat16;"
            f' "auto" {instead}')


def _needs_bf16(inference: InferenceConfig, cpu: Cpu) -> bool:
    """Whether kernels of an engine's form of weights take no other format on its devices, or on this CPU."""
    return inference.form is not None and not inference.kind.inside and (inference.devices_per_engine > 0 or cpu.instructions == "AMX")
