r"""Reward 1 for a mathematically equal final answer: `1/2`, `0.5` and `\frac{1}{2}` are the same.

Answers of data are bare LaTeX (`5\sqrt{13}`, `(3, 5)`), between dollars, in a box, or a solution that ends with one. `final_answer` finds
a completion's answer, and `equality` compares the two.
"""

from offbeat.data.row import Row
from offbeat.rollout.rewards.equality import equal
from offbeat.rollout.rewards.final_answer import final_answers, gold_answer


def math_reward(completion: str, row: Row) -> float:
    """Return 1.0 if the completion's final answer equals the row's, else 0.0; also 0.0 if there is none, or it cannot be computed."""
    gold = gold_answer(row.answer)
    return float(any(equal(gold, answer) for answer in final_answers(completion)))
