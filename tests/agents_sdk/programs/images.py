"""Send pictures through the SDKs of OpenAI and Anthropic, with strict validation; prints the tokens of each prompt, and what is refused.

Usage: images.py URL PICTURE [KEY]
"""

import base64
import sys
from pathlib import Path

from anthropic import Anthropic
from anthropic import APIStatusError as AnthropicStatusError
from openai import APIStatusError, OpenAI

url, picture = sys.argv[1], base64.b64encode(Path(sys.argv[2]).read_bytes()).decode()
key = sys.argv[3] if len(sys.argv) > 3 else "none"
openai = OpenAI(base_url=f"{url}/v1", api_key=key, _strict_response_validation=True, max_retries=0)
anthropic = Anthropic(base_url=url, api_key=key, _strict_response_validation=True, max_retries=0)
uri, text = f"data:image/png;base64,{picture}", "how many?"


def chat(address: str) -> int:
    parts = [{"type": "image_url", "image_url": {"url": address, "detail": "auto"}}, {"type": "text", "text": text}]
    return openai.chat.completions.create(
        model="policy", max_tokens=2, messages=[{"role": "user", "content": parts}]).usage.prompt_tokens


def respond(address: str) -> int:
    parts = [{"type": "input_image", "image_url": address, "detail": "auto"}, {"type": "input_text", "text": text}]
    return openai.responses.create(model="policy", max_output_tokens=2, input=[{"role": "user", "content": parts}]).usage.input_tokens


def message(data: str) -> int:
    block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}
    content = [block, {"type": "text", "text": text}]
    usage = anthropic.messages.create(model="policy", max_tokens=2, messages=[{"role": "user", "content": content}]).usage
    counted = anthropic.messages.count_tokens(model="policy", messages=[{"role": "user", "content": content}])
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)
    return counted.input_tokens


print(chat(uri), respond(uri), message(picture))
bad = base64.b64encode(b"no picture").decode()
for ask, wrong in ((chat, f"data:image/png;base64,{bad}"), (respond, "https://example.org/a.png"), (message, bad)):
    try:
        ask(wrong)
    except (APIStatusError, AnthropicStatusError) as exc:
        print(exc.body["error"]["message"] if "error" in exc.body else exc.body["message"])
