"""Reward functions in all forms that users write them."""

import math
from pathlib import Path

import pytest

from offbeat.data.image_sources import MARK, ImageSource
from offbeat.data.reward import FailedReward, NamedReward
from offbeat.data.row import Row
from offbeat.errors import CodeError
from offbeat.rollout.reward_functions import RewardFunction

CODE = """
import asyncio, numpy as np, torch
from offbeat.data.reward import of_group

def single(completion, row):
    if completion == "x":
        raise ValueError("x is no number")
    return None if completion == "none" else float(completion == row.answer)

waiting = 0

async def together(completion, row):
    # Each waits until all are there, so that a call after the other would never end.
    global waiting
    waiting += 1
    while waiting % 3:
        await asyncio.sleep(0)
    return await asyncio.sleep(0, single(completion, row))

@of_group
def marked(completions, row):
    return [{"right": each == row.answer, "short": None} for each in completions]

def of_row(completions, row):
    return [row.answer] * len(completions)

def trl(prompts, completions, answer, numbers, **kwargs):
    assert numbers == [[1, 2]] * len(completions) and kwargs["level"] == ["easy"] * len(completions), kwargs
    return [0.5 if each == right else None for each, right in zip(completions, answer)]

def trl_chat(completions, truth=None, unknown="default"):
    assert unknown == "default"
    return [float(each[0]["content"] == right and each[0]["role"] == "assistant") for each, right in zip(completions, truth)]

async def trl_async(completions, **kwargs):
    await asyncio.sleep(0)
    return [float(len(each)) for each in completions]

def trl_numpy(completions, **kwargs):
    return np.array([len(each) for each in completions], np.float32)

def trl_torch(completions, **kwargs):
    return torch.tensor([float(len(each)) for each in completions], requires_grad=True)

def trl_bools(completions, answer, **kwargs):
    return np.array(completions) == np.array(answer)

def trl_yields(completions, **kwargs):
    for each in completions:
        yield None if each == "none" else float(len(each))

def trl_missing(completions, **kwargs):
    return np.array([1.0, np.nan])

def trl_columns(completions, **kwargs):
    return np.ones((2, 1))

def trl_set(completions, **kwargs):
    return {1.0, 2.0}

def trl_text(completions, **kwargs):
    return "12"

def trl_breaks(completions, **kwargs):
    yield 1.0
    raise KeyError("late")

def trl_ids(completions, completion_ids):
    return [0.0] * len(completions)

def trl_few(completions, **kwargs):
    return [1.0]

def trl_raises(completions, **kwargs):
    raise KeyError("truth")

class Judge:
    async def __call__(self, completion, row):
        return 2.0

judge = Judge()
later = lambda completion, row: asyncio.sleep(0, 3.0)
"""


@pytest.fixture
def values(tmp_path: Path):
    path = tmp_path / "own.py"
    path.write_text(CODE)

    def call(name: str, completions: list[str], row: Row) -> list[float | None]:
        return RewardFunction(f"{path}:{name}").values(completions, row)

    return call


ROW = Row("1+2=", "3", {"numbers": "[1, 2]", "level": "easy"}, json_fields=("numbers",))


def reasons(found) -> list[str | None]:
    return [each.reason if isinstance(each, FailedReward) else None for each in found]


@pytest.mark.parametrize("name", ["single", "together"])
def test_completions_are_scored_and_fail_one_by_one(values, name) -> None:
    right, missing, failed = values(name, ["3", "none", "x"], ROW)
    assert (right, missing) == (1.0, None)
    assert isinstance(failed, FailedReward)
    assert f"own.py:{name} raised ValueError: x is no number at " in failed.reason
    assert failed.reason.endswith("own.py, line 7 (completion 'x')")


def test_the_traceback_goes_to_the_log_of_the_process_once(values, capfd) -> None:
    values("single", ["x", "x"], ROW)
    said = capfd.readouterr().err
    assert said.count("Traceback") == 1 and "own.py" in said and "line 7, in single" in said


def test_an_async_reward_is_called_again_on_the_same_loop(values, tmp_path) -> None:
    function = RewardFunction(f"{tmp_path / 'own.py'}:together")
    assert function.takes_group
    assert [function.values(["3", "1", "2"], ROW) for _ in range(2)] == [[1.0, 0.0, 0.0]] * 2
    assert values("judge", ["a", "b"], ROW) == [2.0, 2.0]
    assert values("later", ["a"], ROW) == [3.0]


def test_a_reward_of_groups_gets_all_completions_and_the_row(values) -> None:
    first, second = values("marked", ["3", "4"], ROW)
    assert isinstance(first, NamedReward) and first.parts == {"right": 1.0}, "a part that does not apply is left out"
    assert second == 0.0
    [text] = reasons(values("of_row", ["3"], ROW))
    assert text is not None and "returned what cannot be trained on: '3' (str) is not a number" in text


