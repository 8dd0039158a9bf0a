"""Environments of gem, such as game:GuessTheNumber-v0-easy."""

from typing import Any

import gem  # pyright: ignore[reportMissingImports]

from offbeat.data.row import Row


class Gem:
    """One environment. The prompt ends with gem's own suffix."""

    def __init__(self, name: str, **options: Any) -> None:
        self._env: Any = gem.make(name, **options)

    def reset(self, row: Row, seed: int) -> str:  # noqa: ARG002 - a game is chosen by its name
        seen, info = self._env.reset(seed=seed)
        return _shown(seen, info)

    def step(self, text: str) -> tuple[str, float, bool]:
        seen, reward, terminated, truncated, info = self._env.step(text)
        return _shown(seen, info), float(reward), bool(terminated or truncated)


def _shown(seen: Any, info: dict[str, Any]) -> str:
    return "\n".join(filter(None, [str(seen), str(info.get("suffix") or "")]))
