"""litellm: a loop over `completion` with one tool."""

import json
import os

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it looks for the newest list of prices at its start

import litellm

TOOLS = [{"type": "function", "function": {"name": "add", "description": "Add two numbers.", "parameters": {
    "type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]}}}]


def add(a: int, b: int) -> int:
    return a + b


row = json.loads(os.environ["OFFBEAT_ROW"])
messages = [{"role": "system", "content": "Use the tool, then answer."}, {"role": "user", "content": row["prompt"]}]
for _ in range(4):
    message = litellm.completion("openai/policy", messages=messages, tools=TOOLS, max_tokens=64).choices[0].message
    messages.append(message)
    if not message.tool_calls:
        break
    for call in message.tool_calls:
        try:
            result = str(add(**json.loads(call.function.arguments)))
        except (TypeError, ValueError) as error:
            result = f"error: {error}"
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
print(float(row["answer"] in (getattr(messages[-1], "content", "") or "")))
