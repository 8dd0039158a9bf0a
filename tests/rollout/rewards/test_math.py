"""The reward math: gold answers in the forms of public data with right and wrong answers, and answers that cost too much to compute."""

import threading

import pytest

from math_answers import CASES
from offbeat.data.row import Row
from offbeat.rollout.rewards import equality
from offbeat.rollout.rewards.math import math_reward


@pytest.mark.parametrize(("gold", "right", "wrong"), CASES, ids=[case[0] for case in CASES])
def test_of_the_answers_to_a_gold_answer_the_right_ones_alone_earn_the_reward(gold, right, wrong):
    row = Row("q", gold)
    assert {answer: math_reward(rf"So it is $\boxed{{{answer}}}$.", row) for answer in (*right, *wrong)} == {
        **dict.fromkeys(right, 1.0), **dict.fromkeys(wrong, 0.0)}


@pytest.mark.parametrize("form", [r"We find \(x = 1\). The answer is $%s$.", "It takes a while.\nAnswer: %s", "%s", "work\n#### %s"])
@pytest.mark.parametrize(("gold", "wrong"), [(r"5\sqrt{13}", "13"), ("(3, 5)", "5"), ("p - q", "q"), (r"\frac{14}{3}", "14")])
def test_an_answer_counts_in_every_form_that_states_one(form, gold, wrong):
    assert math_reward(form % gold, Row("q", gold)) == 1.0
    assert math_reward(form % wrong, Row("q", gold)) == 0.0


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
    (r"\boxed{1} and \boxed{2}", "1, 2"),
    (r"\boxed{\text{(C) } 12}", "C"),
    ("Final Answer: The final answer is $17$. I hope it is correct.", "17"),
])
def test_an_equal_answer_earns_the_reward(completion, answer):
    assert math_reward(completion, Row("q", answer)) == 1.0


@pytest.mark.parametrize(("completion", "answer"), [
    ("41", "42"),
    ("", "42"),
    ("42", ""),
    ("no number here", "42"),
    (r"\boxed{42", "42"),
    ("42 #### 41", "42"),
    ("-5", "5"),
    (r"42 and \boxed{}", "42"),
    ("((((((", "42"),
    ("####", "42"),
    (r"the point is (3, 5)", "5"),
    (r"it is \frac{14}{3}", "3"),
    (r"\boxed{1}, \boxed{2}", "2"),
])
def test_another_or_no_answer_earns_nothing(completion, answer):
    assert math_reward(completion, Row("q", answer)) == 0.0


@pytest.mark.parametrize("answer", [
    "9^{9^{9}}", "9^{9^{9^{9}}}", "(9^9)^{(9^9)}", "10^{10^{10}}", "2^{-9^{9^{9}}}", "(10^9)!", "((9!)!)!", r"\binom{10^9}{5*10^8}",
    "x^{9^{9^9}}", r"\sin(9^{9^{9}})", "(" * 2000 + "1" + ")" * 2000, "{" * 2000 + "}" * 2000, "9" * 4000, r"\sqrt{" * 30 + "2" + "}" * 30])
def test_an_answer_too_large_to_compute_earns_nothing_and_is_not_tried(answer, monkeypatch):
    monkeypatch.setattr(equality, "verify", lambda *_args, **_kwargs: pytest.fail("it was tried"))
    assert math_reward(rf"\boxed{{{answer}}}", Row("q", r"\sqrt{3}")) == 0.0


@pytest.mark.parametrize("answer", ["", "\x00", "1/0", "0^0", "1e999999999", r"\frac", "^" * 300, "$" * 300, "\\" * 301, "1" + "!" * 9])
def test_an_answer_without_meaning_earns_nothing(answer):
    assert math_reward(rf"\boxed{{{answer}}}", Row("q", r"\sqrt{3}")) == 0.0


def test_an_answer_that_takes_too_long_earns_nothing_and_the_next_one_is_scored(monkeypatch):
    monkeypatch.setattr(equality, "_LIMIT_S", 0.1)
    assert math_reward(r"\boxed{\prod_{k=1}^{100000000} k}", Row("q", r"\sqrt{3}")) == 0.0
    monkeypatch.setattr(equality, "_LIMIT_S", 30.0)
    assert math_reward(r"\boxed{\sqrt{12} / 2}", Row("q", r"\sqrt{3}")) == 1.0


@pytest.mark.parametrize("text", [
    r"\boxed{" * 200_000, r"\boxed{1}," * 100_000, "$ x" * 300_001, "#" * 1_000_000, "answer is " * 100_000, "1," * 500_000,
    "\\[" * 500_000, r"\boxed{" + "1+" * 500_000 + "}"])
def test_a_text_of_megabytes_is_read_in_linear_time(text):
    assert math_reward(text, Row("q", "42")) == 0.0


def test_a_number_too_large_to_compute_equals_one_that_is_written_the_same():
    assert math_reward(r"\boxed{9^{9^{9}}}", Row("q", "$9^{9^{9}}$")) == 1.0


def test_it_works_outside_of_the_main_thread():
    rewards = []
    thread = threading.Thread(target=lambda: rewards.append(math_reward(r"\sqrt{4}", Row("q", "2"))))
    thread.start()
    thread.join(timeout=60)
    assert rewards == [1.0]
