import copy
import hashlib
import json
import re
import resource

import pytest
import torch
from transformers import AutoModelForCausalLM

from named_bytes import named_bytes
from offbeat.config.model import TinyConfig
from offbeat.data.model_folder import read_model_config
from offbeat.errors import ModelError, StorageError
from offbeat.model.fingerprint import fingerprint
from offbeat.model.hf_io import read_safetensors, write_safetensors
from offbeat.model.load import context_length, load_causal_lm
from offbeat.model.tiny import build_tiny

SMALL = TinyConfig(hidden_size=16, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8, intermediate_size=24, max_positions=32)


@pytest.fixture
def folder(tmp_path):
    return build(tmp_path / "tiny")


def build(folder, seed=0, tiny=SMALL):
    build_tiny(folder, tiny=tiny, vocab_size=11, eos_token_id=1, pad_token_id=0, seed=seed)
    return folder


def perturbed(model):
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(torch.randn_like(parameter))
    return other


def digest(folder):
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(folder.iterdir())}


def test_a_tiny_model_is_the_same_for_a_seed_and_leaves_the_random_state_alone(tmp_path):
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    first, again, other = build(tmp_path / "a"), build(tmp_path / "b"), build(tmp_path / "c", seed=1)
    assert torch.rand(1) == expected
    assert digest(first) == digest(again)
    assert digest(first)["model.safetensors"] != digest(other)["model.safetensors"]


def test_a_tiny_model_is_a_complete_qwen3_folder(folder):
    config = read_model_config(str(folder))
    assert (config["model_type"], config["architectures"], config["tie_word_embeddings"]) == ("qwen3", ["Qwen3ForCausalLM"], True)
    assert (config["vocab_size"], config["eos_token_id"], config["pad_token_id"], config["dtype"]) == (11, 1, 0, "float32")
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == 1
    model = load_causal_lm(str(folder))
    assert context_length(model.config) == 32
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert not any("_attn" in key for key in config)


@pytest.mark.parametrize("attention", ["packed", "sdpa", "eager"])
def test_every_attention_gives_the_logits_of_plain_transformers(folder, attention):
    ids = torch.tensor([[3, 4, 5, 6]])
    expected = AutoModelForCausalLM.from_pretrained(folder)(ids).logits
    torch.testing.assert_close(load_causal_lm(str(folder), attention=attention)(ids).logits, expected)


def test_bfloat16_is_loaded_and_refuses_other_names(folder):
    assert load_causal_lm(str(folder), dtype="bfloat16").dtype == torch.bfloat16
    with pytest.raises(ModelError, match="float32, bfloat16, got 'int8'"):
        load_causal_lm(str(folder), dtype="int8")


@pytest.mark.parametrize("max_shard_bytes", [5 << 30, 3000])
def test_weights_survive_a_round_trip_in_one_file_or_many(folder, tmp_path, max_shard_bytes):
    model = perturbed(load_causal_lm(str(folder)))
    state = model.state_dict()
    write_safetensors(state, tmp_path / "out", config_from=model, max_shard_bytes=max_shard_bytes)
    assert "lm_head.weight" in state  # untouched
    read = dict(read_safetensors(tmp_path / "out"))
    assert read.keys() == state.keys() - {"lm_head.weight"}
    assert all(tensor.equal(state[name]) for name, tensor in read.items())
    assert (len(list((tmp_path / "out").glob("*.safetensors"))) > 1) == (max_shard_bytes == 3000)
    loaded = load_causal_lm(str(tmp_path / "out"))
    assert fingerprint(named_bytes(loaded)) == fingerprint(named_bytes(model))
    assert not list(tmp_path.glob(".*"))


def test_a_folder_given_for_the_configuration_lends_its_tokenizer_too(folder, tmp_path):
    (folder / "tokenizer.json").write_text("{}")
    model = load_causal_lm(str(folder))
    write_safetensors(model.state_dict(), tmp_path / "out", config_from=folder)
    assert {file.name for file in (tmp_path / "out").iterdir()} == {
        "config.json", "generation_config.json", "tokenizer.json", "model.safetensors",
    }
    assert "lm_head.weight" not in dict(read_safetensors(tmp_path / "out"))


def test_writing_into_a_folder_that_exists_replaces_its_weights_and_keeps_other_files(folder):
    model = perturbed(load_causal_lm(str(folder)))
    (folder / "tokenizer.json").write_text("{}")
    write_safetensors(model.state_dict(), folder, config_from=model, max_shard_bytes=3000)
    assert not (folder / "model.safetensors").exists()
    assert (folder / "tokenizer.json").exists()
    assert fingerprint(named_bytes(load_causal_lm(str(folder)))) == fingerprint(named_bytes(model))


def test_named_bytes_are_the_files_bytes_by_hugging_face_names(folder):
    for dtype in ("float32", "bfloat16"):
        model = load_causal_lm(str(folder), dtype=dtype)
        items = dict(named_bytes(model))
        expected = {name: tensor.to(model.dtype) for name, tensor in read_safetensors(folder)}
        assert items.keys() == expected.keys()
        assert all(items[name].tobytes() == tensor.view(torch.uint8).numpy().tobytes() for name, tensor in expected.items())


def test_a_disk_that_fills_up_is_a_storage_error_and_leaves_nothing_behind(folder, tmp_path):
    target = tmp_path / "out"
    allowed = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, allowed[1]))  # Python ignores the signal, so a write fails with an error
    try:
        with pytest.raises(StorageError, match=re.escape(str(target))):
            write_safetensors({"w": torch.zeros(1 << 18)}, target, config_from=folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, allowed)
    assert {path.name for path in tmp_path.iterdir()} == {"tiny"}


def test_a_folder_that_cannot_be_made_is_a_storage_error(folder, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="choose another folder"):
        write_safetensors({}, tmp_path / "file" / "out", config_from=folder)
