"""Environments for tests that import Offbeat, or fail."""

from offbeat.agents.environment import View
from offbeat.chat.messages import Message


class Fragile:
    """Breaks at one word."""

    def reset(self, row, seed):
        return str(row.prompt)

    def step(self, text):
        if text == "boom":
            raise RuntimeError("it broke")
        return "", 1.0, True


class Nim:
    """Whoever takes the last of five pieces wins; moves of one piece."""

    def reset(self, row, seed):
        self._left, self._names = 5, ("first", "second")
        return self._view()

    def step(self, text):
        self._left -= int(text)
        if self._left <= 0:
            return View(done=True, outcome={self._names[0]: 1.0, self._names[1]: -1.0})
        self._names = self._names[::-1]
        return self._view()

    def _view(self):
        return View((Message("user", f"{self._left} are left"),), self._names[0], state=str(self._left))
