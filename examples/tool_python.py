"""Sums for `tool_python.toml`, and what a model that has never called a tool imitates first.

    python examples/tool_python.py .models/smollm2-135m-instruct runs/tool_python-data

writes sums.jsonl, the questions with their answers, and imitate.jsonl, calls of the tool and answers from what it printed. The prompts of
the latter are those that `rollout.workflow = "tool_loop"` makes, so that nothing but the questions is new afterwards.
"""

import argparse
import json
import random
from pathlib import Path

from transformers import AutoTokenizer

from offbeat.agents.environments.schema import tool_of
from offbeat.agents.tools.python import python
from offbeat.chat.messages import Message, ToolCall
from offbeat.chat.rendering import Renderer
from offbeat.data.tokenizer import load_tokenizer

NUM_SUMS, NUM_TO_IMITATE = 4000, 400


def make_sum(rng: random.Random) -> tuple[str, str]:
    """Three numbers of up to three digits, and what they come to: more than a small model can do in its head."""
    code = f"{rng.randint(10, 999)} {rng.choice('+-*')} {rng.randint(10, 999)} {rng.choice('+-')} {rng.randint(10, 999)}"
    return code, str(eval(code))  # noqa: S307 (our own numbers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder with the tokenizer")
    parser.add_argument("out", type=Path, help="folder for the two files")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    rng, tool = random.Random(0), tool_of(python)
    renderer, tokenizer = Renderer(load_tokenizer(args.model)), AutoTokenizer.from_pretrained(args.model)

    def text_of(messages: list[Message]) -> str:
        return tokenizer.decode(renderer.prompt(messages, [tool]), skip_special_tokens=False)

    with (args.out / "sums.jsonl").open("w") as file:
        for _ in range(NUM_SUMS):
            code, answer = make_sum(rng)
            file.write(json.dumps({"prompt": f"What is {code}?", "answer": answer}) + "\n")
    with (args.out / "imitate.jsonl").open("w") as file:
        for _ in range(NUM_TO_IMITATE // 2):
            code, answer = make_sum(rng)
            asked, called = Message("user", f"What is {code}?"), ToolCall("1", "python", json.dumps({"code": code}))
            written = f'<tool_call>\n{{"name": "python", "arguments": {called.arguments}}}\n</tool_call>'
            printed = Message("tool", answer, call_id="1", name="python")
            file.write(json.dumps({"prompt": text_of([asked]), "answer": written}) + "\n")
            answered = [asked, Message("assistant", calls=(called,)), printed]
            file.write(json.dumps({"prompt": text_of(answered), "answer": answer}) + "\n")


if __name__ == "__main__":
    main()
