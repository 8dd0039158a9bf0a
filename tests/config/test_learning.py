"""Sections on what a run learns from come before those on how it is run, in files of settings and in the reference."""

from offbeat.config.learning import LearningConfig
from offbeat.config.root import Config


def test_the_sections_on_learning_begin_the_configuration() -> None:
    own = list(LearningConfig.model_fields)
    assert own[0] == "run" and list(Config.model_fields)[: len(own)] == own


def test_every_kind_of_training_has_its_section_here() -> None:
    kinds = {info.annotation.training.section for info in LearningConfig.model_fields.values() if info.annotation.training is not None}
    assert kinds == {"run", "sft", "preference", "reward_model"}
