"""What a configuration names, tried before a run."""

import json
from pathlib import Path

import pytest

from chats import words
from image_models import make_folder, picture
from offbeat.config.load import load_config
from offbeat.data.tokenizer import character_tokenizer
from offbeat.errors import ConfigError
from offbeat.runs.check import check_named, pairs_in

REWARDS = Path(__file__).parents[1] / "support" / "rewards.py"


def write(path: Path, records: list[dict]) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def test_what_is_there_is_told(tmp_path: Path) -> None:
    rows = write(tmp_path / "rows.jsonl", [{"prompt": "p"}, {"no": 1}, *({"prompt": "p"} for _ in range(200))])
    settings = {
        "data.path": rows, "data.max_unusable_rows": "3", "rollout.rewards": f'{{"{REWARDS}:equal" = 1.0, "{REWARDS}:right" = 0.5}}',
        "rollout.workflow": "offbeat.rollout.workflows.single_turn:single_turn"}
    data, reward = check_named(load_config(None, list(settings.items())))
    assert data == (
        f"data: {rows}: the first 100 rows are prompts, which need no answer; the last fifth of all, at most 256, are held out;"
        f" 1 of them cannot be used, the first: '{rows}', line 2, has no"
        " field 'prompt'; it has no; set data.prompt, data.prompt_field or data.format")
    assert reward == f"reward: {REWARDS}:equal + 0.5 * {REWARDS}:right"


def test_a_task_and_its_own_reward_are_told_without_a_process() -> None:
    data, reward = check_named(load_config(None, [("data.task", "countdown")]))
    assert (data, reward) == ("data: countdown: makes its rows", "reward: offbeat.rollout.rewards.countdown:countdown")


def test_what_is_trained_of_routers_is_told_or_refused_by_the_models_configuration(tmp_path: Path) -> None:
    character_tokenizer().save(tmp_path)

    def told(config: dict, coefficient: str) -> list[str]:
        (tmp_path / "config.json").write_text(json.dumps(config))
        return check_named(load_config(None, [
            ("data.task", "countdown"), ("model.path", str(tmp_path)), ("train.router_aux_loss_coefficient", coefficient)]))

    experts = {"model_type": "qwen3_moe", "num_experts": 8, "router_aux_loss_coef": 0.001}
    assert told(experts, "0")[-1].startswith("note: the load-balancing loss of the routers is not trained on; train.router_aux_loss_coef")
    assert not any("routers" in line for line in told(experts, "0.001") + told({"model_type": "qwen3"}, "0"))
    with pytest.raises(ConfigError, match="got 0.001; its config.json names no experts, so leave it out"):
        told({"model_type": "qwen3"}, "0.001")


def test_what_training_would_refuse_of_lengths_is_told_in_its_words() -> None:
    def told(*settings: tuple[str, str]) -> list[str]:
        lines = check_named(load_config(None, [("data.task", "sort_digits"), ("rollout.max_new_tokens", "9"), *settings]))
        return [line for line in lines if line.startswith("note: offbeat train would refuse this: ")]

    assert told() == told(("train.max_tokens_per_microbatch", "17")) == []
    (note,) = told(("train.max_tokens_per_microbatch", "8"))
    assert "train.max_tokens_per_microbatch must be at least 17, for a prompt of 9 tokens and rollout.max_new_tokens = 9, got 8;" in note
    (note,) = told(("inference.max_context", "12"))
    assert "12" in note


def test_all_that_is_wrong_is_told_together(tmp_path: Path) -> None:
    rows = write(tmp_path / "rows.jsonl", [{"question": "q", "answer": "a"}])
    settings = {
        "data.path": rows, "rollout.reward": f"{REWARDS}:equals", "rollout.workflow": "no_such_module:play",
        "evaluate.sets": f"{{far = {{data = {{path = '{tmp_path / 'none.csv'}'}}}}}}"}
    with pytest.raises(ConfigError) as caught:
        check_named(load_config(None, list(settings.items())))
    count, data, reward, workflow, far = str(caught.value).splitlines()
    assert count == "4 things are wrong:"
    assert data.startswith(f"  '{rows}', line 1, has no field 'prompt'; it has question, answer; set data.prompt")
    assert "has no function 'equals'; did you mean 'equal'?" in reward
    assert "workflow module 'no_such_module' was not found" in workflow
    assert far.startswith(f"  evaluate.sets.far: data file '{tmp_path / 'none.csv'}' does not exist; give .jsonl")


def test_what_the_tiny_model_cannot_write_is_refused(tmp_path: Path) -> None:
    rows = write(tmp_path / "rows.jsonl", [{"prompt": "1 day before 12:", "answer": day} for day in ("sunday", "monday", "Sunday")])
    settings = {"data.path": rows, "data.heldout_size": "0", "rollout.reward": f"{REWARDS}:equal"}
    said, warned, _ = check_named(load_config(None, list(settings.items())))
    assert "the first 3 rows are prompts" in said  # the reward may read it as it likes
    assert warned.startswith("data: 1 of the first 3 rows have an answer that the model can never write; a reward that compares with it")
    with pytest.raises(ConfigError, match=f"'{rows}', line 3: 'S' in its answer is not in the alphabet of the tiny model"):
        check_named(load_config(None, [*settings.items(), ("run.warm_up", "true")]))
    elsewhere = check_named(load_config(None, [*settings.items(), ("run.warm_up", "true"), ("model.path", "org/model")]))
    assert elsewhere[0].startswith('data.chat_template = "auto": chosen at the start, by the tokenizer of org/model')
    assert elsewhere[1] == f"data: {rows}: the first 3 rows are prompts"


