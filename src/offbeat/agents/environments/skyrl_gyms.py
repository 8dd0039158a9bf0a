"""Environments of skyrl-gym, such as gsm8k_multi_turn: they judge answers to the row's prompt, and may ask for another."""

from typing import Any

import skyrl_gym  # pyright: ignore[reportMissingImports]

from offbeat.data.row import Row, chat_of


class SkyRLGym:
    """One environment; the row's `answer` is the ground truth, and its other fields are passed on."""

    def __init__(self, name: str, *, max_turns: int = 5, **config: Any) -> None:
        self._name = name
        self._max_turns = max_turns
        self._config = config
        self._env: Any = None

    def reset(self, row: Row, seed: int) -> list[dict[str, str]]:  # noqa: ARG002 - nothing is drawn
        extras = {**row.extra, "reward_spec": {"ground_truth": row.answer}, "max_turns": self._max_turns}
        self._env = skyrl_gym.make(self._name, env_config=self._config, extras=extras)
        messages, _ = self._env.init(list(chat_of(row.prompt)))
        return messages

    def step(self, text: str) -> tuple[list[dict[str, str]], float, bool]:
        result = self._env.step(text)
        return result["observations"], result["reward"], result["done"]

    def close(self) -> None:
        if self._env is not None:
            self._env.close()
