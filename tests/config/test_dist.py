"""[dist]: deadlines."""

import pytest
from pydantic import ValidationError

from offbeat.config.dist import DistConfig


def test_no_collective_waits_without_a_deadline():
    for name in DistConfig.model_fields:
        with pytest.raises(ValidationError):
            DistConfig(**{name: 0})
