"""A tiny model that calls a tool: by how the last message ends, it calls `add`, answers or writes Python, and is wrong at times.

A word-level model of two layers cannot follow instructions, so it is taught four things to say, by `offbeat sft`. The text before is any
piece of the licence, a text that does not change, so that it learns not to look at it: agents write different instructions.
"""

import json
import random
from pathlib import Path

from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from chats import CHATML
from offbeat.config.model import TinyConfig
from offbeat.model.tiny import build_tiny
from small_run import offbeat

QUESTION, CODE_TASK, RIGHT = "What is 3 + 4?", "Add 3 and 4.", "7"
_TOLD = """You may call functions within <tools></tools> XML tags:
<tools>
{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call>"""
_EARLIER = (
    '<tool_call>\n{"name": "add", "arguments": {"a": 3, "b": 4}}\n</tool_call>',
    "Calling tools:\n[{'id': 'call_5b12abef', 'type': 'function', 'function': {'name': 'add', 'arguments': {'a': 3, 'b': 4}}}]",
    '{"name": "final_answer", "parameters": {"type": "object", "properties": {"answer": {"type": "string"}}, "required": ["answer"]}}')
_TEXT = Path(__file__).parents[2] / "LICENSE"
_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_TINY = TinyConfig(hidden_size=96, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=24, intermediate_size=192, max_positions=8192)


def train_adder(folder: Path) -> Path:
    """Build and train the model in `folder`; returns the folder of its export."""
    text = _TEXT.read_text()
    tokenizer = _tokenizer(text)
    base, rows = folder / "base", folder / "rows.jsonl"
    tokenizer.save_pretrained(base)
    build_tiny(base, tiny=_TINY, vocab_size=len(tokenizer), eos_token_id=2, pad_token_id=0, seed=1)
    rng = random.Random(1)
    rows.write_text("".join(json.dumps({"messages": _chat(rng, text)}) + "\n" for _ in range(2000)))
    config = folder / "sft.toml"
    config.touch()
    settings = {
        "run.dir": str(folder), "run.name": "taught", "model.path": str(base), "data.path": str(rows), "data.format": "messages",
        "data.heldout_size": "8", "sft.total_steps": "120", "sft.batch_size": "16", "sft.optimizer.lr": "5e-3",
        "sft.optimizer.warmup_steps": "10", "sft.optimizer.schedule": "cosine", "train.threads": "2", "rollout.max_new_tokens": "64",
    }
    done = offbeat("sft", str(config), *(word for name, value in settings.items() for word in (f"--{name}", value)), timeout_s=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "taught" / "export"


def _tokenizer(text: str) -> PreTrainedTokenizerFast:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(r"\d| ?[^\W\d]+|\s|[^\s\w]"), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    backend.decoder = decoders.ByteLevel()
    backend.train_from_iterator([text], trainers.BpeTrainer(
        vocab_size=800, special_tokens=_SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>", additional_special_tokens=_SPECIAL[1:],
        chat_template=CHATML)


def _chat(rng: random.Random, text: str) -> list[dict[str, str]]:
    """A chat of one turn, with any text before its end, which decides what is answered."""
    wrong = rng.random() < 0.3
    b, total = (str(rng.randrange(10)), str(rng.randrange(10))) if wrong else ("4", RIGHT)
    end, answer = rng.choice([
        (QUESTION, _call("add", {"a": 3, "b": int(b)})),
        (f"<tool_response>\n{rng.randrange(20)}\n</tool_response>", f"The sum is {total}"),
        (f"Observation:\n{rng.randrange(20)}", _call("final_answer", {"answer": total})),
        (CODE_TASK, f"I add them.\n<code>\nfinal_answer(add(3, {b}))\n</code>"),
    ])
    before = _excerpt(rng, text) if rng.random() < 0.5 else ""
    return [
        {"role": "system", "content": _excerpt(rng, text) + (_TOLD if rng.random() < 0.7 else "")},
        {"role": "user", "content": before + end}, {"role": "assistant", "content": answer}]


def _call(name: str, arguments: dict[str, object]) -> str:
    return f'<tool_call>\n{json.dumps({"name": name, "arguments": arguments})}\n</tool_call>'


def _excerpt(rng: random.Random, text: str) -> str:
    length = rng.choice([10, 50, 200, 3000 if rng.random() < 0.1 else 400])
    start = rng.randrange(len(text) - length)
    return "\n".join([text[start:start + length], *(earlier for earlier in _EARLIER if rng.random() < 0.3), ""])
