"""Stream a chat with a call through the SDKs of OpenAI and Anthropic, with strict validation; prints what each has put together."""

import sys

from anthropic import Anthropic
from openai import OpenAI

url, messages = sys.argv[1], [{"role": "user", "content": "3?"}]
openai = OpenAI(base_url=f"{url}/v1", api_key="none", _strict_response_validation=True, max_retries=0)
anthropic = Anthropic(base_url=url, api_key="none", _strict_response_validation=True, max_retries=0)
name = openai.models.list().data[0].id
parameters = {"type": "object", "properties": {"a": {"type": "integer"}}}
chat = {"model": name, "messages": messages, "max_tokens": 16, "temperature": 0, "logprobs": True, "tools": [
    {"type": "function", "function": {"name": "add", "parameters": parameters}}]}
flat = {"model": name, "input": "3?", "temperature": 0, "include": ["message.output_text.logprobs"], "tools": [
    {"type": "function", "name": "add", "parameters": parameters, "strict": False}]}
blocks = {"model": name, "messages": messages, "max_tokens": 16, "extra_body": {"temperature": 0}, "tools": [
    {"name": "add", "input_schema": parameters}]}

openai.chat.completions.create(**chat)  # the engine keeps the prompt from here on, so both answers below tell the same cached tokens
with openai.chat.completions.stream(**chat, stream_options={"include_usage": True}) as stream:
    kinds = [event.type for event in stream]
    done = stream.get_final_completion()
whole = openai.chat.completions.create(**chat)
(choice,), (other,) = done.choices, whole.choices
(call,), (expected,) = choice.message.tool_calls, other.message.tool_calls
assert (choice.message.content, choice.finish_reason, done.usage) == (other.message.content, other.finish_reason, whole.usage)
assert (call.function.name, call.function.arguments) == (expected.function.name, expected.function.arguments)
assert [entry.token for entry in choice.logprobs.content] == [entry.token for entry in other.logprobs.content]
print("chat completions", choice.message.content, call.function.arguments, kinds.count("content.delta"))

openai.responses.create(**flat)
with openai.responses.stream(**flat) as stream:
    kinds = [event.type for event in stream]
    done = stream.get_final_response()
whole = openai.responses.create(**flat)
assert done.output_text == whole.output_text and done.usage == whole.usage and done.status == whole.status == "completed"
(call,), (expected,) = ([item for item in response.output if item.type == "function_call"] for response in (done, whole))
assert (call.name, call.arguments) == (expected.name, expected.arguments)
assert kinds[:2] == ["response.created", "response.in_progress"] and kinds[-1] == "response.completed"
print("Responses", done.output_text, call.arguments, kinds.count("response.output_text.delta"))

anthropic.messages.create(**blocks)
with anthropic.messages.stream(**blocks) as stream:
    kinds = [event.type for event in stream]
    done = stream.get_final_message()
whole = anthropic.messages.create(**blocks)
texts = ["".join(block.text for block in message.content if block.type == "text") for message in (done, whole)]
(call,), (expected,) = ([block for block in message.content if block.type == "tool_use"] for message in (done, whole))
assert texts[0] == texts[1] and (call.name, call.input) == (expected.name, expected.input) and done.stop_reason == whole.stop_reason
assert (done.usage.input_tokens, done.usage.output_tokens) == (whole.usage.input_tokens, whole.usage.output_tokens)
print("Messages", texts[0], call.input, kinds.count("text"))
