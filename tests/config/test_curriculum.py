"""[curriculum]: off by default, and no pool is never drawn from."""

import pytest
from pydantic import ValidationError

from offbeat.config.curriculum import CurriculumConfig


def test_it_is_off_unless_one_of_its_two_rules_is_on() -> None:
    assert not CurriculumConfig(easy_weight=0.5).is_on
    assert CurriculumConfig(pools=True).is_on and CurriculumConfig(leave_at=0.9).is_on


def test_every_pool_is_drawn_from_and_no_weight_is_more_than_every_epoch() -> None:
    for pool in ("hard", "normal", "easy", "unseen"):
        for weight in (0, 1.5):
            with pytest.raises(ValidationError):
                CurriculumConfig.model_validate({f"{pool}_weight": weight})
