"""Rows with images are refused where a part of the run would read their prompts as text."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from image_models import file_of, make_folder, picture
from offbeat.cli.main import main
from offbeat.config.root import Config
from offbeat.controller.inputs import image_reader, row_check
from offbeat.controller.row_checks import check_of_pairs
from offbeat.data.image_sources import MARK, ImageSource
from offbeat.data.image_store import ImageStore
from offbeat.data.pairs import Preference
from offbeat.data.row import Row
from offbeat.data.tokenizer import character_tokenizer
from offbeat.errors import ConfigError, DataError
from small_run import small_config

ROW = Row(f"{MARK}how many?", "1", images=(ImageSource(data=file_of(picture())),))
TEACHER = {"algorithm__teacher": "model"}


def judge(folder: Path, prompt: str) -> str:
    path = folder / "judge.toml"
    path.write_text(f'url = "http://127.0.0.1:1/v1"\nmodel = "j"\nprompt = "{prompt}"\n')
    return f"judge:{path}"


def checked(config: Config, row: Row = ROW, *, taught: bool = True) -> None:
    row_check(config, character_tokenizer(), answered=True, taught=taught)(row, "row 7")


@pytest.mark.parametrize(("settings", "part"), [
    ({"rollout__reward": "model:judging"}, "the reward model of rollout.reward = 'model:judging' would not see; give a reward function"),
    ({"rollout__workflow": "gym", "agent__environment": "my_env.py:Env"}, "agent.environment = 'my_env.py:Env' does not show to the model"),
    ({**TEACHER, "teacher__url": "http://127.0.0.1:1"}, "the teacher at teacher.url = 'http://127.0.0.1:1' would not see; give its folder"),
])
def test_a_part_that_would_not_see_images_is_named_with_what_to_do(tmp_path: Path, settings: dict[str, str], part: str) -> None:
    config = small_config(tmp_path, **settings)
    with pytest.raises(ConfigError) as refused:
        checked(config)
    assert str(refused.value).startswith(f"row 7 has an image, which {part}")
    checked(config, Row("how many?", "1"))


def test_a_teacher_is_asked_about_rows_to_train_on_alone(tmp_path: Path) -> None:
    config = small_config(tmp_path, **TEACHER, teacher__url="http://127.0.0.1:1")
    checked(config, replace(ROW, prompt="how many?", images=()))
    with pytest.raises(ConfigError, match="teacher.url"):
        checked(config)
    with pytest.raises(DataError, match="which are not read for"):
        checked(config, taught=False)


def test_a_judge_is_refused_if_it_is_shown_the_question(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"row 7 has an image, which the judge of rollout.reward, 'judge:.*', would not see; leave \{"):
        checked(small_config(tmp_path, rollout__reward=judge(tmp_path, "{question} {answer}")))
    with pytest.raises(DataError, match="which are not read for"):
        checked(small_config(tmp_path, rollout__reward=judge(tmp_path, "is {answer} {reference}?")))


def test_a_teacher_must_make_the_same_of_an_image_as_the_policy(tmp_path: Path) -> None:
    policy, same, other = (make_folder(tmp_path / name, family) for name, family in (
        ("policy", "qwen3_vl"), ("same", "qwen3_vl"), ("other", "smolvlm")))

    def told(teacher: Path) -> str:
        with pytest.raises((ConfigError, DataError)) as refused:
            checked(small_config(tmp_path, str(policy), **TEACHER, teacher__path=str(teacher)))
        return str(refused.value)

    assert "which are not read for" in told(same), "the teacher is fine, and the tokenizer of this test is no reader"
    another = "the teacher at teacher.path = '{}' reads in another way than the policy, or not at all"
    assert another.format(other) in told(other)
    (same / "preprocessor_config.json").write_text(json.dumps({"min_pixels": 64}))
    assert another.format(same) in told(same)


@pytest.mark.parametrize(("family", "settings", "reason"), [
    ("gemma3", {}, "models of type 'gemma3'"), ("qwen3_vl_moe", {}, "models of type 'qwen3_vl_moe'"),
    ("qwen3_vl", {"model__lora__rank": "4"}, r"adapters \(model.lora.rank\)"),
    ("qwen3_vl", {"weights__interrupt": "keep"}, 'weights.interrupt = "keep"'),
    ("qwen3_vl", {"inference__quantization": "int8"}, r"rounded weights \(inference.quantization\)"),
])
def test_vllm_is_refused_by_name_where_it_would_not_see_images(
    tmp_path: Path, family: str, settings: dict[str, str], reason: str,
) -> None:
    model = str(make_folder(tmp_path / "model", family))
    config = small_config(tmp_path, model, inference__engine="vllm", **settings)
    with pytest.raises(ConfigError, match=f"row 7 has an image, which inference.engine = 'vllm' does not read with {reason}; use the emb"):
        checked(config)
    checked(config, Row("how many?", "1"))


def test_vllm_sees_images_of_the_types_that_it_names(tmp_path: Path) -> None:
    config = small_config(tmp_path, model := str(make_folder(tmp_path / "model", "qwen3_vl")), inference__engine="vllm")
    assert image_reader(config, model, ImageStore(tmp_path)) is not None
    by_url = small_config(tmp_path, model, inference__engine="vllm", inference__urls='["http://127.0.0.1:1"]')
    assert image_reader(by_url, model, ImageStore(tmp_path)) is not None
    assert image_reader(small_config(tmp_path, model, inference__engine="sglang"), model, ImageStore(tmp_path)) is None


def test_images_that_no_model_reads_are_refused_in_rows_and_pairs(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="row 7 has 1 images, which are not read for"):
        checked(small_config(tmp_path))
    config = small_config(tmp_path)
    pair = Preference(ROW.prompt, ("1", "2"), (True, False), images=ROW.images)
    with pytest.raises(DataError, match="row 7 has 1 images, which are not read for"):
        check_of_pairs(character_tokenizer(), config.data)(pair, "row 7")


@pytest.mark.parametrize("command", ["config check", "train"])
def test_a_run_whose_reward_model_would_not_see_images_is_refused_at_once_in_one_sentence(
    tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_folder(tmp_path / "model", "qwen3_vl")
    picture().save(tmp_path / "a.png")
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "<image>how many?", "images": ["a.png"], "answer": "1"}) + "\n")
    config = tmp_path / "run.toml"
    config.write_text(
        f'[run]\nname = "r"\ndir = "{tmp_path}"\n[model]\npath = "{model}"\n[data]\npath = "{rows}"\nheldout_size = 0\n'
        f'[rollout]\nreward = "model:{tmp_path}"\nmax_new_tokens = 4\n[evaluate]\nevery_steps = 0\n')
    assert main([*command.split(), str(config)]) == 2
    told = capsys.readouterr().err
    assert f"'{rows}', line 1 has an image, which the reward model of rollout.reward = 'model:{tmp_path}' would not see" in told
    assert not (tmp_path / "r").exists()
