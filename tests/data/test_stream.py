"""Drawing rows in an order that resumes exactly."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.config.data import DataConfig
from offbeat.data.dataset import ListDataset, open_datasets
from offbeat.data.row import Row
from offbeat.data.stream import PromptStream, StreamState
from offbeat.data.wire import decode_json, encode_json
from offbeat.errors import DataError


def rows(count):
    return ListDataset(tuple(Row(f"{i}>", str(i)) for i in range(count)))


def test_each_epoch_visits_every_row_once_in_another_order():
    stream = PromptStream(rows(50), seed=0)
    epochs = [[stream.next()[0] for _ in range(50)] for _ in range(2)]
    for epoch, ids in enumerate(epochs):
        assert sorted(ids) == sorted(f"{epoch}:{i}" for i in range(50))
    orders = [[prompt_id.partition(":")[2] for prompt_id in ids] for ids in epochs]
    assert orders[0] != orders[1]


def test_an_id_names_the_row_it_comes_with_and_unshuffled_rows_come_in_order():
    stream = PromptStream(rows(3), seed=0, shuffle=False)
    drawn = [stream.next() for _ in range(4)]
    assert [(prompt_id, row.answer) for prompt_id, row in drawn] == [("0:0", "0"), ("0:1", "1"), ("0:2", "2"), ("1:0", "0")]
    assert stream.row("7:2") == drawn[2][1]


def test_generated_rows_are_drawn_by_index_without_an_epochs_end():
    train, _ = open_datasets(DataConfig(task="sort_digits", heldout_size=4), seed=0)
    stream = PromptStream(train, seed=0)
    assert [stream.next()[0] for _ in range(3)] == ["0:0", "0:1", "0:2"]


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 12), st.booleans(), st.lists(st.integers(0, 3), max_size=40), st.integers(0, 40))
def test_a_restored_stream_goes_on_exactly_and_loses_nothing(num_rows, shuffle, events, stop):
    """Random draws (0, 1, 2) and give-backs (3), interrupted anywhere: the interrupted stream draws what the other one draws."""

    def play(stream, held, events):
        drawn = []
        for event in events:
            if event == 3 and held:
                stream.give_back(held.pop(0))
            else:
                drawn.append(stream.next())
                held.append(drawn[-1][0])
        return drawn

    straight, held = PromptStream(rows(num_rows), seed=9, shuffle=shuffle), []
    expected = play(straight, held, events)
    first, held_first = PromptStream(rows(num_rows), seed=9, shuffle=shuffle), []
    before = play(first, held_first, events[:stop])
    state = decode_json(StreamState, encode_json(first.state()))
    second = PromptStream(rows(num_rows), seed=9, shuffle=shuffle)
    second.restore(state)
    assert before + play(second, held_first, events[stop:]) == expected
    assert second.state() == straight.state()
    # Everything drawn is held by the caller or waits to come again, once each.
    known = [*held, *straight.state().returned]
    assert len(known) == len(set(known)) == straight.state().epoch * num_rows + straight.state().position


def test_what_is_given_back_comes_first_in_the_order_it_came():
    stream = PromptStream(rows(10), seed=0)
    drawn = [stream.next() for _ in range(5)]
    stream.give_back(drawn[3][0])
    stream.give_back(drawn[1][0])
    assert stream.state().returned == (drawn[3][0], drawn[1][0])
    assert [stream.next(), stream.next()] == [drawn[3], drawn[1]]
    assert stream.next()[0] not in [prompt_id for prompt_id, _ in drawn]


def test_a_changed_dataset_or_a_strange_id_is_refused():
    stream = PromptStream(rows(4), seed=0)
    with pytest.raises(DataError, match="the saved run had drawn 5 prompts of this epoch, but the dataset has 4 rows"):
        stream.restore(StreamState(0, 5))
    for prompt_id in ("0:4", "zero", "1:"):
        with pytest.raises(DataError, match=f"'epoch:index' within a dataset of 4 rows, got '{prompt_id}'"):
            stream.give_back(prompt_id)
