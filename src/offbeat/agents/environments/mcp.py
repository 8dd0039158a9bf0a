"""The tools of an MCP server, which is started, or connected to, once for all episodes of a process. Needs the package mcp, 2.0 or later.

    McpServer._hold   consumes nothing; produces a connection; waits for `close`, or for the connection to break
"""

import asyncio
import json
import os
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from offbeat.agents.environments.tool_results import image_of_mcp
from offbeat.chat.messages import Tool
from offbeat.data.image_sources import ImageSource
from offbeat.errors import CodeError, MissingExtraError, describe
from offbeat.user_code.boundary import Caught, told_as

_START_TIMEOUT_S = 60.0


class McpServer:
    """One server. When it is lost, the episodes that call it fail, and it is started again for the next one."""

    def __init__(self, words: Sequence[str]) -> None:
        """`words` are a command with its arguments, or a URL alone."""
        self.tools: tuple[Tool, ...] = ()
        self._words = words
        self._name = f"the MCP server {' '.join(words)!r}"
        self._client: Any = None
        self._ended = asyncio.Event()
        self._holding: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()

    async def open(self) -> None:
        """Connect and ask for the tools; the tools of a server that is started again stay as they were.

        Raises:
            MissingExtraError: the package is missing.
            CodeError: it does not start or answer.
        """
        async with self._starting:
            if self._client is not None:
                return
            ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            self._holding = asyncio.create_task(self._hold(ready), name=self._name)
            with told_as(f"{self._name} does not start or answer: ", passes=(MissingExtraError,)):
                async with asyncio.timeout(_START_TIMEOUT_S):
                    self._client = await ready
                    if not self.tools:
                        self.tools = tuple(
                            Tool(tool.name, tool.description or "", tool.input_schema) for tool in (await self._client.list_tools()).tools)

    async def close(self) -> None:
        """Disconnect, which ends a server that was started here."""
        self._ended.set()
        if self._holding is not None:
            await asyncio.gather(self._holding, return_exceptions=True)
        self._client = None
        self._ended.clear()

    async def call(self, name: str, arguments: str) -> str | list[str | ImageSource]:
        """Call a tool for its text, or texts and images; raises ValueError if arguments are no object, CodeError if the server is lost."""
        given = json.loads(arguments or "{}")
        if not isinstance(given, dict):
            raise ValueError("the arguments must be a JSON object")
        await self.open()
        client = self._client
        with Caught() as caught:
            result = await client.call_tool(name, given)
        if (exc := caught.error) is not None:
            if type(exc).__name__ == "MCPError" and "closed" not in str(exc).lower():  # the server's answer, which is for the model
                return f"Error: {describe(exc)}"
            if self._client is client:
                await self.close()
            raise CodeError(f"{self._name} was lost in a call of {name}: {describe(exc)}") from exc
        parts = [image_of_mcp(part) or getattr(part, "text", None) or f"[{part.type}]" for part in result.content]
        texts = [part for part in parts if isinstance(part, str)]
        if len(texts) < len(parts):
            return ["Error:", *parts] if result.is_error else parts
        text = "\n".join(texts) if texts else json.dumps(result.structured_content)
        return f"Error: {text}" if result.is_error else text

    async def _hold(self, ready: asyncio.Future[Any]) -> None:
        # A connection has to be left by the task that entered it.
        try:
            mcp = import_module("mcp")
            if not hasattr(mcp, "Client"):
                raise ImportError("it is older than 2.0")
        except ImportError as exc:
            ready.set_exception(MissingExtraError(f"tools of {self._name} need the package mcp ({exc}); run pip install 'mcp>=2'"))
            return
        where = self._words[0] if self._words[0].startswith(("http://", "https://")) else mcp.StdioServerParameters(
            command=self._words[0], args=list(self._words[1:]), env=dict(os.environ))
        with Caught() as caught:
            async with mcp.Client(where) as client:
                ready.set_result(client)
                await self._ended.wait()
        if caught.error is not None and not ready.done():
            ready.set_exception(caught.error)
