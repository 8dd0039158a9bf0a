"""What can be evaluated, and how a name says it."""

import json
from pathlib import Path

import pytest

from offbeat.errors import ConfigError, ModelError
from offbeat.runs.evaluated_model import EvaluatedModel, find_models
from small_run import small_config


def run_folder(root: Path, *exports: str) -> Path:
    root.mkdir()
    (root / "config.toml").touch()
    for export in exports:
        (root / export).mkdir(parents=True)
        (root / export / "config.json").touch()
    return root


def test_without_a_name_it_is_the_configured_model_and_folders_and_hub_ids_are_taken_as_they_are(tmp_path: Path) -> None:
    config = small_config(tmp_path, "Qwen/Qwen3-0.6B")
    assert find_models((), config) == [EvaluatedModel("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B")]
    assert find_models(("a/b", str(tmp_path)), config) == [EvaluatedModel("a/b", "a/b"), EvaluatedModel(str(tmp_path), str(tmp_path))]


def test_of_a_run_an_export_is_meant(tmp_path: Path) -> None:
    run, config = run_folder(tmp_path / "run", "export", "best", "exports/step-00000020"), small_config(tmp_path)
    for checkpoint, folder in (("", "export"), ("last", "export"), ("best", "best"), ("20", "exports/step-00000020")):
        assert find_models((str(run),), config, checkpoint=checkpoint) == [EvaluatedModel(str(run), str(run / folder))]
    with pytest.raises(ModelError, match=r"has no export '30', .*; --checkpoint can be last, best, 20"):
        find_models((str(run),), config, checkpoint="30")
    with pytest.raises(ModelError, match=r"has no export 'last', .*; a run writes one at its end"):
        find_models((str(run_folder(tmp_path / "empty")),), config)
    with pytest.raises(ConfigError, match="--checkpoint must be last, best or the number of a step, got '../x'"):
        find_models((str(run),), config, checkpoint="../x")
    with pytest.raises(ConfigError, match="none of the models is a run's folder"):
        find_models(("a/b",), config, checkpoint="best")


def test_an_adapter_has_the_base_that_is_given_or_that_it_names(tmp_path: Path) -> None:
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps({"base_model_name_or_path": "its/base", "r": 8}))
    expected = EvaluatedModel(str(tmp_path), "its/base", adapter=str(tmp_path), rank=8)
    assert find_models((str(tmp_path),), small_config(tmp_path)) == [expected]
    assert find_models((str(tmp_path),), small_config(tmp_path, "given"))[0].folder == "given"
    file.write_text(json.dumps({"base_model_name_or_path": None, "r": 8}))
    with pytest.raises(ModelError, match=r"does not name the base model of the adapter; give it as --model\.path"):
        find_models((str(tmp_path),), small_config(tmp_path))
    file.write_text("[]")
    with pytest.raises(ModelError, match="cannot be read as the configuration of a LoRA adapter"):
        find_models((str(tmp_path),), small_config(tmp_path))


def test_a_url_is_an_endpoint_and_may_name_one_of_its_models(tmp_path: Path) -> None:
    url = "http://localhost:8001/v1"
    assert find_models((url, f"{url}#a#b"), small_config(tmp_path)) == [
        EvaluatedModel(url, url=url), EvaluatedModel(f"{url}#a#b", url=url, served="a#b")]


def test_a_model_is_named_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the model 'a' is named twice"):
        find_models(("a", "b", "a"), small_config(tmp_path))
