import json
import subprocess
import sys

import huggingface_hub.constants
import pytest

from offbeat.data.model_folder import (
    check_model_folder,
    read_context_length,
    read_end_token_ids,
    read_model_config,
    read_vocab_size,
    rope_limit,
    router_loss_note,
)
from offbeat.errors import ConfigError, ModelError


def write(folder, text='{"model_type": "qwen3", "vocab_size": 7}', *, weights=True):
    (folder / "config.json").write_text(text)
    if weights:
        (folder / "model.safetensors").write_bytes(b"")
    return str(folder)


def test_a_model_folder_gives_its_configuration_and_its_path(tmp_path):
    path = write(tmp_path)
    assert read_model_config(path)["vocab_size"] == 7
    assert check_model_folder(path) == tmp_path


def test_a_folder_without_configuration_or_weights_is_refused(tmp_path):
    with pytest.raises(ModelError, match=r"no config\.json"):
        check_model_folder(str(tmp_path))
    with pytest.raises(ModelError, match=r"no model\.safetensors"):
        check_model_folder(write(tmp_path, weights=False))


@pytest.mark.parametrize(("text", "match"), [("{", "as JSON"), ("[]", "model_type"), ('{"a": 1}', "model_type")])
def test_a_broken_configuration_is_refused(tmp_path, text, match):
    with pytest.raises(ModelError, match=match):
        read_model_config(write(tmp_path, text))


@pytest.mark.parametrize("path", ["/no/such/folder", "./missing", "~/missing-model", ""])
def test_a_path_that_does_not_exist_is_not_looked_up_on_the_hub(path):
    with pytest.raises(ModelError, match="does not exist"):
        check_model_folder(path)


def test_a_hub_id_without_network_is_one_clear_sentence(monkeypatch, tmp_path):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    for look in (check_model_folder, read_model_config):
        with pytest.raises(ModelError, match="neither a folder nor could it be fetched"):
            look("nobody/no-such-model")


@pytest.mark.parametrize("path", ["models/small", "runs/mine", "here/none"])
def test_a_folder_that_is_missing_is_called_one_although_it_could_be_a_hub_id(monkeypatch, tmp_path, path):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    for look in (check_model_folder, read_model_config):
        with pytest.raises(ModelError, match=f"^model folder '{path}' does not exist, and no .* 'make smollm2' makes") as caught:
            look(path)
        assert "HF_TOKEN" not in str(caught.value)


LONGROPE = {"rope_type": "longrope", "original_max_position_embeddings": 40}


@pytest.mark.parametrize(("ropes", "original", "limit"), [
    (None, None, None), ({}, None, None), ({"rope_type": "llama3", "original_max_position_embeddings": 40}, None, None),
    (LONGROPE, None, 40), ({"type": "su"}, 30, 30), ({"rope_type": "dynamic", "factor": 2.0}, None, 100),
    ({"full_attention": LONGROPE, "sliding_attention": {"rope_type": "default"}}, None, 40),
])
def test_frequencies_that_change_with_the_longest_sequence_bound_the_length(ropes, original, limit):
    assert rope_limit(ropes, context=100, original=original) == limit


def test_the_context_of_a_longrope_model_is_its_original_one(tmp_path):
    config = {"model_type": "phi3", "max_position_embeddings": 4096, "original_max_position_embeddings": 512}
    for ropes in ({"rope_scaling": {"type": "longrope"}}, {"rope_parameters": {**LONGROPE, "original_max_position_embeddings": 512}}):
        assert read_context_length(write(tmp_path, json.dumps(config | ropes))) == 512
    assert read_context_length(write(tmp_path, json.dumps(config))) == 4096


@pytest.mark.parametrize(("config", "size"), [
    ('"vocab_size": 7', 7), ('"text_config": {"vocab_size": 9}, "vocab_size": 7', 9), ('"text_config": {}, "vocab_size": 7', 7), ("", None),
    ('"vocab_size": "many"', None),
])
def test_the_size_of_the_vocabulary_is_that_of_the_language_model(tmp_path, config, size):
    assert read_vocab_size(write(tmp_path, f'{{"model_type": "qwen3"{", " if config else ""}{config}}}')) == size


@pytest.mark.parametrize(("config", "coefficient"), [
    ({"router_aux_loss_coef": 0.001}, "0.001"), ({"text_config": {"router_aux_loss_coef": 0.02}}, "0.02"),
    ({"router_aux_loss_coef": 0.0}, ""), ({"router_aux_loss_coef": None}, ""), ({}, "")])
def test_a_loss_of_routers_that_is_not_trained_on_is_told_of(tmp_path, config, coefficient):
    write(tmp_path, json.dumps({"model_type": "qwen3_moe", **config}))
    note = router_loss_note(str(tmp_path), coefficient=0.0)
    told = f"train.router_aux_loss_coefficient = {coefficient}, as in the config.json of {tmp_path},"
    assert (told in note) if coefficient else note == ""


def test_a_coefficient_for_routers_needs_a_model_with_experts(tmp_path):
    write(tmp_path, json.dumps({"model_type": "qwen3_moe", "num_experts": 8, "router_aux_loss_coef": 0.001}))
    assert router_loss_note(str(tmp_path), coefficient=0.01) == ""
    write(tmp_path, json.dumps({"model_type": "qwen3"}))
    with pytest.raises(ConfigError, match="train.router_aux_loss_coefficient must be 0 for .*, got 0.01; its config.json names no experts"):
        router_loss_note(str(tmp_path), coefficient=0.01)


def test_looking_at_a_model_does_not_import_torch():
    code = "import sys, offbeat.data.model_folder, offbeat.data.packing, offbeat.model.fingerprint; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


@pytest.mark.parametrize(("generation", "config", "ids"), [
    ('{"eos_token_id": [0, 30]}', "", (0, 30)), ('{"eos_token_id": 7}', '"eos_token_id": 1', (7,)), ("{}", '"eos_token_id": 1', ()),
    (None, '"eos_token_id": 1', (1,)), (None, '"text_config": {"eos_token_id": [3]}', (3,)), (None, "", ()),
])
def test_end_tokens_are_those_of_the_generation_configuration_or_else_of_the_configuration(tmp_path, generation, config, ids):
    path = write(tmp_path, f'{{"model_type": "qwen3"{", " if config else ""}{config}}}')
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(generation)
    assert read_end_token_ids(path) == ids


@pytest.mark.parametrize(("text", "match"), [
    ("{", "generation_config.json cannot be read as JSON"),
    ('{"eos_token_id": "<eos>"}', r"must be a token id or a list of them, got \['<eos>'\]"),
    ('{"eos_token_id": [1, -1]}', "got"), ('{"eos_token_id": true}', "got"),
])
def test_end_tokens_that_are_none_are_refused(tmp_path, text, match):
    path = write(tmp_path)
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ModelError, match=match):
        read_end_token_ids(path)
