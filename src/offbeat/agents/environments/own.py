"""A class with `reset` and `step` as an environment. Users' classes and the adapters of this folder have this form:

    class MyEnv:
        def reset(self, row, seed): return "Guess a number."                       # or a list of messages
        def step(self, text): return "Too low.", reward_of_the_turn, done

Both may be coroutines. One instance plays one episode. With an attribute `tools`, typed functions or `Tool`s, models are told of these, and
`step` is given the whole `Message` with its calls. `close`, if there is one, ends the episode; `end` may return the reward of an episode
that has to stop before it is over, which is 0 otherwise. An environment with several players returns `View`s.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from offbeat.agents.environment import Environment, View
from offbeat.agents.environments.schema import tool_of
from offbeat.chat.messages import Message, Tool
from offbeat.data.reward import FailedReward, NamedReward, check_reward
from offbeat.data.row import Row
from offbeat.errors import CodeError, shorten
from offbeat.user_code.calling import call


class OwnStage:
    """Plays instances of one class."""

    def __init__(self, make: Callable[..., Any], *, name: str, options: Mapping[str, Any] | None = None) -> None:
        """`make(**options)` constructs an instance for one episode; `name` is what messages call the class."""
        self.make = partial(make, **options) if options else make
        self.name = name
        self.tools: tuple[Tool, ...] = tuple(
            tool if isinstance(tool, Tool) else tool_of(tool) for tool in getattr(make, "tools", None) or ())

    async def open(self) -> None:
        """Share nothing."""

    async def close(self) -> None:
        """Share nothing."""

    def environment(self) -> Environment:
        return _Own(self)


class _Own:
    """An instance of a user's class, whose return values are checked."""

    def __init__(self, stage: OwnStage) -> None:
        self._stage = stage
        self._name = stage.name
        self._instance: Any = None
        self._nothing: dict[str, float] = {}

    async def reset(self, row: Row, seed: int) -> View:
        self._instance = await call(self._stage.make)
        shown = await call(self._instance.reset, row, seed)
        view = shown if isinstance(shown, View) else View(self._messages(shown, "reset"))
        self._nothing[view.player] = 0.0
        return view

    async def step(self, answer: Message) -> View:
        returned = await call(self._instance.step, answer if self._stage.tools else answer.content)
        if isinstance(returned, View):
            self._nothing[returned.player] = 0.0
            return returned
        if not isinstance(returned, tuple) or len(returned) != 3:
            raise CodeError(
                f"step of {self._name} must return what the model sees next, a reward and whether it is over, got {shorten(returned)}")
        shown, reward, done = returned
        given = check_reward(reward)
        if isinstance(given, FailedReward):
            raise CodeError(f"step of {self._name} returned something that is not a reward: {given.reason}")
        named = given.parts if isinstance(given, NamedReward) else {}
        if not done:
            return View(self._messages(shown, "step"), reward=float(given))
        return View(self._messages(shown, "step"), done=True, outcome={"": float(given)}, named=named)

    async def end(self) -> View:
        if hasattr(self._instance, "end"):
            return View(done=True, outcome={"": float(check_reward(await call(self._instance.end)))})
        return View(done=True, outcome=self._nothing)

    async def close(self) -> None:
        if hasattr(self._instance, "close"):
            await call(self._instance.close)

    def _messages(self, shown: Any, method: str) -> tuple[Message, ...]:
        if shown is None or shown == "":
            return ()
        if isinstance(shown, str):
            return (Message("user", shown),)
        if isinstance(shown, Iterable) and not isinstance(shown, Mapping):
            messages = [_message(each) for each in shown]
            if None not in messages:
                return tuple(message for message in messages if message is not None)
        raise CodeError(f"{method} of {self._name} must return text, or messages with role and content, got {shorten(shown)}")


def _message(value: Any) -> Message | None:
    if isinstance(value, Message):
        return value
    if not isinstance(value, Mapping) or value.get("role") not in ("system", "user", "tool") or not isinstance(value.get("content"), str):
        return None
    return Message(value["role"], value["content"], call_id=str(value.get("tool_call_id", "")), name=str(value.get("name", "")))