def test_a_reward_in_trls_form_gets_the_columns_that_it_names_as_they_were(values) -> None:
    assert values("trl", ["3", "4"], ROW) == [0.5, None]
    assert values("trl_async", ["ab", ""], ROW) == [2.0, 0.0]
    chat = Row(({"role": "user", "content": "1+2="},), "3", {"truth": "3"})
    assert values("trl_numpy", ["ab", ""], ROW) == values("trl_torch", ["ab", ""], ROW) == [2.0, 0.0]
    assert values("trl_bools", ["3", "4"], ROW) == [1.0, 0.0] and values("trl_yields", ["ab", "none"], ROW) == [2.0, None]
    first, missing = values("trl_missing", ["3", "4"], ROW)
    assert first == 1.0 and isinstance(missing, FailedReward), "one fails alone"
    assert values("trl_chat", ["3", "4"], chat) == [1.0, 0.0]


@pytest.mark.parametrize(("name", "reason"), [
    ("trl_ids", "takes 'completion_ids', which no column of the data is called; there are answer, completions, level, numbers, prompts"),
    ("trl_columns", "must return a list of 2 rewards, returned array([[1.],"), ("trl_set", "must return a list of 2 rewards, returned {"),
    ("trl_text", "must return a list of 2 rewards, returned '12' (str)"), ("trl_breaks", "raised KeyError: 'late'"),
    ("trl_few", "must return a list of 2 rewards, returned [1.0] (list)"), ("trl_raises", "raised KeyError: 'truth'"),
])
def test_a_reward_in_trls_form_that_fails_says_why_for_the_group(values, name, reason) -> None:
    found = values(name, ["3", "4"], ROW)
    assert all(math.isnan(each) for each in found)
    assert all(reason in (each or "") for each in reasons(found)), reasons(found)


def test_what_takes_a_group_is_known_when_it_is_loaded(tmp_path) -> None:
    path = tmp_path / "own.py"
    path.write_text(CODE)
    forms = {name: RewardFunction(f"{path}:{name}").takes_group for name in ("single", "together", "marked", "of_row", "trl", "later")}
    assert forms == {"single": False, "together": True, "marked": True, "of_row": True, "trl": True, "later": False}
    with pytest.raises(CodeError, match="did you mean 'single'"):
        RewardFunction(f"{path}:singl")


def test_columns_cross_as_json(tmp_path) -> None:
    path = tmp_path / "own.py"
    path.write_text("def seen(completions, **columns):\n    return [{name: float(len(str(value))) for name, value in columns.items()}]\n")
    row = Row("p", "a", {"n": "7", "text": "7", "none": "null"}, "s", json_fields=("n", "none"))
    [found] = RewardFunction(f"{path}:seen").values(["c"], row)
    assert found.parts.keys() == {"prompts", "answer", "solution", "n", "text", "none"}
    assert found.parts["n"] == len(str([7])) and found.parts["text"] == len(str(["7"])) and found.parts["none"] == len(str([None]))



@pytest.mark.parametrize(("code", "found"), [
    ("def reward(row, completion): return float(completion == row.answer)", [1.0, 0.0]),
    ("def reward(row, text): return float(text == row.answer)", [1.0, 0.0]),
    ("async def reward(row, completion): return float(completion == row.answer)", [1.0, 0.0]),
    ("def reward(row, completions): return [float(each == row.answer) for each in completions]", [1.0, 0.0]),
    ("from offbeat.data.reward import of_group\n@of_group\ndef reward(row, texts): return [float(each == row.answer) for each in texts]",
     [1.0, 0.0]),
    ("def reward(text, anything): return float(text == anything.answer)", [1.0, 0.0])])
def test_a_parameter_called_row_gets_the_row_in_either_place(code: str, found: list[float], tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text(code)
    assert RewardFunction(f"{tmp_path}/code.py:reward").values(["yes", "no"], Row("really? ", "yes")) == found


@pytest.mark.parametrize("parameters", ["prompt, completion", "prompts, completions, row", "answer, completion, row"])
def test_parameters_that_do_not_say_which_is_the_completion_are_refused(parameters: str, tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text(f"def reward({parameters}): return 1.0")
    with pytest.raises(CodeError, match=rf"takes \({parameters}\), which does not say where the row goes; a reward takes \(completion"):
        RewardFunction(f"{tmp_path}/code.py:reward")


def test_images_of_a_prompt_are_shown_to_a_reward_in_trls_form(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text(
        "def reward(prompts, completions, images):\n"
        "    assert images == [['pictures/7.png', 'data:image/*;base64,AAAA']] * 2, images\n"
        "    return [float(prompts[0] == each) for each in ('<image>or<image>?', [\n"
        "        {'role': 'user', 'content': [{'type': 'image'}, {'type': 'text', 'text': 'or'}, {'type': 'image'},\n"
        "                                     {'type': 'text', 'text': '?'}]}])]\n")
    images = (ImageSource("pictures/7.png"), ImageSource(data=bytes(3)))
    function = RewardFunction(f"{tmp_path}/code.py:reward")
    assert function.values(["a", "b"], Row(f"{MARK}or{MARK}?", "", images=images)) == [1.0, 0.0]
    chat = ({"role": "user", "content": f"{MARK}or{MARK}?"},)
    assert function.values(["a", "b"], Row(chat, "", images=images)) == [0.0, 1.0]
