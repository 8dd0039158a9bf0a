"""Names shared by all layers.

Shape letters, used in names and docstrings everywhere: P prompts, G samples per prompt, N sequences, T packed tokens, V vocabulary,
R ranks, A adapters. A *version* counts optimizer steps published; version 0 is the initial model. For example, `rewards_PG` is a [P, G]
array.
"""

from collections.abc import Callable
from typing import Final

Version = int

Clock = Callable[[], float]
"""Returns seconds, such as `time.monotonic`; a test gives one of its own."""

Tell = Callable[[str], None]
"""Shows a sentence to the user."""

Hook = Callable[[], object]
"""Called at one moment, such as when a server is ready."""

PROMPT_VERSION: Final = -1
"""Version recorded for prompt tokens, which no policy sampled."""
