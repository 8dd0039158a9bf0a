"""The interface of environments: one speaks first, answers each message of the model, and rewards it.

Tools, classes with tools, games and the environments of other libraries all implement it. They run in processes of their own, played by
the loop in `played`. An environment of a user is a class with `reset` and `step`; see `environments.own`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from offbeat.chat.messages import Message, Tool
from offbeat.data.row import Row


@dataclass(frozen=True)
class View:
    """An environment's reply: messages for the player who is next, and the reward of the answer before.

    Attributes:
        messages: new messages for that player since the player's last answer.
        player: role of that player, such as "player 0"; "" where there is only one. Each has a conversation of its own.
        reward: reward of the answer that was just taken, for its turn.
        done: whether the episode is over; nobody plays any more.
        outcome: once done, the outcome of the episode for each player; a player who is missing gets `rollout.reward` of the last answer.
        named: once done, the outcome of the only player as several rewards by name.
        state: text that equal states of the environment have in common; empty where states cannot be recognised.
    """

    messages: tuple[Message, ...] = ()
    player: str = ""
    reward: float = 0.0
    done: bool = False
    outcome: Mapping[str, float] = field(default_factory=dict)
    named: Mapping[str, float] = field(default_factory=dict)
    state: str = ""


class Environment(Protocol):
    """One episode in play."""

    async def reset(self, row: Row, seed: int) -> View:
        """Begin the episode. Episodes of one group get equal rows and equal seeds."""
        ...

    async def step(self, answer: Message) -> View:
        """Take the model's answer."""
        ...

    async def end(self) -> View:
        """End an episode in which the model has no turns or tokens left, and return its outcome."""
        ...

    async def close(self) -> None:
        """Release the episode's resources; may come at any time after `reset`."""
        ...


class Stage(Protocol):
    """The source of a process's environments, made once, when the process starts; its `tools` are described to the model."""

    tools: tuple[Tool, ...]

    def environment(self) -> Environment:
        """Return an environment for one more episode."""
        ...

    async def open(self) -> None:
        """Start resources that all episodes share, such as servers."""
        ...

    async def close(self) -> None:
        """End it."""
        ...
