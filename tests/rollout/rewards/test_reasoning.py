"""The reward of reasoning-gym's tasks: which part of a completion is judged, and by whom."""

import pytest

from offbeat.data.reasoning import open_reasoning
from offbeat.rollout.rewards.reasoning import final_answer, reasoning


@pytest.mark.parametrize(("completion", "reference", "judged"), [
    ("12 + 30 is 42.", "7", "42"),
    ("It is 1,234", "7", "1234"),
    ("minus 5, so -5", "7", "-5"),
    ("no number", "7", ""),
    ("<answer> 3 </answer> and not <answer>4</answer> of 9", "7", "4"),
    (" up, down\n", "left", "up, down"),
])
def test_the_final_answer_is_what_is_tagged_or_the_last_number_or_everything(completion, reference, judged):
    assert final_answer(completion, reference) == judged


def test_the_familys_verifier_judges():
    row = open_reasoning("reasoning_gym:chain_sum", ()).row(0, seed=0)
    assert reasoning(f"The answer is {row.answer}.", row) == 1.0
    assert reasoning("I do not know", row) == 0.0
    # Many answers are right here, and the reference is only one of them.
    countdown = open_reasoning("reasoning_gym:countdown", ()).row(0, seed=0)
    assert reasoning(f"<answer>{countdown.answer}</answer>", countdown) == 1.0
    assert reasoning("<answer>1 + 1</answer>", countdown) < 1.0
