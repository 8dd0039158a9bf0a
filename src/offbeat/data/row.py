"""A row of a dataset: a prompt, its answer, and other fields for rewards. Also parses raw records into rows.

Rows cross to reward processes, so they are frozen and plain. Every error about a record says where it is and which fields it has.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from offbeat.config.data import DataConfig
from offbeat.config.template import missing_column, parse_template
from offbeat.data.cells import is_absent, json_text, number_or_text
from offbeat.data.image_sources import MARK, WRITTEN_MARK, ImageSource, images_of_column, place_images
from offbeat.data.layouts import as_chat
from offbeat.data.messages import Message, Tool, as_context, chat_in, is_learnt, kind_of, parse_messages, parse_tools, text_of, with_system
from offbeat.errors import DataError

Prompt = str | tuple[Message, ...]

TOOLS, _OLDER_TOOLS = "tools", "functions"
"""Column of the tools that a chat's assistant may call."""

_CHATS = ("messages", "conversations")
_SYSTEM = "system"
_ANSWERS = ("answer", "completion")
_GSM8K_ANSWER = re.compile(r"####\s*(\S[^\n]*)")


@dataclass(frozen=True)
class Row:
    """One prompt with its answer.

    Attributes:
        prompt: text, or a chat of messages.
        answer: the right answer, for rewards, such as "42"; empty where the data has none.
        extra: the record's other fields as text; values that are not text are written as JSON.
        solution: text that supervised fine-tuning imitates, where that is more than the answer (GSM8K's worked solution, or the assistant's
            last message in a chat that has a separate answer); else empty.
        tools: descriptions of functions that the assistant of a chat may call, for chat templates that write them.
        said: the assistant's last message, where it has tool calls or reasoning beside its text; else None.
        json_fields: names of the extra fields that were not text, and are JSON.
        of_set: name of the data set that it comes from, where several are mixed.
        template_kwargs: variables of the chat template for this row, such as {"enable_thinking": False}.
        images: images of the prompt, in the order of the marks in its text (`image_sources.MARK`).
    """

    prompt: Prompt
    answer: str
    extra: dict[str, str] = field(default_factory=dict)
    solution: str = ""
    tools: tuple[Tool, ...] = ()
    said: Message | None = None
    json_fields: tuple[str, ...] = ()
    of_set: str = ""
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    images: tuple[ImageSource, ...] = ()

    @property
    def imitated(self) -> Message:
        """The assistant's message that supervised fine-tuning imitates."""
        return self.said or {"role": "assistant", "content": self.solution or self.answer}

    @property
    def shown_prompt(self) -> Prompt:
        """The prompt with "<image>" in the places of its images."""
        if not self.images:
            return self.prompt
        if isinstance(self.prompt, str):
            return self.prompt.replace(MARK, WRITTEN_MARK)
        return tuple({**each, "content": str(each["content"]).replace(MARK, WRITTEN_MARK)} for each in self.prompt)

    @property
    def prompt_text(self) -> str:
        """The prompt for readers: its text, or the messages of a chat one below the other, such as "user: What is 6 * 7?"."""
        prompt = self.shown_prompt
        return prompt if isinstance(prompt, str) else "\n".join(f"{each['role']}: {each['content']}" for each in prompt)


def parse_record(record: Mapping[str, Any], config: DataConfig, *, where: str, needs_answer: bool = True) -> Row:
    """Make a row from a JSON object or table row, according to `config.format`, `config.prompt` and the field names.

    Raises DataError, which names the record by `where`, such as `'train.jsonl', line 3`, if a field is missing or of the wrong type,
    GSM8K's answer has no `####`, a chat has no answer, or, with `needs_answer`, any record has none.
    """
    if config.format in ("auto", "messages") and not (config.prompt or config.prompt_field):
        record = as_chat(record, where)
    column, images = images_of_column(record, where)
    record = {name: value for name, value in record.items() if name != column}
    found: list[ImageSource | None] = []
    return with_images(_parsed(record, config, where, needs_answer=needs_answer, images=found), found, images, where)


