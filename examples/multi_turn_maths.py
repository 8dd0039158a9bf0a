"""Maths with feedback: a wrong answer is told so, and may be given again for half the reward. Played by examples/multi_turn_maths.toml."""


class Feedback:
    """One sum."""

    def __init__(self, tries=2):
        self._tries_left = tries
        self._worth = 1.0

    def reset(self, row, seed):  # noqa: ARG002 - nothing is drawn
        self._answer = row.answer
        return row.prompt

    def step(self, text):
        self._tries_left -= 1
        if text.strip() == self._answer:
            return "", self._worth, True
        self._worth /= 2
        return "wrong, again: ", 0.0, not self._tries_left
