"""smolagents: an agent with one tool. The first argument is its kind, `tools` (it calls tools) or `code` (it writes Python)."""

import json
import os
import sys

from smolagents import CodeAgent, LogLevel, OpenAIModel, ToolCallingAgent, tool


@tool
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b


row = json.loads(os.environ["OFFBEAT_ROW"])
model = OpenAIModel("policy", api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
kind = CodeAgent if sys.argv[1] == "code" else ToolCallingAgent
agent = kind(tools=[add], model=model, max_steps=3, verbosity_level=LogLevel.OFF)
# Its own is three thousand tokens of examples, for models that can read them.
agent.prompt_templates["system_prompt"] = "Use the tool, then answer."
print(float(row["answer"] in str(agent.run(row["prompt"]))))
