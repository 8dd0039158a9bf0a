"""Training without a configuration file, by options that have the names of Python's arguments."""

import inspect
from pathlib import Path

import pytest

import offbeat
from offbeat.cli.main import build_parser, main
from offbeat.cli.named import named_config
from offbeat.config.load import split_overrides
from offbeat.config.root import Config
from offbeat.errors import ConfigError


def configured(command: str, *words: str) -> Config:
    overrides, rest = split_overrides([command, *words])
    return named_config(build_parser(command).parse_args(rest), overrides, command=command)


def test_options_say_what_settings_say() -> None:
    config = configured(
        "train", "--model", "org/model", "--data", "rows.jsonl", "--reward", "mine.py:score", "--name", "mine", "--evaluate", "held.jsonl",
        "--run.total_steps", "7")
    assert (config.model.path, config.data.path, config.data.task) == ("org/model", "rows.jsonl", "")
    assert (config.rollout.reward, config.data.heldout_path) == ("mine.py:score", "held.jsonl")
    assert (config.run.name, config.run.total_steps) == ("mine", 7)
    assert configured("sft", "--data", "sort_digits").data.task == "sort_digits"
    several = configured("train", "--data", "sort_digits", "--reward", "math", "--reward", "a.b:c")
    assert several.rollout.rewards == {"math": 1.0, "a.b:c": 1.0}


def test_options_win_over_the_file(tmp_path: Path) -> None:
    (tmp_path / "task.toml").write_text('[data]\ntask = "addition"\n[rollout.rewards]\nmath = 1.0\nexact_match = 0.5\n')
    config = configured("train", str(tmp_path / "task.toml"), "--data", "rows.jsonl", "--reward", "math")
    assert (config.data.task, config.data.path, config.rollout.reward, config.rollout.rewards) == ("", "rows.jsonl", "math", {})


@pytest.mark.parametrize("command", ["train", "sft", "dpo", "reward-model"])
def test_the_function_of_a_command_has_arguments_of_the_same_names(command: str) -> None:
    function = inspect.signature(getattr(offbeat, command.replace("-", "_"))).parameters
    options = vars(build_parser(command).parse_args([command]))
    assert {"model", "data", "evaluate", "config", "dashboard"} <= options.keys() & function.keys()
    assert ("reward" in options) == ("reward" in function)


@pytest.mark.parametrize(("words", "sentence"), [
    (["train"], "'offbeat train' was given no data; give a TOML file, or --model MODEL --data rows.jsonl --reward rewards.py:score"),
    (["dpo"], "'offbeat dpo' was given no data; give a TOML file, or --model MODEL --data rows.jsonl"),
    (["train", "--model", "a", "--model.path", "b"], "--model and --model.path say the same; give one of them"),
    (["train", "--reward", "math", "--rollout.rewards", "{}"], "--reward and --rollout.rewards say the same; give one of them"),
    (["train", "--model", "a", "--reward", "maths"], "rollout.reward: there is no reward 'maths'; use one of exact_match"),
    (["train", "--model", "a", "--reward", "mine.py"], "rollout.reward: 'mine.py' names no function; write 'mine.py:score'"),
    (["train", "--model", "a"], "'offbeat train' was given no data"),
    (["sft", "--data", "sort_digits", "--reward", "math"], "--reward is not an option of 'offbeat sft'"),
])
def test_what_cannot_be_trained_is_refused_in_a_sentence(
        words: list[str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words) == ConfigError.exit_code == 2
    said = capsys.readouterr().err
    assert said.startswith(f"offbeat: {sentence}") and said.count("\n") == 1


def test_help_teaches_training_without_a_file(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    said = capsys.readouterr().out
    assert "--model HuggingFaceTB/SmolLM2-135M-Instruct --data rows.jsonl" in said and "--reward rewards.py:score" in said
    assert "def score(completion, row):" in said
