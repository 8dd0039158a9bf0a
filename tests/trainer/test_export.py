"""An exported folder is what transformers loads, with its tokenizer, in the stated number format."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from offbeat.errors import StorageError
from offbeat.model.load import load_causal_lm
from offbeat.trainer.export import export_folder
from train_samples import build_model


def state_of(folder, dtype):
    return {name: parameter.detach().to(dtype) for name, parameter in load_causal_lm(folder).named_parameters()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_transformers_loads_what_was_exported_in_its_number_format(tmp_path, dtype):
    source = build_model(tmp_path / "source")
    state = state_of(source, getattr(torch, dtype))
    export_folder(state, tmp_path / "runs" / "export", model_folder=tmp_path / "source", dtype=dtype)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "runs" / "export", dtype="auto")
    for name, parameter in loaded.named_parameters():
        assert parameter.dtype == getattr(torch, dtype)
        assert torch.equal(parameter, state[name])
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["export"]


def test_the_tokenizer_comes_from_the_model_or_from_where_it_is_said_to(tmp_path):
    source = build_model(tmp_path / "source")
    (tmp_path / "source" / "tokenizer.json").write_text("model's")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "tokenizer.json").write_text("other")
    (tmp_path / "other" / "config.json").write_text("not a tokenizer file")
    state = state_of(source, torch.float32)
    for tokenizer_folder, text in ((None, "model's"), (tmp_path / "other", "other")):
        export_folder(state, tmp_path / "out", model_folder=tmp_path / "source", tokenizer_folder=tokenizer_folder, dtype="float32")
        assert (tmp_path / "out" / "tokenizer.json").read_text() == text
        assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "qwen3"


def test_what_is_added_stands_in_the_folder_or_the_folder_is_not_there(tmp_path):
    state = state_of(build_model(tmp_path / "source"), torch.float32)
    export_folder(
        state, tmp_path / "out", model_folder=tmp_path / "source", dtype="float32", add=lambda part: (part / "more").write_text("here"))
    assert (tmp_path / "out" / "more").read_text() == "here"

    def fail(part):
        raise StorageError("no room")

    with pytest.raises(StorageError, match="no room"):
        export_folder(state, tmp_path / "other", model_folder=tmp_path / "source", dtype="float32", add=fail)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]


def test_an_export_that_fails_leaves_the_previous_one(tmp_path):
    source = build_model(tmp_path / "source")
    state = state_of(source, torch.float32)
    out = tmp_path / "out"
    export_folder(state, out, model_folder=tmp_path / "source", dtype="float32")
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "tokenizer.json").mkdir()  # A folder cannot be copied as a file.
    with pytest.raises(StorageError, match="could not be written to"):
        export_folder(state, out, model_folder=tmp_path / "source", tokenizer_folder=tmp_path / "tokenizer", dtype="float32")
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source", "tokenizer"]
