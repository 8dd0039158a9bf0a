"""What programs measure beside rewards: which names and values become metrics, by hand."""

import numpy as np
import pytest

from offbeat.rollout.measures import MOST_NAMES, Measures, numbers_of


def test_numbers_are_taken_and_everything_else_is_left_out() -> None:
    given = {"a": 1, "b": True, "c": np.float32(0.5), "d": float("nan"), "e": "1", "f": None, "g": [1.0], "h": {"i": 1}, 5: 1.0}
    assert numbers_of(given) == {"a": 1.0, "b": 1.0, "c": 0.5}
    assert len(numbers_of({str(i): i for i in range(1000)})) == MOST_NAMES


def test_means_are_over_the_episodes_of_a_step_that_have_a_value() -> None:
    measures = Measures()
    measures.add({"steps": 2.0, "agent/found": 1.0})
    measures.add({"steps": 5.0})
    assert measures.take_stats().values() == {"rollout/metrics/steps": 3.5, "rollout/metrics/agent/found": 1.0}
    assert measures.take_stats().values() == {}
    measures.add({"steps": 1.0})
    assert measures.take_stats().values() == {"rollout/metrics/steps": 1.0}


@pytest.mark.parametrize("name", ["", "two words", "-x", "/x", "a\n", "é", "x" * 61, "a,b"])
def test_names_that_are_none_of_a_metric_are_left_out_and_told_once(name: str) -> None:
    told: list[str] = []
    measures = Measures(told.append)
    for _ in range(2):
        measures.add({name: 1.0, "fine": 2.0})
    assert measures.take_stats().values() == {"rollout/metrics/fine": 2.0} and len(told) == 1
    assert "is left out, as a name has 1 to 60 letters" in told[0]


def test_the_number_of_names_of_a_run_is_bounded() -> None:
    told: list[str] = []
    measures = Measures(told.append)
    for number in range(1000):
        measures.add({f"name_{number}": 1.0})
    assert list(measures.take_stats().means) == [f"rollout/metrics/name_{number}" for number in range(MOST_NAMES)]
    assert told == [f"the metric 'name_{MOST_NAMES}' of an episode is left out, as a run keeps 64 names (this is shown once)"]
    measures.add({"name_1": 3.0, "name_999": 1.0})
    assert measures.take_stats().values() == {"rollout/metrics/name_1": 3.0}
