"""What filters let pass, and orders."""

from pathlib import Path

import pytest

from offbeat.dashboard.rollout_filter import Filter
from offbeat.dashboard.rollout_index import RolloutIndex
from offbeat.data.stored_rollouts import Address
from offbeat.errors import ConfigError
from rollout_samples import addresses, group, write_rollouts


@pytest.mark.parametrize(("wanted", "expected"), [
    ({"min_step": 2, "max_step": 2, "status": "trained"}, ["2.0.0", "2.0.1"]),
    ({"min_reward": 1.0}, ["3.0.0", "2.0.0", "1.0.0"]),
    ({"min_reward": 0.25, "max_reward": 0.5}, ["3.0.1", "1.1.0"]),
    ({"max_length": 4}, ["2r.0.0", "2r.0.1", "2r.1.0", "1.1.1"]),
    ({"min_version": 4}, []),
    ({"max_version": 3, "min_step": 3}, ["3.0.0", "3.0.1"]),
    ({"prompt": "fruit"}, ["3.0.0", "3.0.1", "1.1.0", "1.1.1"]),
    ({"prompt": "0% of it_"}, ["2r.0.0", "2r.0.1"]),
    ({"prompt": "0_"}, []),
    ({"text": "is 42"}, ["2.0.0", "1.0.0"]),
    ({"text": "IT IS"}, ["1.0.0"]),
    ({"text": "42 is"}, []),
    ({"text": "ban*"}, ["3.0.1"]),
    ({"text": "ban"}, []),
    ({"text": "apfel"}, ["3.0.0"]),
    ({"text": "alert(1)"}, ["3.0.0"]),
    ({"text": "NOT apple OR * \" NEAR"}, []),
    ({"reason": "too long"}, ["1.1.1"]),
    ({"reason": "equal rewards"}, ["2r.0.0", "2r.0.1"]),
    ({"status": "rejected"}, ["2r.0.0", "2r.0.1", "2r.1.0"]),
    ({"status": "left out"}, ["1.1.1"]),
    ({"same_prompt": Address(1, False, 0, 1)}, ["2.0.0", "2.0.1", "1.0.0", "1.0.1"]),
    ({"text": "is", "prompt": "6 * 7", "min_reward": 1}, ["2.0.0", "1.0.0"]),
])
def test_filters(index: RolloutIndex, wanted: dict, expected: list[str]) -> None:
    assert addresses(index, **wanted) == expected


@pytest.mark.parametrize(("order", "first"), [
    ("oldest", ["1.0.0", "1.0.1"]), ("best", ["3.0.0", "2.0.0"]), ("worst", ["2.0.1", "2r.0.0"]), ("longest", ["3.0.0", "1.1.0"]),
    ("shortest", ["2r.1.0", "2r.0.0"])])
def test_orders(index: RolloutIndex, order: str, first: list[str]) -> None:
    assert [each.address for each in index.find_rollouts(Filter(), order=order, limit=2)] == first
    assert len(index.find_rollouts(Filter(), order=order, limit=50)) == 11


def test_a_search_without_a_word_is_refused(index: RolloutIndex) -> None:
    for text in ("<>", '"', "*"):
        with pytest.raises(ConfigError, match="has none; give letters or digits"):
            index.find_rollouts(Filter(text=text))


def test_a_prompt_is_found_in_any_case_of_its_letters(tmp_path: Path) -> None:
    write_rollouts(tmp_path, 1, [group("Größe der Äpfel? ", ("12", 1.0))])
    index = RolloutIndex(tmp_path)
    index.update()
    assert addresses(index, prompt="GRÖSSE der äPFEL") == ["1.0.0"] and addresses(index, prompt="x" * 60_000) == []


def test_a_search_with_a_nul_character_is_one_for_the_words_around_it(index: RolloutIndex) -> None:
    assert addresses(index, text="is\x0042") == ["2.0.0", "1.0.0"]
