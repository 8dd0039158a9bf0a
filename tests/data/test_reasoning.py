"""Tasks of reasoning-gym: rows by index alone, mixtures by weight, and what is refused before anything starts."""

import pytest

from offbeat.config.data import DataConfig
from offbeat.data.dataset import open_datasets
from offbeat.data.reasoning import open_reasoning, verify
from offbeat.data.row import Row
from offbeat.data.wire import decode, encode
from offbeat.errors import DataError

OPTIONS = ("chain_sum.min_terms=2", "chain_sum.max_terms=2", "chain_sum.max_digits=1", "chain_sum.min_digits=1")


def test_a_row_depends_on_seed_stream_and_index_alone():
    task, again = open_reasoning("reasoning_gym:chain_sum", OPTIONS), open_reasoning("reasoning_gym:chain_sum", OPTIONS)
    row = task.row(10**9, seed=3)
    assert row == again.row(10**9, seed=3)
    questions = {task.row(10**9, seed=3, stream=stream).prompt for stream in ("train", "heldout", "other", "more")}
    assert len(questions) > 1
    numbers = [part for part in row.prompt.replace("=", "").split() if part.lstrip("-").isdigit()]
    assert len(numbers) == 2 and all(len(number.lstrip("-")) == 1 for number in numbers)


def test_the_verifier_sees_the_row_that_was_asked_after_a_journey():
    row = open_reasoning("reasoning_gym:countdown", ()).row(5, seed=1)
    travelled = decode(Row, encode(row))
    assert verify(row.answer, travelled) == 1.0
    assert verify("1", travelled) < 1.0


def test_an_answer_that_the_verifier_cannot_read_is_wrong():
    assert verify("3 = 6", open_reasoning("reasoning_gym:prime_factorization", ()).row(0, seed=1)) == 0.0


def test_families_are_drawn_by_their_weights():
    task = open_reasoning("reasoning_gym:chain_sum*3, count_bits", OPTIONS)
    families = [task.row(index, seed=0).extra["family"] for index in range(1000)]
    assert 0.70 < families.count("chain_sum") / 1000 < 0.80
    assert set(families) == {"chain_sum", "count_bits"}


def test_held_out_questions_are_not_trained_on_and_too_few_of_them_are_said():
    config = DataConfig(task="reasoning_gym:chain_sum", task_options=OPTIONS, heldout_size=30)
    train, heldout = open_datasets(config, seed=0)
    held = {heldout.row(index).prompt for index in range(30)}
    assert len(held) == 30
    assert not held & {train.row(index).prompt for index in range(200)}
    with pytest.raises(DataError, match="widen its ranges in data.task_options or lower data.heldout_size"):
        open_datasets(config.model_copy(update={"heldout_size": 2000}), seed=0)


@pytest.mark.parametrize(("task", "options", "said"), [
    ("reasoning_gym:chainsum", (), "no family 'chainsum'; it has chain_sum"),
    ("reasoning_gym:", (), "must be reasoning_gym:NAME"),
    ("reasoning_gym:chain_sum*0", (), "a weight > 0"),
    ("reasoning_gym:chain_sum,chain_sum", (), "names a family twice"),
    ("reasoning_gym:chain_sum", ("max_terms=2",), "must be FAMILY.OPTION=VALUE"),
    ("reasoning_gym:chain_sum", ("count_bits.n=2",), "with a family of data.task"),
    ("reasoning_gym:chain_sum", ("chain_sum.seed=2",), "must not set seed"),
    ("reasoning_gym:chain_sum", ("chain_sum.max_terms=two",), "is not TOML"),
    ("reasoning_gym:chain_sum", ("chain_sum.min_terms=9",), "max_terms must be >= min_terms"),
    ("reasoning_gym:chain_sum", ("chain_sum.colour=1",), "unexpected keyword argument 'colour'"),
])
def test_a_wrong_task_or_option_is_refused_in_one_sentence(task, options, said):
    with pytest.raises(DataError) as caught:
        open_reasoning(task, options)
    assert said in str(caught.value)