def test_a_model_that_was_taught_chats_and_is_asked_with_plain_text_is_told_and_one_without_tokens_refused(tmp_path: Path) -> None:
    model, tokenizer = tmp_path / "model", character_tokenizer()
    tokenizer.save(model)
    told = {}
    for num_rows in (tokenizer.vocab_size, 20):
        (model / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": num_rows}))
        try:
            told[num_rows] = check_named(load_config(None, [("data.task", "addition"), ("model.path", str(model))]))[1]
        except ConfigError as exc:
            told[num_rows] = str(exc)
    assert told[54].startswith(f"data: prompts are plain text, and the tokenizer of {model} has a chat template")
    assert f"but the embedding of {model} has 20 rows" in told[20]


def test_what_a_chat_template_does_not_write_is_told_of_the_template_that_is_set(tmp_path: Path) -> None:
    model, chat = tmp_path / "model", [{"role": "system", "content": "add"}, {"role": "user", "content": "2+2"}]
    words("{{ messages | tojson }}").save(model)
    rows = write(tmp_path / "rows.jsonl", [{"prompt": chat, "answer": "4"}] * 3)
    settings = [("data.path", rows), ("data.heldout_size", "0"), ("model.tokenizer", str(model)), ("rollout.reward", f"{REWARDS}:equal")]
    refuses = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}{{ messages | tojson }}"
    assert len(check_named(load_config(None, settings))) == 2
    _, told, _ = check_named(load_config(None, [*settings, ("data.chat_template", refuses)]))
    assert told.startswith(f"data: the chat template of tokenizer '{model}' does not write system messages, which are put before the")
    with pytest.raises(ConfigError, match="the chat template of data.chat_template is no Jinja template"):
        check_named(load_config(None, [*settings, ("data.chat_template", "{{ messages")]))


def test_preferences_are_known_by_their_fields(tmp_path: Path) -> None:
    pairs = write(tmp_path / "pairs.jsonl", [{"prompt": "p", "chosen": "a", "rejected": "b"}] * 3)
    config = load_config(None, [("data.path", pairs), ("data.heldout_size", "1")])
    assert pairs_in(config.data)
    assert check_named(config)[0] == f"data: {pairs}: the first 3 rows are preferences; the last 1 of all are held out"
    assert not pairs_in(load_config(None, [("data.task", "addition")]).data)


def test_rows_that_were_looked_at_and_rows_that_are_held_out_are_told_apart(tmp_path: Path) -> None:
    rows = write(tmp_path / "rows.jsonl", [{"prompt": "p", "answer": "a"}] * 114)
    said = check_named(load_config(None, [("data.path", rows), ("data.heldout_size", "32"), ("rollout.reward", f"{REWARDS}:equal")]))
    assert said[0] == f"data: {rows}: the first 100 rows are prompts, which need no answer; the last 32 of all are held out"


def test_all_rows_of_an_evaluation_set_are_asked(tmp_path: Path) -> None:
    few = write(tmp_path / "few.jsonl", [{"prompt": "p", "answer": "a"}] * 50)
    said = check_named(load_config(None, [("data.task", "addition"), ("evaluate.sets", f"{{few = {{data = {{path = '{few}'}}}}}}")]))
    assert f"evaluate.sets.few: data: {few}: the first 50 rows are prompts" in said


def test_the_program_of_an_agent_is_imported_and_gives_the_reward(tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text("async def run(task):\n    return 1.0\n\ndef reward(completion):\n    return 1.0\n\ndef accept():\n    return True\n")
    settings = {"data.task": "addition", "rollout.workflow": "agent", "agent.program": f"{mine}:run"}
    _, reward, agent = check_named(load_config(None, list(settings.items())))
    assert reward == "reward: what the agent gives; where that is None, offbeat.rollout.rewards.exact_match:exact_match"
    assert agent == f"agent: {mine}:run"
    with pytest.raises(ConfigError) as caught:
        check_named(load_config(None, [*settings.items(), ("rollout.reward", f"{mine}:reward"), ("rollout.should_accept", f"{mine}:accept"),
                                       ("agent.program", "no_such_agent:run")]))
    _, reward, accept, program = str(caught.value).splitlines()
    assert reward == (
        f"  reward '{mine}:reward' takes (completion), but it is called with (completion, row); too many positional arguments")
    assert accept == f"  should_accept '{mine}:accept' takes (), but it is called with (group); too many positional arguments"
    assert "agent.program module 'no_such_agent' was not found" in program


def test_images_are_looked_at_and_not_kept(tmp_path: Path) -> None:
    model = make_folder(tmp_path / "model", "qwen3_vl")
    picture().save(tmp_path / "a.png")
    (tmp_path / "b.png").write_bytes(b"no image")
    records = [{"prompt": "<image>how many?", "images": [name], "answer": "1"} for name in ("a.png", "b.png", "a.png")]
    settings = {
        "run.dir": str(tmp_path / "runs"), "model.path": str(model), "data.path": write(tmp_path / "rows.jsonl", records),
        "data.heldout_size": "1", "rollout.max_new_tokens": "4"}
    with pytest.raises(ConfigError, match=r"line 2: image 1 is no image in one of the formats"):
        check_named(load_config(None, list(settings.items())))
    lines = check_named(load_config(None, [*settings.items(), ("data.max_unusable_rows", "1")]))
    assert any(line.startswith("data: ") and "1 of them cannot be used, the first: " in line for line in lines)
    assert not any("offbeat train would refuse this" in line for line in lines), lines
    assert not (tmp_path / "runs").exists()
