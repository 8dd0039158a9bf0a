"""What a resumed run refuses, and what it says."""

from dataclasses import replace
from pathlib import Path

import pytest

from offbeat.controller.resume import compare
from offbeat.controller.state import SavedState
from offbeat.data import wire
from offbeat.data.identity import Identity
from offbeat.errors import ConfigError

RUN = Path("runs/mine")
THEN = Identity(
    {"run.seed": 0, "train.optimizer.lr": 1e-6, "model.path": "a", "data.path": "rows.jsonl", "data.heldout_size": 4,
     "data.sets": {"a": {"weight": 1}},
     "rollout.reward": "code.py:score"},
    "rows", 30, "weights", "tokens", {"rollout.reward": "source"})


def said(now: Identity, then: Identity | None = THEN) -> list[str]:
    return compare(now, SavedState(8, 8, (), identity=then), run_dir=RUN, part="rl")


def changed(**settings: object) -> Identity:
    return replace(THEN, settings={**THEN.settings, **{key.replace("__", "."): value for key, value in settings.items()}})


def test_what_has_not_changed_is_nothing_to_speak_of() -> None:
    assert said(THEN) == []
    assert said(changed(run__seed=7), then=None) == [], "an older version remembered nothing"


def test_what_may_change_is_said_in_a_line() -> None:
    now = changed(train__optimizer__lr=1e-5, data__heldout_size=8)
    assert said(now) == ["continues with train.optimizer.lr = 1e-05, was 1e-06; data.heldout_size = 8, was 4"]


def test_a_set_whose_rows_are_drawn_as_before_may_change_otherwise() -> None:
    assert said(changed(data__sets={"a": {"weight": 1, "rollout": {}}}))[0].startswith("continues with data.sets = ")


def test_what_may_not_change_is_refused_with_both_values_and_a_remedy() -> None:
    with pytest.raises(ConfigError, match=(
            r"^the run 'runs/mine' cannot resume from step 8 with run.seed = 7, was 0; restore it, or start over with another"
            r" run.name$")):
        said(changed(run__seed=7))


@pytest.mark.parametrize(("now", "sentence"), [
    (replace(THEN, data="others", num_rows=31), r"with other data: the rows .* of 31 where there were 30; restore it"),
    (replace(changed(data__path="new.jsonl"), data="others"), r"has drawn from \(data.path = \"new.jsonl\", was \"rows.jsonl\"\); restore"),
    (replace(changed(data__heldout_size=5), data="others"), r"drawn from \(data.heldout_size = 5, was 4\); restore"),
    (replace(changed(data__sets={"a": {"weight": 2}}), data="others"), r"drawn from \(data.sets = .*weight = 2.*was .*weight = 1.*\)"),
    (replace(THEN, data="others", num_rows=None), r"of endlessly many where there were 30"),
    (replace(changed(model__path="b"), model="others"), r"another model: \"b\" has other weights .* \(model.path = \"b\", was \"a\"\)"),
    (replace(THEN, tokenizer="others"), r"with another tokenizer, which makes other tokens of the same text; restore"),
])
def test_other_contents_are_refused_with_the_settings_that_they_come_from(now: Identity, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        said(now)


def test_the_same_contents_under_another_path_are_no_change() -> None:
    assert said(changed(model__path="moved", data__path="moved.jsonl", rollout__reward="elsewhere/code.py:score")) == []


def test_other_code_is_said_in_a_line() -> None:
    renamed = replace(changed(rollout__reward="code.py:other"), code={"rollout.reward": "source"})
    assert said(renamed) == ['continues with rollout.reward = "code.py:other", was "code.py:score"']
    edited = replace(THEN, code={"rollout.reward": "edited"})
    assert said(edited) == ["continues with another rollout.reward: the file of its code is not as it was at the checkpoint"]


def test_fine_tuning_does_not_ask_for_the_code_of_rewards() -> None:
    edited = replace(THEN, code={"rollout.reward": "edited"})
    assert compare(edited, SavedState(8, 8, (), identity=THEN), run_dir=RUN, part="sft") == []


def test_the_identity_comes_back_from_a_checkpoint_as_it_was() -> None:
    saved = SavedState(8, 8, (), identity=THEN)
    assert wire.decode_json(SavedState, wire.encode_json(saved)) == saved
    assert wire.decode_json(SavedState, b'{"global_step": 8, "version": 8, "heads": []}').identity is None


def test_an_objective_of_ones_own_is_code_of_which_another_source_is_said_in_a_line() -> None:
    then = replace(
        THEN, settings={**THEN.settings, "algorithm.objective": "mine.py:loss"}, code={**THEN.code, "algorithm.objective": "source"})
    other = replace(then, code={**then.code, "algorithm.objective": "other source"})
    assert said(other, then) == ["continues with another algorithm.objective: the file of its code is not as it was at the checkpoint"]
    moved = replace(then, settings={**then.settings, "algorithm.objective": "elsewhere/mine.py:loss"})
    assert said(moved, then) == []
    built_in = replace(then, settings={**then.settings, "algorithm.objective": "ppo"}, code={**then.code, "algorithm.objective": ""})
    assert said(built_in, then) == ['continues with algorithm.objective = "ppo", was "mine.py:loss"']
