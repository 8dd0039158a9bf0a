"""Ask every endpoint through the SDKs of OpenAI and Anthropic with strict validation of answers; prints the names of those that passed."""

import sys

from anthropic import Anthropic
from openai import OpenAI

url, messages = sys.argv[1], [{"role": "user", "content": "3?"}]
openai = OpenAI(base_url=f"{url}/v1", api_key="none", _strict_response_validation=True, max_retries=0)
anthropic = Anthropic(base_url=url, api_key="none", _strict_response_validation=True, max_retries=0)
chat, name = openai.chat.completions, openai.models.list().data[0].id
tool = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {}}, "strict": False}
asked = {
    "model": lambda: openai.models.retrieve(name),
    "chat": lambda: chat.create(model=name, messages=messages, max_tokens=4, logprobs=True, top_logprobs=2),
    "chat streamed": lambda: list(chat.create(model=name, messages=messages, max_tokens=4, stream=True, logprobs=True)),
    "completion": lambda: openai.completions.create(model=name, prompt="3?", max_tokens=4, logprobs=2, n=None, stream=None, echo=None),
    "responses": lambda: openai.responses.create(model=name, input="3?", tools=[tool]),
    "responses streamed": lambda: list(openai.responses.create(model=name, input="3?", stream=True)),
    "messages": lambda: anthropic.messages.create(model=name, messages=messages, max_tokens=9),
    "messages streamed": lambda: list(anthropic.messages.create(model=name, messages=messages, max_tokens=9, stream=True)),
    "count": lambda: anthropic.messages.count_tokens(model=name, messages=messages),
    "anthropic's models": lambda: anthropic.models.list().data[0],
}
for what, ask in asked.items():
    ask()
    print(what)
