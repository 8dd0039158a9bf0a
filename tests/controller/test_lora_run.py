"""Whole runs that train an adapter: the real command, with a controller and in SPMD mode; stopped in between, and gone on."""

from pathlib import Path

import pytest
from peft import PeftModel
from transformers import AutoModelForCausalLM

from offbeat.model.load import load_causal_lm
from small_run import SmallRun, offbeat, torchrun

LORA = {"model__lora__rank": "4", "inference__num_engines": "2"}


@pytest.fixture(params=[pytest.param("controller", marks=pytest.mark.drill), pytest.param("spmd", marks=pytest.mark.whole_run)])
def start(request: pytest.FixtureRequest):
    """The command in a mode."""
    return offbeat if request.param == "controller" else lambda *arguments: torchrun(*arguments, world=2)


def test_an_adapter_is_trained_published_saved_and_gone_on_from(start, tmp_path: Path, model_dir: str) -> None:
    run = SmallRun(tmp_path, model_dir)
    for steps in (2, 3):
        often = {"checkpoint__every_steps": "1", "checkpoint__export_every_steps": "2", "evaluate__every_steps": "1"}
        done = start("train", *run.arguments(**LORA, **often, run__total_steps=str(steps)))
        assert done.returncode == 0, done.stderr
    publishes = run.events("publish")
    assert [event["version"] for event in publishes] == [0, 1, 2, 2, 3]
    assert all(event["canary_gap"] < 1e-4 and not event["quarantined"] for event in publishes)
    assert not run.events("rejected"), "a rollout was played before a version was served"
    assert [row["global_step"] for row in run.metrics()] == [1, 2, 3]
    assert all(row["step/publish_s"] > 0 and row["policy/canary_gap"] < 1e-4 for row in run.metrics())
    for kind in ("evaluation", "checkpoint"):
        for event in run.events(kind):
            assert any(publish["version"] == event["global_step"] and publish["time_s"] < event["time_s"] for publish in publishes), kind
    for step in (1, 2, 3):
        versions = {v for group in run.groups(step) for t in group["trajectories"] for v in t["versions"] if v >= 0}
        assert versions and max(versions) < step + 1 and min(versions) >= step - 2
    assert [path.name for path in (run.folder / "exports").iterdir()] == ["step-00000002"]
    assert (run.folder / "exports" / "step-00000002" / "adapter" / "adapter_model.safetensors").exists()
    export = run.folder / "export"
    merged = load_causal_lm(str(export), attention="sdpa").state_dict()
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model_dir), str(export / "adapter")).merge_and_unload()
    for name, tensor in adapted.state_dict().items():
        assert (merged[name] - tensor).abs().max() < 1e-6, name
