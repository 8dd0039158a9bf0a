"""Generated tasks: right answers, random access, independent streams."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.config.data import DataConfig
from offbeat.data.tasks import find_task
from offbeat.data.tokenizer import character_tokenizer
from offbeat.errors import DataError
from offbeat.user_code.functions import resolve


def task_of(name, size=8):
    return find_task(DataConfig(task=name, task_size=size))


TASKS = ("sort_digits", "addition", "countdown", "seeds")
TOKENIZER = character_tokenizer()
INDEX = st.integers(0, 10**12)


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(TASKS), st.integers(1, 12), INDEX)
def test_every_answer_earns_its_tasks_reward_and_every_character_has_a_token(name, size, index):
    task = task_of(name, size)
    row = task.row(index, seed=3)
    assert resolve(task.reward, kind="reward")(row.answer, row) == 1.0
    assert TOKENIZER.decode(TOKENIZER.encode(row.prompt + row.answer)) == row.prompt + row.answer


@given(INDEX)
def test_a_row_depends_on_seed_stream_and_index_alone(index):
    task = task_of("sort_digits", 20)
    row = task.row(index, seed=1)
    assert row == task_of("sort_digits", 20).row(index, seed=1)
    others = [task.row(index + 1, seed=1), task.row(index, seed=2), task.row(index, seed=1, stream="heldout")]
    assert row not in others  # 10^20 prompts


def test_rows_look_as_documented():
    sort = task_of("sort_digits", 8).row(0, seed=0)
    assert sort.prompt[-1] == ">"
    assert sort.answer == "".join(sorted(sort.prompt[:-1]))
    assert len(sort.answer) == 8
    add = task_of("addition", 3).row(0, seed=0)
    a, b = add.prompt.removesuffix("=").split("+")
    assert int(a) + int(b) == int(add.answer)
    count = task_of("countdown", 4).row(0, seed=0)
    assert count.prompt == f"{count.extra['numbers']} -> {count.extra['target']}?"
    assert len(count.extra["numbers"].split()) == 4
    assert 1 <= int(count.extra["target"]) <= 999


def test_seeds_are_rows_for_environments_that_make_their_own_tasks():
    row = task_of("seeds").row(3, seed=0)
    assert row.extra == {"seed": row.prompt} and int(row.prompt) >= 0 and row.answer == ""


def test_the_largest_countdown_can_be_made():
    row = task_of("countdown", 64).row(1, seed=0)
    assert len(row.extra["numbers"].split()) == 64


def test_options_are_for_tasks_of_reasoning_gym():
    with pytest.raises(DataError, match="addition has data.task_size"):
        find_task(DataConfig(task="addition", task_options=("addition.max_terms=2",)))
