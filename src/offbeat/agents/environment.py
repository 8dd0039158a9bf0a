"""What an environment is: somebody who speaks first, answers what the model said, and says what that was worth.

Tools, classes with tools, games and the environments of other libraries are all played as one of these, in processes of their own, by the
one loop in `played`. An environment of a user is a class with `reset` and `step`; see `environments.own`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from offbeat.chat.messages import Message, Tool
from offbeat.data.row import Row


@dataclass(frozen=True)
class View:
    """What an environment shows to whoever plays next.

    Attributes:
        messages: what has been said to that player since the player's last answer.
        player: role of that player; "" where there is only one. Each has a conversation of its own.
        reward: what the answer before earned, as a reward of its turn.
        done: whether the episode is over; nobody plays any more.
        outcome: once done, the outcome of the episode for each player; a player who is missing gets `rollout.reward` of the last answer.
        named: once done, the outcome of the only player as several rewards by name.
        state: what the environment's state is called, where equal states can be recognised.
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
        """Take what the model said."""
        ...

    async def end(self) -> View:
        """Say what an episode was worth that goes no further, because the model may say no more."""
        ...

    async def close(self) -> None:
        """Give back what the episode holds; may come at any time after `reset`."""
        ...


class Stage(Protocol):
    """What one process can play; made once, when the process starts.

    Attributes:
        tools: what models are told that they may call.
    """

    tools: tuple[Tool, ...]

    def environment(self) -> Environment:
        """Return an environment for one more episode."""
        ...

    async def open(self) -> None:
        """Start what all episodes share, such as servers."""
        ...

    async def close(self) -> None:
        """End it."""
        ...
