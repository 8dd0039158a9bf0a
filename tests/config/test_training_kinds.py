"""The table of kinds of training: each row leads to its section, its lesson and its words, and none of them is another kind's."""

import pytest

from offbeat.config.base import Section
from offbeat.config.root import TRAINING_KINDS, Config
from offbeat.config.train import OptimizerConfig
from offbeat.controller.checkpoints import WARM_UP
from offbeat.controller.supervised import Lesson, lesson_of

ON_EXAMPLES = [name for name, kind in TRAINING_KINDS.items() if kind.lesson]


def test_the_kinds_are_these() -> None:
    assert list(TRAINING_KINDS) == ["train", "sft", "dpo", "reward-model"]
    assert [kind.function for kind in TRAINING_KINDS.values()] == ["train", "sft", "dpo", "reward_model"]
    assert [kind.part for kind in TRAINING_KINDS.values()] == ["rl", "sft", "preference", "reward_model"]


def test_events_are_named_by_the_section_and_those_of_reinforcement_learning_by_nothing() -> None:
    assert [kind.event("step") for kind in TRAINING_KINDS.values()] == ["step", "sft_step", "preference_step", "reward_model_step"]


def test_no_two_kinds_share_a_section_or_a_name_of_checkpoints_or_metrics() -> None:
    kinds = TRAINING_KINDS.values()
    assert len({kind.section for kind in kinds}) == len(kinds) == len({kind.checkpoints for kind in kinds} - {WARM_UP})
    metrics = [name for kind in kinds for name in kind.metrics]
    assert len(metrics) == len(set(metrics))


@pytest.mark.parametrize("name", TRAINING_KINDS)
def test_a_row_stands_in_its_own_section_and_names_settings_that_exist(name: str) -> None:
    kind, config = TRAINING_KINDS[name], Config()
    assert getattr(config, kind.section).training is kind
    section, _, setting = kind.named_by.partition(".")
    assert not kind.named_by or hasattr(getattr(config, section), setting)


@pytest.mark.parametrize("name", ON_EXAMPLES)
def test_a_lesson_is_found_by_its_name_and_has_the_settings_that_all_have(name: str) -> None:
    kind = TRAINING_KINDS[name]
    lesson = lesson_of(kind)
    section = getattr(Config(), kind.section)
    assert issubclass(lesson, Lesson) and lesson.kind is kind
    assert isinstance(section, Section) and isinstance(section.optimizer, OptimizerConfig)  # type: ignore[attr-defined]
    assert section.read_by == (kind.part,) and {"total_steps", "evaluate_every_steps"} <= type(section).model_fields.keys()
    assert lesson.completed(Config(), steps=10**9, accuracy=None) and lesson.completed(Config(), steps=0, accuracy=None) is None
