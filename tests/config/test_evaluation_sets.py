"""[evaluate.sets.NAME]: what a set has of its own, what it has from the run, and what is refused."""

from pathlib import Path

import pytest

from offbeat.config.dump import dump_toml
from offbeat.config.evaluation_sets import setting_of
from offbeat.config.load import load_config, split_overrides
from offbeat.config.root import Config
from offbeat.errors import ConfigError

RUN = """
[data]
task = "sort_digits"
task_size = 5
system_prompt = "Sort."

[rollout]
max_new_tokens = 40
reward = "my.rewards:of_run"

[evaluate]
num_prompts = 64
every_steps = 7
"""


def with_sets(folder: Path, text: str, *overrides: tuple[str, str]) -> Config:
    path = folder / "run.toml"
    path.write_text(RUN + text, encoding="utf-8")
    return load_config(str(path), overrides)


def test_a_set_has_what_it_gives_and_all_else_as_the_run(tmp_path: Path) -> None:
    config = with_sets(tmp_path, """
[evaluate.sets.many]
samples_per_prompt = 8
temperature = 0.6
pass_at = [1, 8]
rollout = {top_p = 0.95, max_new_tokens = 100}

[evaluate.sets.longer]
data = {task_size = 9}
""", ("rollout.top_k", "5"))
    many, longer = config.evaluation_set("many"), config.evaluation_set("longer")
    assert (many.evaluate.samples_per_prompt, many.evaluate.temperature, many.evaluate.pass_at) == (8, 0.6, (1, 8))
    assert (many.rollout.top_p, many.rollout.max_new_tokens, many.rollout.top_k) == (0.95, 100, 5)
    assert many.data == config.data and longer.data == config.data.model_copy(update={"task_size": 9})
    assert (longer.evaluate.num_prompts, longer.evaluate.every_steps, longer.rollout) == (64, 7, config.rollout)
    assert many.evaluate.sets == {} and (many.algorithm, many.train) == (config.algorithm, config.train)


def test_another_source_of_rows_replaces_the_runs(tmp_path: Path) -> None:
    config = with_sets(tmp_path, '[evaluate.sets.file.data]\npath = "rows.jsonl"\n')
    assert (config.evaluation_set("file").data.path, config.evaluation_set("file").data.task) == ("rows.jsonl", "")
    assert config.evaluation_set("file").data.system_prompt == "Sort."
    run = [("data.path", "rows.jsonl"), ("data.heldout_path", "held.jsonl"), ("evaluate.sets.made.data.task", "addition")]
    made = load_config(None, run).evaluation_set("made").data
    assert (made.task, made.path, made.heldout_path) == ("addition", "", "")
    split = load_config(None, [*run[:2], ("evaluate.sets.test.data.split", "test")]).evaluation_set("test").data
    assert (split.path, split.split, split.heldout_path) == ("rows.jsonl", "test", "")


def test_another_thing_to_play_replaces_the_runs() -> None:
    run = [("rollout.workflow", "gym"), ("agent.environment", "textarena:TicTacToe-v0"), ("agent.options", '["num_players=2"]')]
    for workflow, name, value in (("agent", "command", '["play"]'), ("tool_loop", "tools", '["tools.py:add"]')):
        agent = load_config(None, [
            *run, ("evaluate.sets.other.rollout.workflow", workflow), (f"evaluate.sets.other.agent.{name}", value),
        ]).evaluation_set("other").agent
        assert (agent.environment, agent.options) == ("", ()) and getattr(agent, name)
    single = load_config(None, [*run, ("evaluate.sets.plain.rollout.workflow", "single_turn")]).evaluation_set("plain")
    assert single.agent.environment == "" and single.rollout.workflow == "single_turn"
    turns = load_config(None, [*run, ("evaluate.sets.short.agent.max_turns", "2")]).evaluation_set("short").agent
    assert (turns.environment, turns.options, turns.max_turns) == ("textarena:TicTacToe-v0", ("num_players=2",), 2)


def test_what_a_curriculum_needs_of_the_data_does_not_bind_a_set() -> None:
    config = load_config(None, [("data.path", "rows.jsonl"), ("curriculum.pools", "true"), ("evaluate.sets.a.data.task", "addition")])
    assert config.evaluation_set("a").data.task == "addition" and config.curriculum.pools


