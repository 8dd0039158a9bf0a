"""Runs whose engine has int8 weights: each version is proven, and the difference to the trainer is shown and corrected for."""

import json
from pathlib import Path

import pytest
import torch

from offbeat.model.hf_io import read_safetensors
from offbeat.model.peft_io import read_adapter
from offbeat.weights.proof import TOLERANCES
from small_run import SmallRun, offbeat

ROOT = Path(__file__).parents[2]
SYNCHRONOUS = {"rollout__max_head_offpolicyness": "0", "inference__quantization": "int8"}


def proven_gaps(run: SmallRun, settings: dict[str, str]) -> list[float]:
    """Mean gaps of the steps of a run of three, each of whose versions is proven within the tolerance."""
    done = offbeat("train", *run.arguments(**settings, run__total_steps="3"), "--json", timeout_s=200)
    assert done.returncode == 0, done.stderr
    publishes = run.events("publish")
    assert [event["version"] for event in publishes] == [0, 1, 2, 3]
    assert not any(event["quarantined"] or event["inconclusive"] for event in publishes)
    assert all(0 < event["canary_gap"] < TOLERANCES["int8"] for event in publishes)
    return [row["policy/logprob_gap_mean"] for row in run.metrics() if row.get("policy/logprob_gap_mean")]


@pytest.mark.parametrize("settings", [
    {},
    pytest.param({"weights__channel": "collective", "weights__whole_every_versions": "3"}, marks=pytest.mark.whole_run),
    pytest.param({"model__lora__rank": "4"}, marks=pytest.mark.whole_run)], ids=["folders", "broadcasts", "adapter"])
def test_a_run_publishes_with_proofs_and_shows_the_difference(settings: dict[str, str], tmp_path: Path, model_dir: str) -> None:
    run = SmallRun(tmp_path, model_dir)
    gaps = proven_gaps(run, SYNCHRONOUS | settings)
    assert gaps and all(1e-5 < gap < 0.1 for gap in gaps), "of samples of the newest version, which float32 engines have to 1e-6"
    (advice,) = [event["text"] for event in run.events("advice") if "int8" in event["text"] and "corrects for it" in event["text"]]
    assert "algorithm.weight = 'mask' (0 to 5)" in advice


@pytest.mark.whole_run
def test_an_adapter_over_rounded_weights_is_published_for_whole_ones_and_the_difference_is_shown(tmp_path: Path, model_dir: str) -> None:
    run = SmallRun(tmp_path, model_dir)
    qlora = {"rollout__max_head_offpolicyness": "0", "model__lora__rank": "4", "model__quantization": "int8", "algorithm__kl_loss": "k3"}
    gaps = proven_gaps(run, qlora)
    assert gaps and all(1e-5 < gap < 0.1 for gap in gaps), "an adapter over whole weights has 1e-6"
    base, exported = (dict(read_safetensors(folder)) for folder in (model_dir, tmp_path / "small" / "export"))
    adapter, layer = read_adapter(tmp_path / "small" / "export" / "adapter"), "model.layers.0.mlp.down_proj"
    a, b = adapter.pairs[layer]
    merged = base[f"{layer}.weight"] + adapter.scaling * b @ a
    assert b.any() and torch.allclose(exported[f"{layer}.weight"], merged, atol=1e-6), "merged into the whole weights"


@pytest.mark.drill
@pytest.mark.timeout(600)
def test_sort_digits_is_learned_with_an_int8_engine(tmp_path: Path) -> None:
    """benchmarks/int8_learning.py compares it with float32 over several seeds."""
    settings = {
        "run.dir": tmp_path, "run.name": "int8", "run.total_steps": 30, "inference.quantization": "int8", "evaluate.every_steps": 0,
        "checkpoint.export": "false"}
    arguments = [part for key, value in settings.items() for part in (f"--{key}", str(value))]
    done = offbeat("train", str(ROOT / "examples" / "sort_digits.toml"), *arguments, "--json", timeout_s=580)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "int8" / "result.json").read_text())
    assert result["heldout_after"] > result["heldout_before"] + 0.2
