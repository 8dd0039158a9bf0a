"""Names shared by all layers.

Shape letters, used in names and docstrings everywhere: P prompts, G samples per prompt, N sequences, T packed tokens, V vocabulary,
R ranks, A adapters. A *version* counts optimizer steps published; version 0 is the initial model. `rewards_PG`, say, is a [P, G] array.
"""

from collections.abc import Callable
from typing import Final, Protocol

Version = int

Clock = Callable[[], float]
"""Returns seconds, such as `time.monotonic`; a test gives one of its own."""

Tell = Callable[[str], None]
"""Shows a sentence to the user."""

Hook = Callable[[], object]
"""Called at one moment, such as when a server is ready."""


class Notes(Protocol):
    """Takes notes about the processes and files of a run: `RunRecord` shows them to the user, and records them as events."""

    def note(self, kind: str, text: str) -> None:
        """Take a sentence of a kind, such as "user_code"."""
        ...


class NoNotes:
    """Drops them, where there is no run."""

    def note(self, kind: str, text: str) -> None:
        """See `Notes.note`."""


PROMPT_VERSION: Final = -1
"""Version recorded for prompt tokens, which no policy sampled."""
