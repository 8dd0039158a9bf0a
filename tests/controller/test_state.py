"""Counting steps and versions."""

import asyncio

from offbeat.controller.parts import SingleProcess
from offbeat.controller.state import HeadState, Highlights, RunState, SavedState, Step
from offbeat.data import wire
from offbeat.data.dataset import StreamState


def test_steps_count_from_where_the_state_stands() -> None:
    state = RunState(total_steps=4, global_step=2, version=7)
    assert state.last_version == 9
    assert list(state.steps()) == [Step(3, 7, 8), Step(4, 8, 9)]
    assert (state.global_step, state.version, state.last_version) == (4, 9, 9)
    assert list(state.steps()) == []
    assert not state.stopped_early


def test_a_step_counts_only_when_the_next_is_asked_for() -> None:
    state = RunState(total_steps=4)
    steps = state.steps()
    next(steps)
    assert state.global_step == 0
    next(steps)
    assert (state.global_step, state.version) == (1, 1)


def test_a_stop_ends_after_the_step_that_is_being_done() -> None:
    state = RunState(total_steps=4)
    done = []
    for step in state.steps():
        done.append(step.global_step)
        if step.global_step == 2:
            state.asked_to_stop = True
            asyncio.run(state.agree(SingleProcess()))
    assert done == [1, 2]
    assert (state.global_step, state.version, state.stopping, state.stopped_early) == (2, 2, True, True)


def test_a_stop_in_the_last_step_is_no_early_stop() -> None:
    state = RunState(total_steps=1)
    for _ in state.steps():
        state.asked_to_stop = True
        asyncio.run(state.agree(SingleProcess()))
    assert not state.stopped_early


def test_a_resumed_run_that_has_enough_steps_does_none() -> None:
    assert list(RunState(total_steps=2, global_step=5, version=5).steps()) == []


def test_what_a_checkpoint_remembers_survives_as_json() -> None:
    saved = SavedState(3, 4, (HeadState(StreamState(1, 7, ("0:5",)), ("1:2", "1:6")),), Highlights(heldout_before=0.25, max_staleness=2))
    assert wire.decode_json(SavedState, wire.encode_json(saved)) == saved
