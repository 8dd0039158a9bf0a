"""langgraph: its ready agent with one tool, over langchain-openai. The first argument is the API, `responses` or `chat_completions`."""

import json
import os
import sys

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.errors import GraphRecursionError
from langgraph.prebuilt import create_react_agent


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


row = json.loads(os.environ["OFFBEAT_ROW"])
model = ChatOpenAI(model="policy", use_responses_api=sys.argv[1] == "responses")
agent = create_react_agent(model, [add], prompt="Use the tool, then answer.")
try:
    answer = agent.invoke({"messages": [("user", row["prompt"])]}, {"recursion_limit": 9})["messages"][-1].text
except GraphRecursionError:
    answer = ""
print(float(row["answer"] in answer))
