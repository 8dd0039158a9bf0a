"""Several data sets drawn as one."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.config.data import DataConfig
from offbeat.data.dataset import EveryNth, ListDataset, open_datasets
from offbeat.data.mixture import BLOCK, Mixture, RowsOfSet, first_rows, rows_of_block
from offbeat.data.row import Row
from offbeat.data.stream import PromptStream, StreamState
from offbeat.data.wire import decode_json, encode_json


def rows(name: str, count: int, **config) -> RowsOfSet:
    return RowsOfSet(ListDataset(tuple(Row(f"{name}{index}", "a") for index in range(count))), name, DataConfig(**config))


def mixture(weights: dict[str, float], *, seed: int = 0, shuffle: bool = True, count: int = 7) -> Mixture:
    return Mixture({name: rows(name, count) for name in weights}, weights, seed, shuffle)


def drawn(mixed: Mixture, start: int, stop: int) -> list[str]:
    return [str(mixed.row(index).prompt) for index in range(start, stop)]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=40))
def test_every_set_has_its_share_of_a_block_and_at_least_one_row(weights: list[float]) -> None:
    counts = rows_of_block(tuple(weights))
    assert sum(counts) == BLOCK and min(counts) >= 1
    if all(weight / sum(weights) * BLOCK >= 1 for weight in weights):
        assert all(abs(count - weight / sum(weights) * BLOCK) < 1 for count, weight in zip(counts, weights, strict=True))


def test_sets_are_drawn_by_their_weights_and_each_epoch_of_one_has_all_of_its_rows() -> None:
    mixed = mixture({"a": 3.0, "b": 1.0})
    assert rows_of_block((3.0, 1.0)) == (750, 250)
    prompts = drawn(mixed, 0, 2 * BLOCK)
    assert Counter(prompt[0] for prompt in prompts) == {"a": 1500, "b": 500}
    assert Counter(prompt[0] for prompt in prompts[:200])["a"] > 100, "they are mixed within a block"
    of_b = [prompt for prompt in prompts if prompt[0] == "b"]
    epochs = [of_b[start : start + 7] for start in range(0, 490, 7)]
    assert all(len(set(epoch)) == 7 for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 50, "each time in another order"


def test_what_an_index_stands_for_depends_on_nothing_that_was_drawn_before() -> None:
    mixed = mixture({"a": 2.0, "b": 1.0, "c": 0.5})
    straight = drawn(mixed, 0, 3000)
    again = mixture({"a": 2.0, "b": 1.0, "c": 0.5})
    assert [str(again.row(index).prompt) for index in (2500, 3, 999, 1000, 0)] == [straight[index] for index in (2500, 3, 999, 1000, 0)]
    assert drawn(mixture({"a": 2.0, "b": 1.0, "c": 0.5}, seed=1), 0, 100) != straight[:100]


def test_a_stream_of_a_mixture_goes_on_exactly() -> None:
    straight = PromptStream(mixture({"a": 2.0, "b": 1.0}), seed=5)
    expected = [straight.next() for _ in range(1100)]
    first = PromptStream(mixture({"a": 2.0, "b": 1.0}), seed=5)
    before = [first.next() for _ in range(700)]
    first.give_back(before[3][0])
    second = PromptStream(mixture({"a": 2.0, "b": 1.0}), seed=5)
    second.restore(decode_json(StreamState, encode_json(first.state())))
    assert second.next() == before[3]
    assert before + [second.next() for _ in range(400)] == expected


def test_rows_keep_their_order_without_shuffling_and_begin_again() -> None:
    mixed = mixture({"a": 1.0}, shuffle=False, count=3)
    assert drawn(mixed, 0, 5) == ["a0", "a1", "a2", "a0", "a1"]
    assert mixed.where(4) == "a: row 1"


def test_endless_tasks_can_be_mixed() -> None:
    task, _ = open_datasets(DataConfig(task="sort_digits", heldout_size=4), seed=0)
    mixed = Mixture({"task": RowsOfSet(task, "task", DataConfig()), "b": rows("b", 3)}, {"task": 1.0, "b": 1.0}, 0)
    found = [mixed.row(index) for index in range(2 * BLOCK)]
    of_task = [row for row in found if row.of_set == "task"]
    assert [row.prompt for row in of_task] == [task.row(index).prompt for index in range(BLOCK)]


def test_rows_are_rendered_as_their_set_says_and_know_its_name() -> None:
    row = rows("a", 1, chat_template=True, system_prompt="be brief", chat_template_kwargs={"thinks": True}).row(0)
    assert row.prompt == ({"role": "system", "content": "be brief"}, {"role": "user", "content": "a0"})
    assert (row.of_set, row.template_kwargs) == ("a", {"thinks": True})
    assert rows("b", 1).row(0) == Row("b0", "a", of_set="b")


def test_the_digest_is_that_of_rows_weights_and_order() -> None:
    base = mixture({"a": 1.0, "b": 2.0})
    others = [
        mixture({"a": 1.0, "b": 3.0}), mixture({"b": 2.0, "a": 1.0}), mixture({"a": 1.0, "b": 2.0}, seed=1),
        mixture({"a": 1.0, "b": 2.0}, shuffle=False), mixture({"a": 1.0, "b": 2.0}, count=8)]
    assert mixture({"a": 1.0, "b": 2.0}).digest == base.digest
    assert len({base.digest, *(other.digest for other in others)}) == 6


def test_the_first_row_of_each_set_is_known_also_to_processes_that_share_them() -> None:
    mixed = mixture({"a": 1.0, "b": 9.0})
    assert {name: row.prompt for name, row in first_rows(mixed).items()} == {"a": "a0", "b": "b0"}
    assert first_rows(EveryNth(mixed, 1, 2)) == first_rows(mixed)
    with pytest.raises(AssertionError, match="mixture"):
        first_rows(ListDataset(()))
