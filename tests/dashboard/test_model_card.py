"""The model card that is made from a run's files."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from offbeat.dashboard.model_card import CardDetails, base_of, card_text
from offbeat.dashboard.run_files import read_run

RL = {"global_step": 4, "reward/mean": 0.5}


def make_card(folder: Path, config: str, *rows: dict[str, Any], result: dict[str, Any] | None = None, **said: Any) -> tuple[dict, str]:
    """Write a run, and return its card's metadata and text."""
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(config)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "result.json").write_text(json.dumps(result or {}))
    run = read_run(folder)
    card = CardDetails("me/model", base=base_of(run, folder), step=None, is_adapter=False, is_classifier=False)
    text = card_text(run, folder, CardDetails(**(card.__dict__ | said)))
    _, metadata, body = text.split("---\n", 2)
    return yaml.safe_load(metadata), body


def test_hub_ids_are_metadata(tmp_path: Path) -> None:
    metadata, text = make_card(
        tmp_path / "run", '[model]\npath = "Qwen/Qwen3-0.6B"\n[data]\npath = "openai/gsm8k:main"\n[algorithm]\npreset = "grpo"\n'
        '[rollout]\nreward = "/home/me/rewards.py:mine"\n', RL)
    assert metadata == {
        "library_name": "transformers", "pipeline_tag": "text-generation", "base_model": "Qwen/Qwen3-0.6B", "datasets": ["openai/gsm8k"],
        "tags": ["offbeat", "grpo"]}
    assert "trained with Offbeat by reinforcement learning (grpo)" in text
    assert "| data | openai/gsm8k:main |" in text and "| reward | rewards.py:mine |" in text and "| steps | 4 |" in text


def test_no_folder_of_the_machine_is_named(tmp_path: Path) -> None:
    (tmp_path / "models" / "small").mkdir(parents=True)
    metadata, text = make_card(
        tmp_path / "runs" / "run", '[model]\npath = "models/small"\n[data.sets.a]\npath = "/home/me/a.jsonl"\n'
        '[data.sets.b]\npath = "/home/me/runs/.data/1f.jsonl"\n[data.sets.c]\ntask = "addition"\n', RL)
    assert "base_model" not in metadata and "datasets" not in metadata
    assert "| base model | the model small |" in text
    assert "| data | a.jsonl, rows that a Python program gave, the task addition |" in text
    assert "/home" not in text and str(tmp_path) not in text


def test_evaluations_are_those_before_the_training_and_of_the_model_itself(tmp_path: Path) -> None:
    rows = [{"global_step": step, "reward/mean": 0.5, "eval/accuracy": step / 10, "eval/hard/pass_at_4": 0.25} for step in (0, 4, 8)]
    _, text = make_card(tmp_path / "last", "", *rows)
    assert "| accuracy | 0 | 0.8 |" in text and "| hard: pass@4 | 0.25 | 0.25 |" in text
    _, text = make_card(tmp_path / "step", "", *rows, step=4)
    assert "| accuracy | 0 | 0.4 |" in text and "| steps | 4 |" in text
    _, text = make_card(tmp_path / "between", "", *rows, step=6)
    assert "## Evaluation" not in text  # nothing was measured of this model


def test_an_evaluation_before_the_training_is_not_taken_for_one_of_the_model(tmp_path: Path) -> None:
    before = {"global_step": 0, "eval/accuracy": 0.8, "eval/hard/accuracy": 0.5}
    _, text = make_card(tmp_path / "never", "", before, RL)
    assert "## Evaluation" not in text
    _, text = make_card(tmp_path / "early", "", before, {"global_step": 2, "eval/accuracy": 0.9}, RL)
    assert "| accuracy | 0.8 | 0.9, after step 2 of 4 |" in text and "hard" not in text


@pytest.mark.parametrize(("row", "config", "tag", "words"), [
    ({"train/loss": 1.0}, "", "sft", "supervised fine-tuning"),
    ({"preference/accuracy": 1.0}, "[preference]\nloss = 'simpo'\n", "simpo", "preference training (simpo)"),
    ({"reward_model/accuracy": 1.0}, "", "reward-model", "learning a reward from pairs of answers")])
def test_other_kinds_of_training_are_named(row: dict, config: str, tag: str, words: str, tmp_path: Path) -> None:
    metadata, text = make_card(tmp_path / "run", config, {"global_step": 1} | row, is_classifier=tag == "reward-model")
    assert metadata["tags"] == ["offbeat", tag] and words in text and "| reward |" not in text
    assert ("AutoModelForSequenceClassification" in text) == (tag == "reward-model")


def test_an_adapter_says_on_which_base_it_is_loaded(tmp_path: Path) -> None:
    config = '[model]\npath = "/home/me/base"\n[model.lora]\nrank = 8\n'
    metadata, text = make_card(tmp_path / "local", config, RL, is_adapter=True)
    assert metadata["library_name"] == "peft" and "lora" in metadata["tags"]
    assert 'from_pretrained("PATH-OF-THE-BASE-MODEL")' in text and "A LoRA adapter for the model base" in text
    metadata, text = make_card(tmp_path / "hub", config, RL, is_adapter=True, base="them/base")
    assert metadata["base_model"] == "them/base" and 'from_pretrained("them/base")' in text


def test_what_was_set_by_whoever_made_the_run_cannot_break_out_of_its_place(tmp_path: Path) -> None:
    metadata, text = make_card(
        tmp_path / "run", '[algorithm]\npreset = "x\\n---\\nlicence: mit"\n[data]\npath = "/a|b\\nc<script>"\n', RL)
    assert set(metadata) == {"library_name", "pipeline_tag", "tags"} and metadata["tags"][1] == "x\n---\nlicence: mit"
    assert "| data | a\\|b c&lt;script> |" in text


def test_a_torn_run_still_has_a_card(tmp_path: Path) -> None:
    metadata, text = make_card(tmp_path / "run", "[model\n", result={"best": 3})
    assert metadata["tags"] == ["offbeat", "sft"] and "| data | not recorded |" in text
