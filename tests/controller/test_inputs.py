"""What is read before any process starts, and the choices made from it."""

from pathlib import Path

import pytest

from offbeat.config.load import load_config
from offbeat.controller.inputs import base_ends, choose_canary, choose_reward, read_base, read_inputs
from offbeat.data.functions import resolve
from offbeat.errors import ConfigError, DataError, ModelError
from small_run import build_small_model, small_config


def test_a_model_that_is_there_is_used_with_its_tokenizer_and_context(tmp_path: Path, model_dir: str) -> None:
    inputs = read_inputs(small_config(tmp_path, model_dir))
    assert (inputs.model, inputs.tokenizer_folder, inputs.build, inputs.context) == (model_dir, model_dir, None, 64)
    assert inputs.heldout.num_rows == 4 and inputs.train.num_rows is None
    assert inputs.vocab_size == inputs.tokenizer.vocab_size == 54
    assert read_inputs(small_config(tmp_path, model_dir, inference__max_context="32")).context == 32


def test_without_a_model_a_tiny_one_is_to_be_built_beside_a_tokenizer(tmp_path: Path) -> None:
    config = small_config(tmp_path, model__tiny__max_positions="48", run__seed="5")
    inputs = read_inputs(config)
    assert inputs.build is not None
    assert (inputs.build.folder, inputs.build.seed, inputs.build.vocab_size) == (inputs.model, 5, inputs.tokenizer.vocab_size)
    assert (inputs.context, inputs.vocab_size) == (48, inputs.build.vocab_size)
    assert inputs.tokenizer_folder == inputs.model
    assert not config.run_dir.exists(), "reading must leave no trace of a run that may be refused"


def test_what_cannot_be_used_is_told_before_anything_starts(tmp_path: Path, model_dir: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match="empty"):
        read_inputs(small_config(tmp_path, str(tmp_path / "empty")))
    with pytest.raises(ModelError, match="no-such-folder"):
        read_inputs(small_config(tmp_path, str(tmp_path / "no-such-folder")))
    with pytest.raises(ModelError, match="no-tokenizer"):
        read_inputs(small_config(tmp_path, model_dir, model__tokenizer=str(tmp_path / "no-tokenizer")))
    with pytest.raises(DataError, match="prompt of row 0 has 4 tokens, allowed are 3"):
        read_inputs(small_config(tmp_path, model_dir, rollout__max_new_tokens="61"))
    with pytest.raises(DataError, match="prompt of row 0 has 4 tokens, allowed are 2"):
        read_inputs(small_config(tmp_path, model_dir, inference__max_context="7"))
    with pytest.raises(DataError, match="both empty"):
        read_inputs(small_config(tmp_path, model_dir, data__task=""))


@pytest.mark.parametrize(("settings", "name"), [
    ({"data.task": "countdown"}, "countdown"), ({"data.task": "addition"}, "exact_match"), ({"data.path": "a.jsonl"}, "exact_match"),
    ({"data.path": "a.jsonl", "data.format": "gsm8k"}, "math_reward"),
])
def test_the_reward_suits_the_data_unless_one_is_given(settings: dict[str, str], name: str) -> None:
    assert choose_reward(load_config(None, list(settings.items()))).endswith(f":{name}")
    assert callable(resolve(choose_reward(load_config(None, list(settings.items()))), kind="reward"))
    assert choose_reward(load_config(None, [*settings.items(), ("rollout.reward", "mine:score")])) == "mine:score"


def test_the_canary_is_a_prompt_with_its_answer(tmp_path: Path, model_dir: str) -> None:
    config = small_config(tmp_path, model_dir)
    inputs = read_inputs(config)
    row = inputs.train.row(0)
    assert inputs.tokenizer.decode(choose_canary(inputs, config)) == f"{row.prompt}{row.answer}"
    assert choose_canary(inputs, config)[-1] == inputs.tokenizer.eos_token_id


def test_a_long_canary_is_cut(tmp_path: Path, model_dir: str) -> None:
    path = tmp_path / "long.jsonl"
    path.write_text('{"prompt": "1>", "answer": "' + "2" * 100 + '"}\n' * 1)
    config = small_config(tmp_path, model_dir, data__task="", data__path=str(path), data__heldout_size="0")
    assert len(choose_canary(read_inputs(config), config)) == 64


def test_sampling_ends_at_all_that_model_tokenizer_and_user_name(tmp_path: Path) -> None:
    model = Path(build_small_model(tmp_path / "model", seed=0))
    (model / "generation_config.json").write_text('{"eos_token_id": [0, 30]}')
    settings = {"rollout__stop": '["<pad>", "12"]', "rollout__stop_token_ids": "[7]"}
    sampling = read_inputs(small_config(tmp_path, str(model), **settings)).sampling
    assert (sampling.stop_token_ids, sampling.stop) == ((0, 30, 7, 1), ("12",))
    assert (sampling.max_new_tokens, sampling.temperature) == (5, 1.0)
    assert read_inputs(small_config(tmp_path)).sampling.stop_token_ids == (0,)
    assert base_ends(read_base(small_config(tmp_path, str(model)))).token_ids == (0, 30)
    with pytest.raises(ConfigError, match="rollout.stop_token_ids must hold tokens of .*, 0 to 53, got 54"):
        read_inputs(small_config(tmp_path, str(model), rollout__stop_token_ids="[54]"))


def test_limits_that_a_long_answer_would_break_are_refused_before_anything_starts(tmp_path: Path, model_dir: str) -> None:
    # Prompts have 4 tokens and answers 5, of which the last is not run.
    read_inputs(small_config(tmp_path, model_dir, train__max_tokens_per_microbatch="8"))
    with pytest.raises(ConfigError, match="train.max_tokens_per_microbatch must be at least 8, for a prompt of 4 .* = 5, got 7; raise it"):
        read_inputs(small_config(tmp_path, model_dir, train__max_tokens_per_microbatch="7"))
    read_inputs(small_config(tmp_path, model_dir, train__max_tokens_per_microbatch="7"), trains=False)
    with pytest.raises(ConfigError, match="must be at least 24, for a prompt of 20 tokens"):
        read_inputs(small_config(tmp_path, model_dir, train__max_tokens_per_microbatch="23", data__max_prompt_tokens="20"))
    with pytest.raises(ConfigError, match="data.max_prompt_tokens = 60 and rollout.max_new_tokens = 5 are together more than the context"):
        read_inputs(small_config(tmp_path, model_dir, data__max_prompt_tokens="60"))
