"""Reports the phases of the server's start, which takes minutes with a large model. Called by `serve`."""

import asyncio
from collections.abc import Callable

from offbeat.telemetry.console import doing_since
from offbeat.telemetry.pace import duration

IsReady = Callable[[], bool]
"""Whether the server is ready."""

Say = Callable[[str], object]
"""Shows a sentence."""

_LOOK_S = 0.5
_LONG_S = 2.0
_AGAIN_S = 30.0


class Told:
    """Decides the lines to say: one for a phase that takes a moment, and again while it takes long."""

    def __init__(self) -> None:
        self._text = ""
        self._next_s = 0.0

    def line(self, text: str, seconds: float) -> str:
        """Return a line on a phase, such as "engines load the model", that has lasted `seconds`, or "" where it would say nothing new."""
        if not text or seconds < _LONG_S or (text == self._text and seconds < self._next_s):
            return ""
        self._text, self._next_s = text, seconds + _AGAIN_S
        return f"  {text} ({duration(seconds)})"


async def tell_while_starting(say: Say, *, is_ready: IsReady) -> None:
    """Say the current phases until the server is ready. Waits between looks; woken by the clock alone."""
    told = Told()
    while not is_ready():
        if line := told.line(*doing_since()):
            say(line)
        await asyncio.sleep(_LOOK_S)