@pytest.mark.parametrize(("key", "text", "sentence"), [
    ("AIME.num_prompts", "5",
     "evaluate.sets must have names of lower case letters, digits and '_', got 'AIME'; metrics are named after them"),
    ("a.num_prompts", "0", "evaluate.sets.a.num_prompts must be >= 1, got 0"),
    ("a.every_steps", "-1",
     "evaluate.sets.a.every_steps must be >= 0, got -1; use 0 to evaluate only before the first and after the last step"),
    ("a.rollout.max_new_tokens", "many", "evaluate.sets.a.rollout.max_new_tokens must be an integer, got 'many'"),
    ("a.data.format", "gsm9k",
     "evaluate.sets.a.data.format must be one of 'auto', 'prompt_answer', 'gsm8k', 'messages', got 'gsm9k'; did you mean 'gsm8k'?"),
    ("a.max_new_tokens", "5",
     "evaluate.sets.a.max_new_tokens is not a setting of an evaluation set; did you mean evaluate.sets.a.rollout.max_new_tokens?"),
    ("a.num_prompt", "5", "evaluate.sets.a.num_prompt is not a setting of an evaluation set; did you mean evaluate.sets.a.num_prompts?"),
    ("a.rollout.temperature", "1",
     "evaluate.sets.a.rollout.temperature is not a setting of an evaluation set; did you mean evaluate.sets.a.temperature?"),
    ("a.train.autocast", "true",
     "evaluate.sets.a.train is not a setting of an evaluation set; it has settings of [evaluate], and of [data], [rollout] and [agent] in"
     " tables"),
    ("a.data.heldout_path", "x", "evaluate.sets.a.data.heldout_path is not a setting of an evaluation set; did you mean "),
    ("a.data", "5", "evaluate.sets.a.data must be a table of settings, got 5; write [evaluate.sets.a.data] and its settings below"),
    ("a", "5", "evaluate.sets.a must be a table of settings, got 5; write [evaluate.sets.a] and its settings below"),
    ("a", "{}", "evaluate.sets.a is empty, so it would be the run's held-out prompts once more; give what differs, or leave it out"),
    ("a", "{agent = {}}", "evaluate.sets.a.agent is empty; give what differs from [agent], or leave it out"),
    ("a.samples_per_prompt", "2",
     "evaluate.sets.a: evaluate.temperature must be above 0 with evaluate.samples_per_prompt = 2, got 0; greedy answers to a prompt are all"
     " equal"),
    ("a.rollout.workflow", "gym",
     "evaluate.sets.a: one of agent.environment must be given with rollout.workflow = 'gym', got none; it says what is played"),
])
def test_what_no_set_can_have_is_refused_with_the_place_where_it_stands(key: str, text: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, [(f"evaluate.sets.{key}", text)])
    assert str(caught.value).startswith(sentence)


def test_a_set_is_written_as_it_was_given(tmp_path: Path) -> None:
    config = with_sets(tmp_path, """
[evaluate.sets.a]
num_prompts = 5
data = {path = "12", chat_template = true}
[evaluate.sets.b.rollout]
stop = ["\\n"]
""")
    text = dump_toml(config)
    assert "[evaluate.sets.a]\nnum_prompts = 5\n\n[evaluate.sets.a.data]\npath = \"12\"\nchat_template = true\n" in text
    again = tmp_path / "again.toml"
    again.write_text(text)
    assert load_config(str(again)) == config
    assert "sets" not in dump_toml(Config())


def test_overrides_of_a_set_are_read_as_those_of_the_run_are() -> None:
    argv = ["--evaluate.sets.a.data.chat_template", "--evaluate.sets.a.data.path", "12", "run.toml"]
    overrides, rest = split_overrides(argv)
    assert rest == ["run.toml"]
    data = load_config(None, overrides).evaluation_set("a").data
    assert data.chat_template is True and data.path == "12"
    assert setting_of("evaluate.sets.a.data.path") == "data.path" and setting_of("evaluate.sets.a.pass_at") == "evaluate.pass_at"
    assert setting_of("evaluate.sets") == "evaluate.sets" and setting_of("data.path") == "data.path"


def test_the_best_model_is_known_by_what_an_evaluation_measures() -> None:
    sets = [("evaluate.sets.a.samples_per_prompt", "4"), ("evaluate.sets.a.temperature", "1"), ("evaluate.sets.a.pass_at", "[2, 4]")]
    for metric in ("eval/accuracy", "eval/reward_mean", "eval/a/pass_at_4", "eval/a/accuracy/player 0"):
        assert load_config(None, [*sets, ("evaluate.keep_best", metric)]).evaluate.keep_best == metric
    own = [*sets, ("evaluate.sets.a.metric", "metrics.py:f1")]
    assert load_config(None, [*own, ("evaluate.keep_best", "eval/a/f1")]).evaluate.keep_best == "eval/a/f1"
    for metric in ("eval/f1", "eval/a/b/f1"):
        with pytest.raises(ConfigError, match=r"evaluate\.keep_best must be one of"):
            load_config(None, [*own, ("evaluate.keep_best", metric)])
    for other, metric, sentence in (
        ([], "eval/b/accuracy", "evaluate.keep_best must be one of eval/accuracy, eval/reward_mean, eval/a/accuracy, eval/a/reward_mean,"
         " eval/a/pass_at_2, eval/a/pass_at_4, got 'eval/b/accuracy'; a set has pass_at_K for each K of its pass_at"),
        ([("data.heldout_size", "0")], "eval/accuracy", "evaluate.keep_best must be one of eval/a/accuracy, "),
        ([("evaluate.stop_after_no_gain", "3")], "",
         "evaluate.keep_best must be given with evaluate.stop_after_no_gain = 3; it names the metric that is to rise"),
        ([("evaluate.stop_after_no_gain", "3"), ("evaluate.every_steps", "0")], "eval/accuracy",
         "evaluate.every_steps must be at least 1 with evaluate.stop_after_no_gain = 3, got 0; eval/accuracy is measured before"),
        ([("evaluate.stop_after_no_gain", "3"), ("evaluate.sets.a.every_steps", "0")], "eval/a/accuracy",
         "evaluate.sets.a.every_steps must be at least 1 with evaluate.stop_after_no_gain = 3, got 0; eval/a/accuracy is measured before"),
    ):
        with pytest.raises(ConfigError) as caught:
            load_config(None, [*sets, *other, ("evaluate.keep_best", metric)])
        assert str(caught.value).startswith(sentence)
