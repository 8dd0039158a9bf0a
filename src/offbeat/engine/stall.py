"""Tells whether an engine's step hangs. Asked by `GET /health`, and so by all probes of the engine.

A step on an overloaded machine may take minutes, but it computes whenever it can; a step that hangs in a lock, a sleep or a read does
not. So a step may take long while it shows signs of life (`offbeat.pulse`), but not for ever: a step that computes endlessly, or that
waits for a device in a loop, is reported after `COMPUTING_FACTOR` times the patience, such as 5 minutes for a patience of 60 s.
"""

from offbeat.pulse import LOOK_S, Signs

LOOKED_AT_S = 1.0
"""Seconds that a step takes before it is looked at; most take milliseconds."""

COMPUTING_FACTOR = 5
"""Longest time of a step that computes, as a multiple of the patience."""

_LOOKS = 4
"""Least number of looks without a sign of life, because the clock goes on while the whole process is stopped."""


class StepWatch:
    """Judges steps by looks at them, at most one look for each probe. Pure."""

    def __init__(self, patience_s: float) -> None:
        """`patience_s` is the longest time that a step may compute nothing."""
        self._patience_s = patience_s
        self._step = -1
        self._before = Signs(0, 0.0)
        self._looked_s = 0.0
        self._still_s = 0.0

    def look(self, step: int, step_s: float, signs: Signs, *, now_s: float) -> str:
        """Record a look at a step, and return the step's fault as a sentence; empty if there is none.

        Args:
            step_s: seconds that it has taken so far.
            signs: signs of life of the engine's thread and of its libraries' threads.
            now_s: time of the look, by any clock.
        """
        seconds = now_s - self._looked_s
        if step != self._step:
            self._step, self._before, self._looked_s, self._still_s = step, signs, now_s, 0.0
        elif seconds >= LOOK_S:
            still = not signs.since(self._before, seconds)
            self._before, self._looked_s = signs, now_s
            self._still_s = self._still_s + min(seconds, self._patience_s / _LOOKS) if still else 0.0
        if self._still_s >= self._patience_s:
            return self._told(step_s, f"and has computed nothing for {self._still_s:.0f} s of it")
        if step_s >= COMPUTING_FACTOR * self._patience_s:
            return self._told(step_s, "although it computes")
        return ""

    def _told(self, step_s: float, how: str) -> str:
        return (
            f"the engine is slow or hung: it has been in one step for {step_s:.0f} s, {how}; if the machine is that slow, raise"
            f" inference.stall_timeout_s, or --stall-timeout-s of offbeat engine, above {self._patience_s:g}")
