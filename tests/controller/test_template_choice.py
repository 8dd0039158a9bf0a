"""Whether plain prompts are asked in chats where `data.chat_template` is "auto"."""

import json
from pathlib import Path
from typing import Any

import pytest

from offbeat.config.load import load_config
from offbeat.config.root import TRAINING_KINDS, Config
from offbeat.controller.inputs import read_inputs, read_pair_inputs
from offbeat.controller.preview import preview
from offbeat.controller.template_choice import choose_templates
from offbeat.data.prompt import render
from offbeat.data.tokenizer import character_tokenizer
from offbeat.runs.check import check_named
from small_run import build_small_model

TAUGHT = (
    "{% for message in messages %}{{ message['role'] }}> {{ message['content'] }}{{ eos_token if message['role'] == 'assistant' else '' }}"
    "\n{% endfor %}{% if add_generation_prompt %}assistant> {% endif %}")
"""Ends the assistant's turn with the token that ends the model's answers."""
BASE = TAUGHT.replace("eos_token if", "pad_token if")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Build a model whose tokenizer has the template of one that was taught chats."""
    folder = tmp_path / "taught"
    folder.mkdir()
    build_small_model(folder, seed=0)
    character_tokenizer().with_template(TAUGHT).save(folder)
    return folder


def configured(model: Path | str, rows: list[dict[str, Any]], folder: Path, **changes: Any) -> Config:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_config(None, values={
        "model.path": str(model), "data.path": str(path), "data.heldout_size": 0, "rollout.max_new_tokens": 4, "run.dir": str(folder),
        **{name.replace("__", "."): value for name, value in changes.items()}})


def chosen(config: Config, **was: Any) -> tuple[bool | str, list[str]]:
    config, lines = choose_templates(config, was={name.replace("__", "."): value for name, value in was.items()})
    return config.data.chat_template, lines


PLAIN = [{"prompt": "1+1=", "answer": "2"}]
CHAT = [{"prompt": [{"role": "user", "content": "1+1="}], "answer": "2"}]
PAIRS = [{"prompt": "1+1=", "chosen": "2", "rejected": "3"}]


def test_plain_prompts_of_a_model_that_was_taught_chats_become_chats_and_a_line_says_so(model: Path, tmp_path: Path) -> None:
    config, lines = choose_templates(configured(model, PLAIN, tmp_path))
    assert lines == [
        f'data.chat_template = true: "auto" asks plain prompts in chats, as {model} ends answers with <eos> like its chat template']
    inputs = read_inputs(config)
    assert inputs.tokenizer.decode(render(inputs.train.row(0), inputs.tokenizer, config.data)) == "user> 1+1=\nassistant> "
    assert check_named(configured(model, PLAIN, tmp_path))[0] == lines[0]
    assert preview(configured(model, PLAIN, tmp_path), TRAINING_KINDS["train"], count=1).rows[0].texts[0].pieces[0][0].startswith("user> ")


def test_plain_pairs_become_chats_too(model: Path, tmp_path: Path) -> None:
    config, lines = choose_templates(configured(model, PAIRS, tmp_path))
    assert config.data.chat_template is True and len(lines) == 1
    pair = (encoder := read_pair_inputs(config).pairs).encoder.encode(encoder.train.row(0), name="row 0")  # type: ignore[union-attr]
    assert character_tokenizer().decode(list(pair.sequences[0][0])).startswith("user> 1+1=")  # type: ignore[union-attr]


@pytest.mark.parametrize("template", [BASE, "", None])
def test_a_base_model_is_asked_plain_text_although_its_tokenizer_has_a_template(template: str | None, model: Path, tmp_path: Path) -> None:
    tokenizer = character_tokenizer()  # with the template of tiny models, who were taught nothing
    if template is not None:
        tokenizer.hf.chat_template = template
    for file in model.glob("chat_template*"):
        file.unlink()
    tokenizer.save(model)
    assert chosen(configured(model, PLAIN, tmp_path)) == (False, [])


def test_a_model_to_be_built_and_rows_that_are_chats_and_agents_stay_as_they_are(model: Path, tmp_path: Path) -> None:
    assert chosen(configured("", PLAIN, tmp_path)) == (False, [])
    assert chosen(configured(model, CHAT, tmp_path)) == (False, [])
    assert chosen(configured(model, PLAIN, tmp_path, rollout__workflow="agent", agent__program="a.py:b")) == (False, [])


def test_prompts_that_have_been_rendered_already_are_not_wrapped_again(model: Path, tmp_path: Path) -> None:
    rendered = [*PLAIN, {"prompt": "user> 1+1=<eos>\nassistant> ", "answer": "2"}]
    assert chosen(configured(model, rendered, tmp_path)) == (False, [
        'data.chat_template = false: "auto" leaves prompts as they are that hold special tokens, such as <eos>'])


@pytest.mark.parametrize("given", [True, False, "{{ messages }}"])
def test_what_is_given_is_taken(given: bool | str, model: Path, tmp_path: Path) -> None:
    assert chosen(configured(model, PLAIN, tmp_path, data__chat_template=given), data__chat_template=not given) == (given, [])


def test_a_run_that_goes_on_keeps_what_it_had(model: Path, tmp_path: Path) -> None:
    kept = ['data.chat_template = false: "auto" keeps what the run had at its checkpoint']
    assert chosen(configured(model, PLAIN, tmp_path), data__chat_template=False) == (False, kept), "as older versions remember it"
    assert chosen(configured(model, PLAIN, tmp_path), data__chat_template=True)[0] is True
    assert chosen(configured("", PLAIN, tmp_path), data__chat_template=False) == (False, [])


def test_sets_of_rows_choose_each_for_themselves(model: Path, tmp_path: Path) -> None:
    (tmp_path / "chats.jsonl").write_text(json.dumps(CHAT[0]) + "\n")
    base = configured(model, PLAIN, tmp_path)
    config = load_config(None, values={
        "model.path": str(model), "data.heldout_size": 0, "data.sets": {
            "plain": {"path": base.data.path}, "off": {"path": base.data.path, "chat_template": False},
            "chats": {"path": str(tmp_path / "chats.jsonl")}},
        "evaluate.sets": {"own": {"num_prompts": 1, "data": {"path": base.data.path}}}})
    settled, lines = choose_templates(config)
    assert [line.partition(" =")[0] for line in lines] == ["data.sets.plain.chat_template", "evaluate.sets.own.data.chat_template"]
    assert [settled.data_set(name).data.wraps for name in ("plain", "off", "chats")] == [True, False, False]
    assert settled.evaluation_set("own").data.wraps
    assert load_config(None, values={"data.sets": dict(settled.data.sets)}).data.sets == settled.data.sets, "a run's config.toml is valid"
