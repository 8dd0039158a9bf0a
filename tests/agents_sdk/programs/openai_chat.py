"""The openai package: a loop over chat completions with one tool. `--stream` reads the answers as streams."""

import json
import os
import sys

from openai import OpenAI

TOOLS = [{"type": "function", "function": {"name": "add", "description": "Add two numbers.", "parameters": {
    "type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]}}}]


def add(a: int, b: int) -> int:
    return a + b


def ask(client: OpenAI, messages: list) -> dict:
    """The assistant's next message."""
    if "--stream" not in sys.argv:
        answer = client.chat.completions.create(model="policy", messages=messages, tools=TOOLS, max_tokens=64)
        return answer.choices[0].message.model_dump(exclude_none=True)
    with client.chat.completions.stream(model="policy", messages=messages, tools=TOOLS, max_tokens=64) as stream:
        for event in stream:
            if event.type == "content.delta":
                print(event.delta, end="", file=sys.stderr)
        return stream.get_final_completion().choices[0].message.model_dump(exclude_none=True)


row = json.loads(os.environ["OFFBEAT_ROW"])
client = OpenAI()
messages = [{"role": "system", "content": "Use the tool, then answer."}, {"role": "user", "content": row["prompt"]}]
for _ in range(4):
    message = ask(client, messages)
    messages.append(message)
    if not message.get("tool_calls"):
        break
    for call in message["tool_calls"]:
        try:
            result = str(add(**json.loads(call["function"]["arguments"])))
        except (TypeError, ValueError) as error:
            result = f"error: {error}"
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
print(float(row["answer"] in (messages[-1].get("content") or "")))
