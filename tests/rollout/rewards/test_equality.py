"""What counts as the same answer."""

import signal

import pytest

from offbeat.rollout.rewards import equality
from offbeat.rollout.rewards.equality import equal


@pytest.mark.parametrize(("gold", "answer", "same"), [
    ("0.333333", "1/3", True),
    ("0.0000001", "0", False),  # equal to six decimals, which is all that math-verify looks at
    (r"1.2 \times 10^{-8}", r"1.3 \times 10^{-8}", False),
    ("2516_8", "2516", True),
    ("Monday", "dayMon", False),  # a product of letters to math-verify
    ("(3,5)", "(3,5", False),
    ("12:30 PM", "0:30 pm", False),
])
def test_answers_are_equal_as_numbers_as_texts_or_as_mathematics(gold, answer, same):
    assert equal(gold, answer) is same


def test_the_clock_of_a_computation_leaves_no_timer_and_no_handler_behind(monkeypatch):
    before = signal.getsignal(signal.SIGVTALRM)
    monkeypatch.setattr(equality, "_LIMIT_S", 0.01)

    def without_end():
        while True:
            pass

    assert equality._bounded(without_end) is None
    assert equality._bounded(lambda: 1 / 0) is None
    assert (signal.getitimer(signal.ITIMER_VIRTUAL), signal.getsignal(signal.SIGVTALRM)) == ((0.0, 0.0), before)
