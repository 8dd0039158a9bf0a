"""Mathematical equality of final answers."""

import threading

import pytest

from offbeat.data.row import Row
from offbeat.rollout.rewards.math import final_answer, math_reward


@pytest.mark.parametrize(("completion", "answer"), [
    ("42", "42"),
    ("First 12, then 7. The answer is 42.", "42"),
    ("3 apples and 39 pears are 42", "42"),
    ("work\n#### 1,234", "1234"),
    ("#### 7\nno: #### 42", "42"),
    (r"so \boxed{\frac{1}{2}}", "0.5"),
    (r"\boxed{3}, no wait, \boxed{4} and 5", "4"),
    ("the cost is $18.00", "18"),
    (r"\boxed{x^2 + 2x + 1}", "$(x+1)^2$"),
    ("1/2", r"\frac{1}{2}"),
    ("-5", "-5"),
    ("it is 5", "7 * 1 = 7 #### 5"),
])
def test_an_equal_answer_earns_the_reward(completion, answer):
    assert math_reward(completion, Row("q", answer)) == 1.0


@pytest.mark.parametrize(("completion", "answer"), [
    ("41", "42"),
    ("", "42"),
    ("no number here", "42"),
    (r"\boxed{42", "42"),
    ("42 #### 41", "42"),
    ("-5", "5"),
    (r"42 and \boxed{}", "42"),
    ("((((((", "42"),
    ("####", "42"),
])
def test_another_or_no_answer_earns_nothing(completion, answer):
    assert math_reward(completion, Row("q", answer)) == 0.0


def test_the_final_answer_is_the_last_marked_one():
    assert final_answer(r"\boxed{1} #### 2") == "2"
    assert final_answer(r"\boxed{1} then \boxed{\frac{a}{b}} end") == r"\boxed{\frac{a}{b}}"
    assert final_answer("plain 3") == "plain 3"


def test_it_works_outside_of_the_main_thread():
    rewards = []
    thread = threading.Thread(target=lambda: rewards.append(math_reward("42", Row("q", "42"))))
    thread.start()
    thread.join(timeout=60)
    assert rewards == [1.0]
