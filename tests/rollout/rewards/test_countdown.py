"""Countdown: each number at most once, exact arithmetic, and nothing evaluated."""

import pytest

from offbeat.data.row import Row
from offbeat.errors import DataError
from offbeat.rollout.rewards.countdown import countdown

ROW = Row("3 7 25 7 -> 46?", "25+7*3", {"numbers": "3 7 25 7", "target": "46"})


@pytest.mark.parametrize("completion", ["25+7*3", " 7 * 3 + 25\n", "(25 + (7*3))", "25+3*7"])
def test_an_expression_that_makes_the_target_earns_the_reward(completion):
    assert countdown(completion, ROW) == 1.0


def test_division_is_exact():
    row = Row("", "", {"numbers": "[1, 3, 3]", "target": "1"})
    assert countdown("1/3*3", row) == 1.0


@pytest.mark.parametrize("completion", [
    "25+7*2",               # a number that was not given
    "46",                   # likewise
    "25+7+7+7",             # one used too often
    "25+7",                 # another value
    "25+7*3=46",            # no expression
    "", "()", "25+", "(25+7*3", "25 7",
    "25+7*3+7/(3-3)",       # division by zero
    "-7+3", "7**3", "25//3", "0x19+21", "2_5+21",
    "__import__('os').getpid()",
    "(" * 250 + "7" + ")" * 250,
    "7" * 400,
    "1+" * 255 + "1",
])
def test_anything_else_earns_nothing(completion):
    assert countdown(completion, ROW) == 0.0


def test_a_row_of_another_task_is_refused():
    with pytest.raises(DataError, match="this one has no 'target'"):
        countdown("1", Row("", "", {"numbers": "1"}))