def _parsed(record: Mapping[str, Any], config: DataConfig, where: str, *, needs_answer: bool, images: list[ImageSource | None]) -> Row:
    answer_field = config.answer_field or next((name for name in _ANSWERS if name in record), _ANSWERS[0])
    if config.format == "gsm8k":
        answer_field = config.answer_field or _ANSWERS[0]
    if config.prompt:
        template = parse_template(config.prompt)
        prompt: Any = template.fill(record, where)
        prompt_field = template.columns[0]
        used = {prompt_field} if config.prompt == f"{{{prompt_field}}}" else set()
    else:
        prompt_field = config.prompt_field or _prompt_field(record, config.format)
        used = {prompt_field}
        if prompt_field not in record:
            raise DataError(f"{where}, {missing_column(prompt_field, record)}; set data.prompt, data.prompt_field or data.format")
        prompt = record[prompt_field]
    system = system_of(record, config, where)
    used |= {answer_field, *([config.system_field] if config.system_field else [])}
    if not config.prompt and (config.format == "messages" or (config.format == "auto" and _is_chat(prompt, prompt_field, config, where))):
        messages = with_system(parse_messages(prompt, prompt_field, where, images=images), system)
        return _chat(record, prompt_field, answer_field, messages, where, used, needs_answer=needs_answer)
    if not isinstance(prompt, str):
        raise DataError(f"{where}: field {prompt_field!r} must be text, got {kind_of(prompt)}; a chat needs data.format = \"messages\"")
    answer, solution = _read_answer(record, answer_field, where, config, needs_answer=needs_answer), ""
    if config.format == "gsm8k" and (answer or needs_answer):
        solution, answer = answer, _gsm8k_answer(answer, where)
    extra, json_fields = _extra(record, used, answer_field)
    made: Prompt = with_system(chat_of(prompt), system) if system else prompt
    tools = tools_of(record, where) if system or config.wraps else ()
    return Row(made, answer, extra, solution, tools, json_fields=json_fields)


def chat_of(prompt: Prompt) -> tuple[Message, ...]:
    """Return a prompt as a chat; a text is the user's message."""
    return ({"role": "user", "content": prompt},) if isinstance(prompt, str) else prompt


def with_images(row: Row, found: Sequence[ImageSource | None], column: tuple[ImageSource, ...], where: str) -> Row:
    """Return a row with its images, `found` in messages or in the `column`, each with a mark in the prompt; raises as `place_images`."""
    if not found and not column:
        return row
    chat = chat_of(row.prompt)
    first = next((i for i, each in enumerate(chat) if each["role"] == "user"), 0)
    texts, images = place_images([message["content"] for message in chat], found, column, where, first=first)
    if isinstance(row.prompt, str):
        return replace(row, prompt=texts[0], images=images)
    prompt = tuple({**message, "content": text} for message, text in zip(chat, texts, strict=True))
    return replace(row, prompt=prompt, images=images)


def tools_of(record: Mapping[str, Any], where: str) -> tuple[Tool, ...]:
    """Return the tools of a record of a chat: from the column `tools`, or `functions` in the older form of OpenAI.

    Raises DataError if `tools` holds none, or both hold some.
    """
    tools, older = parse_tools(record.get(TOOLS), TOOLS, where), record.get(_OLDER_TOOLS)
    if not (isinstance(older, list) and older and all(isinstance(tool, Mapping) and "name" in tool for tool in older)):
        return tools
    if tools:
        raise DataError(f"{where} has both {TOOLS!r} and {_OLDER_TOOLS!r}; leave one of them out")
    return parse_tools([{"type": "function", "function": tool} for tool in older], _OLDER_TOOLS, where)


def _prompt_field(record: Mapping[str, Any], layout: str) -> str:
    if layout == "gsm8k":
        return "question"
    if layout == "messages" or (layout == "auto" and "prompt" not in record):
        return next((name for name in _CHATS if name in record), "messages" if layout == "messages" else "prompt")
    return "prompt"


def _is_chat(prompt: Any, name: str, config: DataConfig, where: str) -> bool:
    """Whether a prompt is a chat: a list of messages, or one as JSON text. A column that is named after chats must hold one."""
    is_named = name in _CHATS and not config.prompt_field
    return isinstance(prompt, list) or is_named or (isinstance(prompt, str) and chat_in(prompt, name, where) is not None)


def system_of(record: Mapping[str, Any], config: DataConfig, where: str) -> str:
    """Return the record's own system message; empty if there is none.

    `config.system_field` names it; beside a column of messages it is `system`, as ToolACE and LLaMA-Factory write it.
    """
    if not config.system_field:
        beside = record.get(_SYSTEM) if any(name in record for name in _CHATS) and not config.prompt else None
        return beside if isinstance(beside, str) else ""
    if config.system_field not in record:
        raise DataError(f"{where}, {missing_column(config.system_field, record)}; set data.system_field")
    value = record[config.system_field]
    return "" if value is None else _text(value, config.system_field, where)


_WHEN_NEEDED = (
    "an answer is needed where it is imitated (run.warm_up, offbeat sft), shown to a teacher, or compared with by exact_match or math")


def _read_answer(record: Mapping[str, Any], name: str, where: str, config: DataConfig, *, needs_answer: bool) -> str:
    if name not in record:
        if not needs_answer and not config.answer_field:
            return ""
        why = "" if config.answer_field else f"; {_WHEN_NEEDED}"
        raise DataError(f"{where}, {missing_column(name, record)}; set data.answer_field or data.format{why}")
    return _answer_text(record[name], name, where, needs_answer=needs_answer)


def _answer_text(value: Any, name: str, where: str, *, needs_answer: bool) -> str:
    """Return an answer as text: empty if there is none, and as JSON if it is neither text nor a number, which is for a user's reward."""
    if needs_answer:
        return _text(value, name, where, why=f"; {_WHEN_NEEDED}")
    text = number_or_text(value)
    return "" if is_absent(value) else json_text(value) if text is None else text


