"""Tools as an environment: it shows the row's prompt, answers the model's calls, and is over when the model answers without a call.

Tools are typed functions, or the public methods of a class in the manner of TRL's `environment_factory`: one instance for each episode,
`reset(**row)` that may return text to add to the prompt, and an attribute `reward` that is read at the end. A tool may return images, alone
or in a list with texts (`results`). An error in a call is told to the model, which may try again.
"""

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from pydantic import BaseModel

from offbeat.agents.environment import Environment, View
from offbeat.agents.environments.schema import arguments_of, read_arguments, tool_of
from offbeat.agents.environments.tool_results import shown_result
from offbeat.chat.image_parts import Shown, messages_of
from offbeat.chat.messages import Message, Tool, ToolCall
from offbeat.data.messages import with_arguments
from offbeat.data.reward import FailedReward, NamedReward, check_reward
from offbeat.data.row import Row, chat_of
from offbeat.errors import CodeError, describe
from offbeat.user_code.boundary import Caught
from offbeat.user_code.calling import call


class ToolServer(Protocol):
    """Serves tools to all episodes of a process."""

    tools: tuple[Tool, ...]

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    async def call(self, name: str, arguments: str) -> Any:
        """Call a tool with arguments in JSON, such as '{"city": "Rome"}'; returns as functions do. Exceptions are told to the model."""
        ...


class ToolStage:
    """Plays functions, one class, and servers together."""

    def __init__(
        self, functions: Sequence[Callable[..., Any]], factory: type | None, servers: Sequence[ToolServer], *, timeout_s: float,
    ) -> None:
        """`timeout_s` is the limit of one call of a tool."""
        self.functions = functions
        self.factory = factory
        self.servers = servers
        self.timeout_s = timeout_s
        self.methods = [] if factory is None else [
            name for name, _ in inspect.getmembers(factory, inspect.isfunction)
            if not name.startswith("_") and name not in ("reset", "close", "reward")]
        self.tools: tuple[Tool, ...] = ()

    async def open(self) -> None:
        """Start the servers, and describe all tools; raises CodeError if a tool has no schema, or two have one name."""
        await asyncio.gather(*(server.open() for server in self.servers))
        methods = [getattr(self.factory, name).__get__(object()) for name in self.methods]  # as instances have them, without `self`
        own = [tool_of(function) for function in (*self.functions, *methods)]
        self.tools = (*own, *(tool for server in self.servers for tool in server.tools))
        names = [tool.name for tool in self.tools]
        if twice := next((name for name in names if names.count(name) > 1), ""):
            raise CodeError(f"two of agent.tools are named {twice!r}; a model could not tell them apart")

    async def close(self) -> None:
        await asyncio.gather(*(server.close() for server in self.servers))

    def environment(self) -> Environment:
        return _ToolEpisode(self)


class _ToolEpisode:
    def __init__(self, stage: ToolStage) -> None:
        self._stage = stage
        self._functions = {function.__name__: function for function in stage.functions}
        self._instance: Any = None
        self._servers = {tool.name: server for server in stage.servers for tool in server.tools}
        self._schemas: dict[str, type[BaseModel]] = {}
        self._late: list[asyncio.Future[Any]] = []

    async def reset(self, row: Row, seed: int) -> View:  # noqa: ARG002 - tools begin the same
        messages = [
            replace(_message(message), images=shown.images)
            for message, shown in zip(chat_of(row.prompt), messages_of(row), strict=True)]
        if self._stage.factory is not None:
            self._instance = await call(self._stage.factory)
            self._functions |= {name: getattr(self._instance, name) for name in self._stage.methods}
            fields = {**row.extra, "prompt": row.prompt, "answer": row.answer, "solution": row.solution}
            added = await call(self._instance.reset, **fields) if hasattr(self._instance, "reset") else None
            if isinstance(added, str) and added:
                last = messages[-1]
                messages[-1] = Message(last.role, f"{last.content}{added}", images=last.images)
        return View(tuple(messages))

    async def step(self, answer: Message) -> View:
        if answer.calls:
            return View(tuple(await asyncio.gather(*(self._tool_message(each) for each in answer.calls))))
        return await self.end()

    async def end(self) -> View:
        reward = getattr(self._instance, "reward", None)
        if reward is None:
            return View(done=True)
        given = check_reward(await call(reward) if callable(reward) else reward)
        if isinstance(given, FailedReward):
            raise CodeError(f"the attribute reward of {type(self._instance).__name__} is not a reward: {given.reason}")
        return View(done=True, outcome={"": float(given)}, named=given.parts if isinstance(given, NamedReward) else {})

    async def close(self) -> None:
        if self._late:
            await asyncio.wait(self._late)  # a thread may still run, and then never lets its process take another episode
        if hasattr(self._instance, "close"):
            await call(self._instance.close)

    async def _tool_message(self, called: ToolCall) -> Message:
        calling = asyncio.ensure_future(self._call(called))
        shown = Shown()
        try:
            with Caught(passes=(CodeError,)) as caught:  # a lost server is not the model's fault, which reads every other error of a tool
                if not (await asyncio.wait([calling], timeout=self._stage.timeout_s))[0]:
                    self._late.append(calling)
                    calling.cancel()
                    shown = Shown(f"Error: it did not answer within {self._stage.timeout_s:g} s")
                else:
                    shown = shown_result(calling.result())
        except asyncio.CancelledError:
            self._late.append(calling)
            calling.cancel()
            raise
        if (exc := caught.error) is not None:
            shown = Shown(f"Error: {exc if type(exc) is ValueError else describe(exc)}")
        return Message("tool", shown.text, call_id=called.id, name=called.name, images=shown.images)

    async def _call(self, called: ToolCall) -> Any:
        if (server := self._servers.get(called.name)) is not None:
            return await server.call(called.name, called.arguments)
        function = self._functions.get(called.name)
        if function is None:
            raise ValueError(f"there is no tool {called.name!r}; there are {', '.join([*self._functions, *self._servers])}")
        if called.name not in self._schemas:
            self._schemas[called.name] = arguments_of(function)
        return await call(function, **read_arguments(self._schemas[called.name], called.arguments))


def _message(message: Mapping[str, Any]) -> Message:
    """Return a message of a row, with the calls, results and thoughts of its history."""
    calls = []
    for each in message.get("tool_calls", ()):
        made = with_arguments(each, as_text=True)
        function = made.get("function", made)
        calls.append(ToolCall(made.get("id", ""), function["name"], function.get("arguments", "{}")))
    return Message(
        message["role"], message["content"], tuple(calls), message.get("tool_call_id", ""), message.get("name", ""),
        message.get("reasoning_content", ""))
