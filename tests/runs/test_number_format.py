"""Which number format engines get on machines that are pretended here, and what is said of a slow one."""

from dataclasses import replace
from typing import Any

import pytest

from offbeat.config.for_processes import PlanConfig
from offbeat.config.root import Config
from offbeat.cpu import Cpu
from offbeat.errors import ConfigError, MissingExtraError
from offbeat.machine import Device
from offbeat.runs import number_format
from offbeat.runs.number_format import choose_number_format, engine_format, format_choice, slow_dtype, slow_formats

LAPTOP, SERVER = Cpu("Laptop", "AVX2", has_bf16=False), Cpu("Server", "AMX", has_bf16=True)
H100, V100 = Device("NVIDIA H100", 2**36, has_bf16=True), Device("Tesla V100", 2**35, has_bf16=False)


def configured(dtype: str = "auto", *, path: str = "some/model", precision: str = "auto", ray: str = "", **inference: Any) -> PlanConfig:
    cluster = {"launcher": "ray", "ray_address": ray} if ray else {}
    return Config.model_validate({
        "model": {"path": path, "dtype": dtype}, "inference": inference, "train": {"precision": precision}, "cluster": cluster}).for_plan


@pytest.mark.parametrize(("config", "device", "cpu", "value", "why"), [
    (configured(), None, LAPTOP, "float32", "the CPU (Laptop, AVX2) has no instructions for products in bfloat16"),
    (configured(), None, SERVER, "bfloat16", "the CPU (Server, AMX) has instructions for products in bfloat16"),
    (configured(devices_per_engine=1), H100, LAPTOP, "bfloat16", "NVIDIA H100 computes in bfloat16"),
    (configured(devices_per_engine=1), V100, SERVER, "float32", "Tesla V100 does not compute in bfloat16"),
    (configured(devices_per_engine=1), None, SERVER, "float32", "it is not known whether the engines' devices compute in bfloat16"),
    (configured(ray="auto"), None, SERVER, "float32", "it is not known which CPUs the cluster has"),
    (configured(path=""), None, SERVER, "float32", "a tiny model gains nothing from bfloat16"),
    (configured(urls=["http://a:1"]), None, SERVER, "float32", "engines by URL have a format of their own, and are given all digits"),
    (configured(quantization="int8"), None, SERVER, "float32", "products are in int8, and the rest takes little time"),
    (configured(path="", engine="vllm", quantization="int4"), None, LAPTOP, "bfloat16",
     "products are in int4, which vllm makes of bfloat16 alone here"),
    (configured(engine="vllm", quantization="int8"), None, LAPTOP, "float32", "products are in int8, and the rest takes little time"),
    (configured(engine="vllm", quantization="int8"), None, SERVER, "bfloat16",
     "products are in int8, which vllm makes of bfloat16 alone here"),
    (configured(engine="vllm", quantization="int8", devices_per_engine=1), H100, LAPTOP, "bfloat16",
     "products are in int8, which vllm makes of bfloat16 alone here"),
    (configured("bfloat16"), None, LAPTOP, "bfloat16", "as configured")])
def test_auto_takes_bfloat16_where_it_is_quick(config: PlanConfig, device: Device | None, cpu: Cpu, value: str, why: str) -> None:
    found = format_choice(config, device=device, cpu=cpu)
    assert (found.setting, found.value, found.why) == ("model.dtype", value, why)


def test_the_choice_stands_in_the_configuration_and_is_float32_until_then(monkeypatch: pytest.MonkeyPatch) -> None:
    assert configured().model.number_format == "float32"
    for cpu, value in ((SERVER, "bfloat16"), (LAPTOP, "float32")):
        monkeypatch.setattr(number_format, "this_cpu", lambda cpu=cpu: cpu)
        chosen = choose_number_format(configured())
        assert chosen.model.dtype == chosen.model.number_format == value
        assert engine_format("auto", device=None) == value
    assert choose_number_format(configured("bfloat16")).model.dtype == engine_format("bfloat16", device=None) == "bfloat16"


def test_float32_is_refused_where_the_kernels_of_a_form_do_not_take_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(number_format, "smallest_device", lambda: H100)
    for cpu, devices, refused in ((LAPTOP, 0, False), (SERVER, 0, True), (LAPTOP, 1, True)):
        monkeypatch.setattr(number_format, "this_cpu", lambda cpu=cpu: cpu)
        config = configured("float32", engine="vllm", quantization="int8", devices_per_engine=devices)
        if refused:
            with pytest.raises(ConfigError, match="model.dtype must be 'bfloat16' or 'auto' with inference.quantization = 'int8' here"):
                choose_number_format(config)
        else:
            assert choose_number_format(config) is config


def test_8_bit_floats_are_refused_on_a_device_without_them(monkeypatch: pytest.MonkeyPatch) -> None:
    config = configured("bfloat16", engine="vllm", quantization="fp8", devices_per_engine=1)
    for has_fp8 in (True, None):
        monkeypatch.setattr(number_format, "smallest_device", lambda known=has_fp8: replace(H100, has_fp8=known))
        assert choose_number_format(config) is config
    monkeypatch.setattr(number_format, "smallest_device", lambda: Device("NVIDIA A100", 2**36, has_bf16=True, has_fp8=False))
    with pytest.raises(ConfigError, match="must be 'none', 'int8' or 'int4' on NVIDIA A100, got 'fp8'; vLLM's kernels for it need"):
        choose_number_format(config)


def test_4_bits_below_an_adapter_are_refused_before_anything_starts_where_their_package_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config.model_validate({"model": {"quantization": "nf4", "lora": {"rank": 4}}}).for_plan
    monkeypatch.setattr(number_format, "QLORA", ("no_such_package",))
    with pytest.raises(MissingExtraError, match=r"^model.quantization = 'nf4' needs no_such_package, which is not installed; run"):
        choose_number_format(config)


def test_a_format_that_is_slow_here_is_honoured_and_said() -> None:
    said = list(slow_formats(configured("bfloat16", precision="bf16_mixed"), cpu=LAPTOP))
    slow = "is many times slower than float32 on this CPU (Laptop, AVX2), which has no instructions for products in bfloat16;"
    assert said == [
        f'model.dtype = bfloat16 {slow} "auto" takes float32 here', f'train.precision = bf16_mixed {slow} "auto" is float32 here']
    assert slow_dtype("bfloat16", cpu=LAPTOP) == f'--dtype bfloat16 {slow} "auto" takes float32 here'
    for config, cpu in (
        (configured("bfloat16"), SERVER), (configured("float32"), LAPTOP), (configured("bfloat16", devices_per_engine=1), LAPTOP),
        (configured("bfloat16", urls=["http://a:1"]), LAPTOP), (configured("bfloat16", ray="auto"), LAPTOP)):
        assert not list(slow_formats(config, cpu=cpu))
    assert not slow_dtype("float32", cpu=LAPTOP) and not slow_dtype("bfloat16", cpu=SERVER)
