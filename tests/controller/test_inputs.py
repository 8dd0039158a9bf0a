"""What is read before any process starts, and the choices made from it."""

from pathlib import Path

import pytest

from offbeat.controller.inputs import RunInputs, base_ends, choose_canary, read_base, read_inputs, write_tokenizer
from offbeat.data.mixture import Mixture
from offbeat.data.prompt import render
from offbeat.data.tokenizer import character_tokenizer, load_tokenizer
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


def test_a_row_needs_an_answer_where_something_reads_it(tmp_path: Path, model_dir: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "1>"}\n' * 3)
    settings = {"data__task": "", "data__path": str(path), "data__heldout_size": "0"}
    own = {**settings, "rollout__reward": "mine.py:score"}
    with pytest.raises(DataError, match="line 1, has no field 'answer'; it has prompt"):
        read_inputs(small_config(tmp_path, model_dir, rollout__reward="", **settings))
    with pytest.raises(DataError, match="has no field 'answer'"):
        read_inputs(small_config(tmp_path, model_dir, **own), supervised=True)
    assert read_inputs(small_config(tmp_path, model_dir, **own)).train.row(0).answer == ""


def test_a_system_prompt_that_would_not_be_seen_is_refused(tmp_path: Path, model_dir: str) -> None:
    asked = {"data__system_prompt": "be brief"}
    assert read_inputs(small_config(tmp_path, model_dir, data__chat_template="true", rollout__max_new_tokens="1", **asked))
    with pytest.raises(ConfigError, match=r"would not be seen, because the prompts are plain text and no chats; set data.chat_template"):
        read_inputs(small_config(tmp_path, model_dir, **asked))
    bare, users = tmp_path / "bare", tmp_path / "users"
    character_tokenizer(chat_template=None).save(bare)
    with pytest.raises(ConfigError, match="no chats; and tokenizer '.*bare' has no chat template that could carry it; leave it out"):
        read_inputs(small_config(tmp_path, model_dir, model__tokenizer=str(bare), **asked))
    template = "{% for message in messages %}{{ message['content'] if message['role'] == 'user' }}{% endfor %}>"
    character_tokenizer(chat_template=template).save(users)
    asked |= {"data__chat_template": "true", "rollout__max_new_tokens": "1", "model__tokenizer": str(users)}
    assert read_inputs(small_config(tmp_path, model_dir, **asked)), "it becomes part of the user's message"


def test_a_chat_template_of_ones_own_takes_the_place_of_the_tokenizers_and_is_exported(tmp_path: Path, model_dir: str) -> None:
    file = tmp_path / "own.jinja"
    file.write_text("{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}{% if add_generation_prompt %}>{% endif %}")
    for given in (str(file), file.read_text()):
        config = small_config(tmp_path, model_dir, data__chat_template=given, rollout__max_new_tokens="1")
        inputs = read_inputs(config)
        assert config.data.chat_template == file.read_text(), "a checkpoint remembers what the file said"
        prompt = render(inputs.train.row(0), inputs.tokenizer, config.data)
        assert inputs.tokenizer.decode(prompt, skip_special_tokens=False).endswith("<eos>>")
        folder = write_tokenizer(inputs, tmp_path)
        assert load_tokenizer(folder).hf.chat_template == file.read_text() != load_tokenizer(model_dir).hf.chat_template
    for given, sentence in (("no.jinja", "got 'no.jinja' .No such file"), (str(tmp_path), "Is a directory")):
        with pytest.raises(ConfigError, match=sentence):
            small_config(tmp_path, model_dir, data__chat_template=given)
    with pytest.raises(ModelError, match="data.chat_template is no Jinja template"):
        read_inputs(small_config(tmp_path, model_dir, data__chat_template="{% for m %}"))


def test_each_set_has_its_own_variables_of_the_chat_template(tmp_path: Path, model_dir: str) -> None:
    sets = "{loud = {num_prompts = 2, data = {chat_template_kwargs = {loud = true}}}}"
    inputs = read_inputs(small_config(tmp_path, model_dir, evaluate__sets=sets, data__chat_template_kwargs="{quiet = 1}"))
    assert inputs.tokenizer.template_kwargs == {"quiet": 1}
    assert inputs.sets["loud"].tokenizer.template_kwargs == {"loud": True}


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


def test_several_data_sets_are_a_mixture_with_held_out_rows_of_each(tmp_path: Path, model_dir: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "1>", "answer": "1"}\n' * 5 + "no JSON\n")
    def read(sets: str) -> RunInputs:
        settings = {"data__task": "", "data__task_size": "8", "data__heldout_size": "3", "rollout__reward": "exact_match"}
        return read_inputs(small_config(tmp_path, model_dir, data__sets=sets, **settings))

    sets = f"{{a = {{path = '{path}', max_unusable_rows = 1, heldout_size = 1}}, b = {{task = 'addition', task_size = 1, weight = 3}}}}"
    inputs = read(sets)
    assert isinstance(inputs.train, Mixture) and inputs.train.num_rows is None
    assert [inputs.heldout.row(index).of_set for index in range(inputs.heldout.num_rows or 0)] == ["a", "b", "b", "b"]
    assert len(inputs.unusable) == 1
    assert inputs.train.weights == {"a": 1.0, "b": 3.0}
    with pytest.raises(DataError, match=r"^data.sets.a: .*line 6, is not JSON"):
        read(sets.replace("max_unusable_rows = 1", "max_unusable_rows = 0"))
    with pytest.raises(ConfigError, match=r"^data.sets.a: data.system_prompt would not be seen"):
        read(sets.replace("heldout_size", "system_prompt = 's', heldout_size"))
