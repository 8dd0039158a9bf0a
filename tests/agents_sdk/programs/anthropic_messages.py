"""The anthropic package: a loop over messages with one tool. `--stream` reads the answers as streams."""

import json
import os
import sys

from anthropic import Anthropic

TOOLS = [{"name": "add", "description": "Add two numbers.", "input_schema": {
    "type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]}}]


def add(a: int, b: int) -> int:
    return a + b


def ask(client: Anthropic, messages: list):
    """The assistant's next message."""
    request = {"model": "policy", "max_tokens": 64, "system": "Use the tool, then answer.", "messages": messages, "tools": TOOLS}
    if "--stream" not in sys.argv:
        return client.messages.create(**request)
    with client.messages.stream(**request) as stream:
        for text in stream.text_stream:
            print(text, end="", file=sys.stderr)
        return stream.get_final_message()


row = json.loads(os.environ["OFFBEAT_ROW"])
client = Anthropic()
messages = [{"role": "user", "content": row["prompt"]}]
print(client.messages.count_tokens(model="policy", messages=messages, tools=TOOLS).input_tokens, "tokens", file=sys.stderr)
answer = ""
for _ in range(4):
    message = ask(client, messages)
    messages.append({"role": "assistant", "content": message.content})
    answer = "".join(block.text for block in message.content if block.type == "text")
    results = []
    for block in message.content:
        if block.type == "tool_use":
            try:
                results.append({"type": "tool_result", "tool_use_id": block.id, "content": str(add(**block.input))})
            except TypeError as error:
                results.append({"type": "tool_result", "tool_use_id": block.id, "content": str(error), "is_error": True})
    if not results:
        break
    messages.append({"role": "user", "content": results})
print(float(row["answer"] in answer))
