"""Tools of MCP servers, where the package is installed."""

import asyncio
import importlib.util
import os
import signal
import sys
from pathlib import Path

import psutil
import pytest

from offbeat.agents.environments.find import find_stage
from offbeat.agents.environments.mcp import McpServer
from offbeat.chat.messages import Message, ToolCall
from offbeat.data.row import Row
from offbeat.errors import CodeError, MissingExtraError

SERVER = """
import os
from mcp.server.mcpserver import MCPServer

server = MCPServer("numbers")

@server.tool()
def double(number: int) -> int:
    "Double a number."
    if number == 13:
        raise ValueError("not this one")
    return 2 * number

@server.tool()
def where() -> str:
    return str(os.getpid())

server.run()
"""


def test_without_the_package_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(MissingExtraError, match=r"tools of the MCP server 'python x.py' need the package mcp .*run pip install 'mcp>=2'"):
        asyncio.run(McpServer(["python", "x.py"]).open())


@pytest.mark.skipif(importlib.util.find_spec("mcp") is None, reason="mcp is not installed")
def test_a_server_is_started_once_answers_all_episodes_and_is_started_again_when_it_dies(tmp_path: Path) -> None:
    (tmp_path / "server.py").write_text(SERVER)

    async def main() -> None:
        stage = find_stage([f"mcp:{sys.executable} {tmp_path}/server.py"], [], step_timeout_s=30, tools=True)
        await stage.open()
        try:
            assert [tool.name for tool in stage.tools] == ["double", "where"] and stage.tools[0].description == "Double a number."
            first, second = stage.environment(), stage.environment()
            for environment in (first, second):
                await environment.reset(Row("go", ""), 0)

            async def call(environment, name: str, arguments: str) -> str:
                view = await environment.step(Message("assistant", calls=(ToolCall("c", name, arguments),)))
                return view.messages[0].content

            assert await call(first, "double", '{"number": 21}') == "42"
            assert (await call(first, "double", '{"number": 13}')).startswith("Error: ")
            pid = await call(first, "where", "{}")
            assert pid == await call(second, "where", "{}")
            os.kill(int(pid), signal.SIGKILL)
            with pytest.raises(CodeError, match="was lost in a call of double"):
                await call(first, "double", '{"number": 1}')
            assert await call(second, "double", '{"number": 4}') == "8"
            again = await call(second, "where", "{}")
        finally:
            await stage.close()
        assert pid != again and not psutil.pid_exists(int(again))

    asyncio.run(main())
