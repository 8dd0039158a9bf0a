"""Where a text states its answer."""

import pytest

from offbeat.rollout.rewards.final_answer import final_answers, gold_answer


@pytest.mark.parametrize(("text", "found"), [
    (r"\boxed{1} #### 2", ("2",)),
    (r"\boxed{1} then \boxed{\frac{a}{b}} end", (r"\frac{a}{b}",)),
    (r"\boxed{1}, \boxed{2} and $\boxed{3}$.", ("1, 2, 3",)),
    (r"\boxed{\left\{ x \right.}", (r"\left\{ x \right.",)),
    (r"\fbox{5} or \boxed 7 here", ("5, 7",)),
    (r"so \boxed{4", ()),
    ("It is 3.\n**Answer:** $\\frac{1}{2}$.", (r"\frac{1}{2}",)),
    ("The final answer is 5 cm. I hope it is correct.", ("5 cm",)),
    ("plain 3", ("plain 3", "3")),
    ("x = 5", ("x = 5", "5")),
    ("two lines\nand then $x + 1$, fine", ("x + 1",)),
    ("the points are (3, 5)", ("the points are (3, 5)",)),
    ("", ()),
])
def test_the_final_answer_is_the_last_one_that_is_marked_or_else_the_last_value(text, found):
    assert final_answers(text) == found


@pytest.mark.parametrize(("text", "found"), [
    (r"5\sqrt{13}", r"5\sqrt{13}"), ("$x$", "x"), (r"\( 2 \)", "2"), (r"\text{(B)}", r"\text{(B)}"), ("No solution", "No solution"),
    ("The area is 25 square units.", "25"), (r"It follows that $a+b=\boxed{8}$", "8"), ("x = 1 and y = 2", "x = 1 and y = 2"),
])
def test_the_answer_of_data_is_taken_whole_unless_it_is_marked_or_a_sentence(text, found):
    assert gold_answer(text) == found
