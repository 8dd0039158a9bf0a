"""Games of textarena. Several players are all played by the policy, each with a conversation and a role of its own."""

from typing import Any

import textarena  # pyright: ignore[reportMissingImports]

from offbeat.agents.environment import View
from offbeat.chat.messages import Message
from offbeat.data.row import Row


class TextArena:
    """One game, such as TicTacToe-v0.

    Roles are "player 0" and so on. A player's outcome is textarena's reward: in most games 1 for winning, -1 for losing, 0 for a draw.
    """

    def __init__(self, name: str, *, num_players: int = 0) -> None:
        """`num_players` is 0 for the game's smallest number."""
        self._env: Any = textarena.make(name if name.endswith("-raw") else f"{name}-raw")
        self._num_players = num_players

    def reset(self, row: Row, seed: int) -> View:  # noqa: ARG002 - a game is chosen by its name
        # Variants name their numbers of players differently, so each number is tried.
        for count in [self._num_players] if self._num_players else range(1, 16):
            try:
                self._env.reset(num_players=count, seed=seed)
            except (AssertionError, ValueError):
                if count in (self._num_players, 15):
                    raise
                continue
            self._num_players = count
            break
        return self._view()

    def step(self, text: str) -> View:
        done, _ = self._env.step(text)
        if not done:
            return self._view()
        rewards, _ = self._env.close()
        return View(done=True, outcome={self._role(player): float(reward) for player, reward in (rewards or {}).items()})

    def _view(self) -> View:
        player, seen = self._env.get_observation()
        shown = "\n".join(str(message).strip() for sender, message, *_ in seen if sender != player) or "It is your turn."
        return View((Message("user", shown),), self._role(player), state=f"{player} {self._env.state.game_state}")

    def _role(self, player: int) -> str:
        return "" if self._num_players == 1 else f"player {player}"
