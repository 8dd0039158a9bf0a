"""What a training step is chosen to do on machines that are pretended here, and why."""

import json
from pathlib import Path
from typing import Any

import pytest

from memory_tables import MODELS
from offbeat.config.for_processes import PlanConfig
from offbeat.config.root import Config
from offbeat.machine import Device
from offbeat.runs.step_choice import choose_step, shape_of, step_choices

GIB = 2**30
H100 = Device("NVIDIA H100", 80 * GIB, has_bf16=True)
V100 = Device("Tesla V100", 32 * GIB, has_bf16=False)


def configured(
    *, path: str = "some/model", lora: int = 0, form: str = "none", shares: bool = False, turns: bool = False, algorithm: Any = None,
    devices: int = 1, **train: Any,
) -> PlanConfig:
    return Config.model_validate({
        "model": {"path": path, "lora": {"rank": lora}, "quantization": form}, "cluster": {"share_devices": shares, "take_turns": turns},
        "algorithm": algorithm or {}, "train": {"devices_per_rank": devices, **train}}).for_plan


def chosen(config: PlanConfig, device: Device | None = H100, model: str = "Qwen3-1.7B") -> tuple[str, str]:
    result = choose_step(config, device=device, shape=MODELS.get(model)).train
    return result.precision, result.gradient_checkpointing


def why(config: PlanConfig, device: Device | None = H100, model: str = "Qwen3-1.7B") -> dict[str, str]:
    return {choice.setting: choice.why for choice in step_choices(config, device=device, shape=MODELS.get(model))}


def test_on_cpus_everything_is_float32_and_kept() -> None:
    assert chosen(configured(devices=0), None) == ("float32", "off")
    assert Config().train.computes_in == "float32" and Config().train.recomputes == "off", "also where nobody has chosen"


@pytest.mark.parametrize(("device", "model", "changes", "expected"), [
    (H100, "Qwen3-1.7B", {"parallel": {"shard": 8}, "num_ranks": 8}, ("bf16_mixed", "off")),
    (H100, "Qwen3-1.7B", {}, ("bf16_mixed", "selective")),
    (H100, "Qwen3-1.7B", {"offload_optimizer": True}, ("bf16_mixed", "selective")),
    (H100, "Qwen3-8B", {"parallel": {"shard": 8}, "num_ranks": 8}, ("bf16_mixed", "full")),
    (H100, "Qwen3-0.6B", {"max_tokens_per_microbatch": 8192}, ("bf16_mixed", "off")),
    (V100, "Qwen3-0.6B", {}, ("float32", "full")),
    (Device("NVIDIA B200", 180 * GIB, has_bf16=True), "Qwen3-1.7B", {}, ("bf16_mixed", "off")),
    (None, "Qwen3-1.7B", {}, ("float32", "full")),
    (H100, "a mixture", {}, ("bf16_mixed", "full")),
    (H100, "Qwen3-1.7B", {"precision": "float32", "gradient_checkpointing": "off"}, ("float32", "off")),
    (H100, "Qwen3-1.7B", {"compile": True}, ("bf16_mixed", "off")),
])
def test_a_device_is_used_as_its_memory_and_its_formats_allow(
    device: Device | None, model: str, changes: dict[str, Any], expected: tuple[str, str],
) -> None:
    assert chosen(configured(**changes), device, model) == expected


def test_engines_on_the_same_device_and_other_models_beside_the_policy_leave_less() -> None:
    small = {"max_tokens_per_microbatch": 8192}
    assert chosen(configured(**small)) == ("bf16_mixed", "off")
    assert chosen(configured(shares=True, **small)) == ("bf16_mixed", "full")
    assert chosen(configured(shares=True, turns=True, **small)) == ("bf16_mixed", "off"), "engines that sleep take nothing"
    assert chosen(configured(algorithm={"preset": "ppo"}, max_tokens_per_microbatch=6144)) == ("bf16_mixed", "selective")


def test_a_frozen_model_takes_less_and_what_its_adapters_add_cannot_be_kept_in_part() -> None:
    assert chosen(configured(lora=8, max_tokens_per_microbatch=16384)) == ("bf16_mixed", "off")
    assert chosen(configured(lora=8, max_tokens_per_microbatch=32768)) == ("bf16_mixed", "full")
    card = Device("a card", 24 * GIB, has_bf16=True)
    assert chosen(configured(lora=16, max_tokens_per_microbatch=4096), card) == ("bf16_mixed", "full")
    assert chosen(configured(lora=16, form="nf4", max_tokens_per_microbatch=4096), card) == ("bf16_mixed", "off"), "rounded, it is smaller"


def test_reasons_name_what_decided() -> None:
    assert why(configured())["train.gradient_checkpointing"] == (
        "beside 25.6 GiB of weights and states, 42.4 GiB of NVIDIA H100 are left for the 58.0 GiB of activations of 16384 tokens")
    assert why(configured(), V100)["train.precision"] == "Tesla V100 does not compute in bfloat16"
    assert "is not known" in why(configured(), None)["train.precision"]
    assert why(configured(path=""))["train.gradient_checkpointing"] == "a tiny model fits anywhere"
    assert set(why(configured(precision="float32", gradient_checkpointing="off")).values()) >= {"as configured"}


def test_shapes_are_read_from_a_folder_and_left_open_for_what_is_no_dense_decoder(tmp_path: Path) -> None:
    dense = {"model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128,
             "vocab_size": 100}
    for contents, known in ((dense, True), ({**dense, "num_experts": 8}, False), ({"model_type": "gpt2"}, False)):
        (tmp_path / "config.json").write_text(json.dumps(contents))
        assert (shape_of(configured(path=str(tmp_path))) is not None) == known
    assert shape_of(configured(path="")) is None
