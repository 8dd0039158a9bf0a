"""openai-agents with the tool of an MCP server that it starts."""

import asyncio
import json
import os
import sys
from pathlib import Path

from agents.mcp import MCPServerStdio

from agents import Agent, MaxTurnsExceeded, ModelBehaviorError, Runner, set_default_openai_api, set_tracing_disabled

SERVER = {"command": sys.executable, "args": [str(Path(__file__).with_name("mcp_server.py"))]}


async def answer(question: str) -> str:
    async with MCPServerStdio(SERVER, cache_tools_list=True, client_session_timeout_seconds=60) as server:
        agent = Agent(name="adder", instructions="Use the tool, then answer.", model="policy", mcp_servers=[server])
        try:
            return str((await Runner.run(agent, question, max_turns=4)).final_output)
        except (MaxTurnsExceeded, ModelBehaviorError):
            return ""


set_default_openai_api("chat_completions")
set_tracing_disabled(True)
row = json.loads(os.environ["OFFBEAT_ROW"])
print(float(row["answer"] in asyncio.run(answer(row["prompt"]))))
