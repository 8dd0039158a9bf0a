"""pydantic-ai: an agent with one tool. The first argument is its name of the model, such as `openai:policy` or `anthropic:policy`."""

import json
import os
import sys

from pydantic_ai import Agent, UnexpectedModelBehavior, UsageLimitExceeded, UsageLimits

agent = Agent(sys.argv[1], instructions="Use the tool, then answer.")


@agent.tool_plain
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


row = json.loads(os.environ["OFFBEAT_ROW"])
try:
    answer = agent.run_sync(row["prompt"], usage_limits=UsageLimits(request_limit=4)).output
except (UnexpectedModelBehavior, UsageLimitExceeded):
    answer = ""
print(float(row["answer"] in answer))
