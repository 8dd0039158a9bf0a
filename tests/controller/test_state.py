"""Counting steps and versions."""

import asyncio
from dataclasses import replace

import pytest

from offbeat.config.evaluate import EvaluateConfig
from offbeat.controller.parts import SingleProcess
from offbeat.controller.state import Best, Decided, HeadState, Highlights, LoopStep, RunState, SavedState, SetHighlights
from offbeat.data import wire
from offbeat.data.stream import StreamState


def test_steps_count_from_where_the_state_stands() -> None:
    state = RunState(total_steps=4, global_step=2, version=7)
    assert state.last_version == 9
    assert list(state.steps()) == [LoopStep(3, 7, 8), LoopStep(4, 8, 9)]
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
            state.asked.set()
            asyncio.run(state.agree(SingleProcess()))
    assert done == [1, 2]
    assert (state.global_step, state.version, state.stopping, state.stopped_early) == (2, 2, True, True)


def test_the_leader_decides_for_all_peers_whether_a_step_is_saved() -> None:
    class Led(SingleProcess):
        async def lead(self, name: str, work: object, kind: type) -> object:
            assert (name, kind) == ("stop", Decided)
            return wire.decode(kind, wire.encode(Decided(stop=False, save=True)))

    state = RunState(total_steps=4)
    for peers, saving in ((SingleProcess(), False), (Led(), True), (SingleProcess(), False)):
        asyncio.run(state.agree(peers, overdue=False))
        assert (state.saving, state.stopping) == (saving, False)
    asyncio.run(state.agree(SingleProcess(), overdue=True))
    assert state.saving


def test_a_stop_in_the_last_step_is_no_early_stop() -> None:
    state = RunState(total_steps=1)
    for _ in state.steps():
        state.asked.set()
        asyncio.run(state.agree(SingleProcess()))
    assert not state.stopped_early


def test_a_resumed_run_that_has_enough_steps_does_none() -> None:
    assert list(RunState(total_steps=2, global_step=5, version=5).steps()) == []


def test_what_a_checkpoint_remembers_survives_as_json() -> None:
    saved = SavedState(3, 4, (HeadState(StreamState(1, 7, ("0:5",)), ("1:2", "1:6")),), Highlights(heldout_before=0.25, max_staleness=2))
    assert wire.decode_json(SavedState, wire.encode_json(saved)) == saved
    marks = saved.highlights.evaluated("hard", 0.5, num_prompts=8, global_step=0).measured("eval/hard/accuracy", 0.5, global_step=0)
    saved = replace(saved, highlights=marks)
    assert wire.decode_json(SavedState, wire.encode_json(saved)) == saved


def test_the_accuracy_before_the_first_step_is_kept_beside_the_last_one() -> None:
    marks = Highlights().evaluated("", 0.25, num_prompts=8, global_step=0).evaluated("hard", 0.0, num_prompts=8, global_step=0)
    assert (marks.heldout_before, marks.heldout_after, marks.heldout_after_step) == (0.25, None, None), "none is after a step"
    assert marks.sets == {"hard": SetHighlights(0.0, None, None)}
    for name, accuracy, step in (("", 0.5, 5), ("hard", 0.125, 5), ("late", 0.75, 6)):
        marks = marks.evaluated(name, accuracy, num_prompts=8, global_step=step)
    assert (marks.heldout_before, marks.heldout_after, marks.heldout_after_step) == (0.25, 0.5, 5)
    assert marks.sets == {"hard": SetHighlights(0.0, 0.125, 5), "late": SetHighlights(None, 0.75, 6)}


@pytest.mark.parametrize(("before", "after", "num_prompts", "fell"), [
    (0.320, 0.133, 256, True), (0.320, 0.133, 16, False), (0.32, 0.31, 256, False), (0.1, 0.3, 256, False), (1.0, 0.0, 4, True),
    (None, 0.3, 256, False),
])
def test_held_out_accuracy_has_fallen_where_that_is_more_than_chance(before, after, num_prompts: int, fell: bool) -> None:
    marks = Highlights().evaluated("hard", 1.0, num_prompts=num_prompts, global_step=0)
    assert not marks.heldout_fell and not Highlights(heldout_before=0.9, heldout_after=0.1).heldout_fell, "nobody knows of how many prompts"
    if before is not None:
        marks = marks.evaluated("", before, num_prompts=num_prompts, global_step=0)
    for name, accuracy in (("", after), ("hard", 0.0)):
        marks = marks.evaluated(name, accuracy, num_prompts=num_prompts, global_step=3)
    assert marks.heldout_fell is fell


def test_the_best_evaluation_is_the_first_with_the_largest_value_and_the_later_ones_are_counted() -> None:
    marks = Highlights()
    for step, value in enumerate((0.25, 0.5, 0.5, 0.375)):
        marks = marks.measured("eval/accuracy", value, global_step=step)
    assert marks.best == Best("eval/accuracy", 0.5, 1, num_since=2)
    ends = [marks.best.is_final(EvaluateConfig(keep_best="eval/accuracy", stop_after_no_gain=count)) for count in (0, 1, 2, 3)]
    assert ends == [False, True, True, False]
    assert not marks.best.is_final(EvaluateConfig(keep_best="eval/hard/accuracy", stop_after_no_gain=1)), "it is another metric now"
    assert marks.measured("eval/hard/accuracy", 0.0, global_step=9).best == Best("eval/hard/accuracy", 0.0, 9)