def _chat(
    record: Mapping[str, Any], prompt_field: str, answer_field: str, messages: tuple[Message, ...], where: str, used: set[str], *,
    needs_answer: bool,
) -> Row:
    """Make a row whose prompt ends where the assistant is to answer. A last message by the assistant is the answer or solution.

    A prompt with a completion or an answer beside it is context, as in TRL's pairs: its turns are not trained on. Messages after the last
    one that is trained on are left out.
    """
    given = record.get(answer_field)
    given = None if is_absent(given) else given
    rest = chat_in(given, answer_field, where) if isinstance(given, str) else given
    is_pair = given is not None and (prompt_field == "prompt" or answer_field == "completion")
    if is_pair and messages[-1]["role"] != "assistant":
        messages = as_context(messages)
    if isinstance(rest, list) and rest and (needs_answer or _is_chat_end(rest)):  # the rest of the chat, as in TRL's pairs
        if messages[-1]["role"] == "assistant":
            raise DataError(
                f"{where}: the chat in {prompt_field!r} ends with the assistant's message, which {answer_field!r} cannot go on with; end it"
                " with another's")
        messages, given = (*messages, *parse_messages(rest, answer_field, where)), None
    extra, json_fields = _extra(record, {*used, TOOLS}, answer_field)
    tools = tools_of(record, where)
    messages = _up_to_learnt(messages, prompt_field, where)
    if messages[-1]["role"] != "assistant":
        if given is None and needs_answer:
            raise DataError(
                f"{where}, has no answer: the chat in {prompt_field!r} does not end with the assistant's message, and there is no field"
                f" {answer_field!r}; add one of them, or set data.answer_field")
        answer = "" if given is None else _answer_text(given, answer_field, where, needs_answer=needs_answer)
        return Row(messages, answer, extra, tools=tools, json_fields=json_fields)
    prompt, said = messages[:-1], messages[-1]
    if not any(message["role"] != "system" for message in prompt):
        raise DataError(f"{where}: the chat in {prompt_field!r} has nothing before the assistant's message; it needs a user's first")
    kept = said if said.keys() - {"role", "content"} else None
    text = text_of(said)
    if given is None:
        return Row(prompt, text, extra, tools=tools, said=kept, json_fields=json_fields)
    return Row(prompt, _answer_text(given, answer_field, where, needs_answer=needs_answer), extra, text, tools, kept, json_fields)


def _is_chat_end(answer: Any) -> bool:
    """Whether an answer is messages that go on with the chat of the prompt, as in TRL's pairs of prompt and completion."""
    turns = answer if isinstance(answer, list) else []
    return bool(turns) and all(isinstance(turn, Mapping) and {"role", "from"} & turn.keys() for turn in turns)


def _up_to_learnt(messages: tuple[Message, ...], prompt_field: str, where: str) -> tuple[Message, ...]:
    """Return a chat that ends with the assistant up to the last of its messages that is not marked as context."""
    if messages[-1]["role"] != "assistant" or is_learnt(messages[-1]):
        return messages
    last = max((index for index, message in enumerate(messages) if is_learnt(message)), default=-1)
    if last < 0:
        raise DataError(
            f"{where}: all of the assistant's messages in {prompt_field!r} are marked not to be trained on; leave the row out, or the mark"
            " of one of them")
    return messages[: last + 1]


def _extra(record: Mapping[str, Any], used: set[str], answer_field: str) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the fields that are no prompt as text, and the names of those that were none.

    An answer of another name than "answer" is among them, because rewards may read it by its own name; so is one that is no text, because
    rewards in TRL's form get it unchanged.
    """
    answer = record.get(answer_field)
    is_known = answer_field == _ANSWERS[0] and (isinstance(answer, str) or is_absent(answer) or _is_chat_end(answer))
    left_out = used if is_known else used - {answer_field}
    others = {name: value for name, value in record.items() if name not in left_out}
    json_fields = tuple(name for name, value in others.items() if not isinstance(value, str))
    return {name: value if isinstance(value, str) else json_text(value) for name, value in others.items()}, json_fields


def _text(value: Any, name: str, where: str, *, why: str = "") -> str:
    text = None if is_absent(value) else number_or_text(value)
    if text is None:
        got = "NaN, which stands for a missing value" if isinstance(value, float) else kind_of(value)
        raise DataError(f"{where}: field {name!r} must be text or a number, got {got}{why}")
    return text


def _gsm8k_answer(text: str, where: str) -> str:
    found = _GSM8K_ANSWER.findall(text)
    if not found:
        raise DataError(
            f"{where}: a GSM8K answer must end in '#### ' and a number, got {text[-40:]!r};"
            ' for bare answers use data.format = "prompt_answer"')
    return found[-1].strip().replace(",", "")
