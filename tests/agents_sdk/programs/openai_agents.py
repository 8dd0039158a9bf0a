"""openai-agents: an agent with one tool. The first argument is the API, `responses` or `chat_completions`."""

import json
import os
import sys

from agents import Agent, MaxTurnsExceeded, ModelBehaviorError, Runner, function_tool, set_default_openai_api, set_tracing_disabled


@function_tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


set_default_openai_api(sys.argv[1])
set_tracing_disabled(True)
row = json.loads(os.environ["OFFBEAT_ROW"])
agent = Agent(name="adder", instructions="Use the tool, then answer.", model="policy", tools=[add])
try:
    answer = str(Runner.run_sync(agent, row["prompt"], max_turns=4).final_output)
except (MaxTurnsExceeded, ModelBehaviorError):
    answer = ""
print(float(row["answer"] in answer))
