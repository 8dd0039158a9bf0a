"""Text to token ids and back, without torch: the controller renders prompts and decodes completions with this.

`load_tokenizer` reads a Hugging Face folder or hub id; `character_tokenizer` builds one for tiny models. Both use
`PreTrainedTokenizerFast`, which can be imported without torch (`AutoTokenizer` cannot).
"""

import copy
import json
import re
import string
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from huggingface_hub import snapshot_download
from tokenizers import Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from offbeat.data.forms import Form, Messages, Tools
from offbeat.data.image_placeholders import label_of, split_images, with_parts
from offbeat.data.image_reader import ImageReader
from offbeat.data.image_store import FIRST_ID
from offbeat.data.template_rendering import check_template, form_of, render_marked, render_template, variables_read
from offbeat.data.token_bytes import bytes_of_piece
from offbeat.errors import DataError, ModelError
from offbeat.user_code.boundary import Caught

DEFAULT_ALPHABET = string.digits + string.ascii_lowercase + " \n+-*/=()>,.?#:"
"""Characters that the built-in tasks and the default chat template need; 54 tokens with the three special ones."""

_RARE = ("\U00012000", "\U00013000", "\U00010600")
"""Signs of cuneiform, hieroglyphs and Linear A: a tokenizer that knows all of them can write any character."""
_BEFORE = (*_RARE, "\n", "0", "a")
"""Texts after which others are encoded; tokens of the first ones hold no part of the text behind them."""
_FIRST = ("0", " 0", "a", "  a", "\n")
"""Texts that show how a tokenizer changes the beginning of a text."""

DEFAULT_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}"
    "{{ eos_token if message['role'] == 'assistant' else '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)

EOS, PAD, UNK = "<eos>", "<pad>", "<unk>"
_PROBE, _ANSWER = "0", "the assistant has spoken"
_REQUIRED = ("tokenizer.json", "tokenizer_config.json")
_WANTED = (*_REQUIRED, "special_tokens_map.json", "chat_template.jinja")


@dataclass(frozen=True, eq=False)
class Tokenizer:
    """A tokenizer with an end token.

    Attributes:
        name: folder or hub id that it came from, for messages.
        template_kwargs: variables of the chat template besides messages and tools, such as `enable_thinking`.
        alphabet: all characters that it knows, if it was built of them here; else empty.
        num_rows: number of rows of the model's embedding, if it has fewer than the tokenizer has tokens; else None.
        has_own_template: whether its chat template differs from the one in its files.
        images: reads images for its model; None where the model reads none.
    """

    hf: PreTrainedTokenizerFast
    name: str
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    alphabet: str = ""
    num_rows: int | None = None
    has_own_template: bool = False
    images: ImageReader | None = None

    def __post_init__(self) -> None:
        if self.hf.eos_token_id is None:
            raise ModelError(
                f"tokenizer {self.name!r} has no end token, so generation could not stop; set eos_token in tokenizer_config.json")
        # A tokenizer.json may carry the truncation and padding of its training, but a prompt must never be cut or padded silently.
        self.hf.backend_tokenizer.no_truncation()
        self.hf.backend_tokenizer.no_padding()

    @property
    def eos_token_id(self) -> int:
        return cast(int, self.hf.eos_token_id)

    @property
    def pad_token_id(self) -> int:
        """Id of the padding token; the end token where the tokenizer has none."""
        return self.eos_token_id if self.hf.pad_token_id is None else cast(int, self.hf.pad_token_id)

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included; a model's embedding may have more rows than this, never fewer."""
        return len(self.hf)

    @property
    def has_chat_template(self) -> bool:
        return bool(self.hf.chat_template)

    def giving(self, template_kwargs: Mapping[str, Any]) -> "Tokenizer":
        """Return this tokenizer with further variables of its chat template."""
        return replace(self, template_kwargs={**self.template_kwargs, **template_kwargs}) if template_kwargs else self

    def with_template(self, template: str) -> "Tokenizer":
        """Return this tokenizer with another chat template; raises ModelError if that is no Jinja."""
        check_template(template)
        hf = copy.deepcopy(self.hf)
        hf.chat_template = template
        return replace(self, hf=hf, has_own_template=True)

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Return the token ids of `text`. Special tokens spelled out in it, such as `<eos>`, are recognised.

        Raises DataError if the model has no such token (see `data.vocabulary`).
        """
        ids = self.hf.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        self.check_rows(ids)
        return ids

    def check_rows(self, ids: Iterable[int]) -> None:
        """Raise DataError if there is a token among these that the model's embedding lacks."""
        known = (index for index in ids if index < FIRST_ID)
        if self.num_rows is not None and (largest := max(known, default=0)) >= self.num_rows:
            token = self.hf.convert_ids_to_tokens(int(largest))
            raise DataError(
                f"a text has {token!r}, which tokenizer {self.name!r} knows, but the model's embedding of {self.num_rows} rows does not;"
                " leave it out")

    @property
    def knows_all(self) -> bool:
        """Whether the model can read and write any text."""
        return self.unknown_id is None and self.num_rows is None

    def encode_continuation(self, text: str) -> list[int]:
        """Return the token ids of a text that follows another: without the space that tokenizers like sentencepiece's put before a text."""
        if self._before is not None and text:
            before, ids = self._before
            whole = self.encode(before + text)
            if tuple(whole[: len(ids)]) == ids:
                return whole[len(ids):]
        return self.encode(text)

    def decode_continuation(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids that follow another text, with the space that decoders like sentencepiece's take from a text.

        The text of a prompt and the text of a sample after it are together the text of all tokens. Engines answer with this text.
        """
        if not self.anchor:
            return self.decode(ids, skip_special_tokens=skip_special_tokens)
        before, text = (self.decode(all_ids, skip_special_tokens=skip_special_tokens) for all_ids in (self.anchor, [*self.anchor, *ids]))
        return text[len(before):]

    @cached_property
    def anchor(self) -> tuple[int, ...]:
        """Tokens of a text to decode others after; empty if the text of tokens does not depend on the tokens before them."""
        ids = self.encode("a")[-1:]
        before = self.decode(ids)
        is_needed = any(self.decode([*ids, *rest]) != before + self.decode(rest) for rest in map(self.encode_continuation, _FIRST))
        return tuple(ids) if is_needed and before else ()

    @cached_property
    def _before(self) -> tuple[str, tuple[int, ...]] | None:
        """A text to encode others after, and its tokens; None if the encoding of a text does not depend on the text before it."""
        for before in _BEFORE:
            ids = self.encode(before)
            wholes = [self.encode(before + text) for text in _FIRST]
            if all(whole[: len(ids)] == ids for whole in wholes):
                is_alike = all(whole[len(ids):] == self.encode(text) for whole, text in zip(wholes, _FIRST, strict=True))
                return None if is_alike else (before, tuple(ids))
        return None

    @cached_property
    def unknown_id(self) -> int | None:
        """Id of the token that stands for text that the tokenizer does not know; None if it knows every text, as one over bytes does."""
        unknown = cast(int | None, self.hf.unk_token_id)
        return unknown if unknown is not None and any(unknown in self.encode(sign) for sign in _RARE) else None

    def unknown_in(self, text: str) -> str:
        """Return the first part of a text that the tokenizer does not know, or the model has no token for; empty if there is none."""
        if self.knows_all:
            return ""
        encoding = self.hf.backend_tokenizer.encode(text, add_special_tokens=False)
        most = float("inf") if self.num_rows is None else self.num_rows
        at = next((at for at, token in enumerate(encoding.ids) if token == self.unknown_id or token >= most), None)
        if at is None:
            return ""
        start, end = encoding.offsets[at]
        return text[start:end] or text

    @cached_property
    def bos_ids(self) -> tuple[int, ...]:
        """Tokens that the tokenizer itself puts before a text: the BOS token if it is configured so, else nothing."""
        plain, whole = self.encode(_PROBE), self.encode(_PROBE, add_special_tokens=True)
        at = next((i for i in range(len(whole)) if plain and whole[i : i + len(plain)] == plain), 0)
        return tuple(whole[:at])

    def prompt(self, text: str) -> list[int]:
        """Return the token ids of a text for a model: after `bos_ids`, unless the text already spells them out, e.g. as "<s>"."""
        ids = self.encode(text)
        return ids if tuple(ids[: len(self.bos_ids)]) == self.bos_ids else [*self.bos_ids, *ids]

    @cached_property
    def special_tokens(self) -> Mapping[str, int]:
        """Ids of the tokens that decoding leaves out, by their text."""
        added = {token.content: index for index, token in self.hf.added_tokens_decoder.items() if token.special}
        return {**added, **dict(zip(self.hf.all_special_tokens, self.hf.all_special_ids, strict=True))}

    @cached_property
    def added_pattern(self) -> re.Pattern[str]:
        """Matches every added token, special or not; of two that begin alike, the longer one."""
        added = sorted(map(str, self.hf.added_tokens_decoder.values()), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, added)) or r"(?!)")

    def special_text_in(self, text: str) -> str:
        """Return a special token that `text` contains; empty if it contains none."""
        return next((token for token in self.special_tokens if token in text), "")

    @cached_property
    def end_of_turn_id(self) -> int | None:
        """Id of the special token that the chat template writes after an assistant's message; None without a template or such a token."""
        if not self.has_chat_template:
            return None
        messages = [{"role": "user", "content": _PROBE}, {"role": "assistant", "content": _ANSWER}]
        try:
            text = self.chat_text(messages, to_answer=False)
        except ModelError:  # a template may refuse this unusual chat
            return None
        _, answer, after = text.rpartition(_ANSWER)
        ids = self.encode(after.lstrip()) if answer else []
        return ids[0] if ids and ids[0] in self.special_tokens.values() else None

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids; an image is its label (`image_label`), or with `skip_special_tokens` nothing."""
        ids = list(ids)
        if max(ids, default=0) < FIRST_ID:
            return cast(str, self.hf.decode(ids, skip_special_tokens=skip_special_tokens))
        return "".join(
            cast(str, self.hf.decode(run, skip_special_tokens=skip_special_tokens)) if not image_id
            else "" if skip_special_tokens else self.image_label(image_id) for image_id, run in split_images(ids))

    def image_label(self, image_id: int) -> str:
        """Return the text that shows an image to people by its token id, such as "<image 640x480 3f2a9c01>"."""
        return label_of(image_id, None if self.images is None else self.images.store)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token, which may be part of a character, such as b"\\xe2\\x82"; if unknown, the bytes of its text."""
        piece = cast(str, self.hf.convert_ids_to_tokens(token_id))
        added = self.hf.added_tokens_decoder.get(token_id)
        if added is None and piece is not None and (found := bytes_of_piece(piece, decoder=self._decoder)) is not None:
            return found
        return self.decode([token_id], skip_special_tokens=False).encode(errors="replace")

    @cached_property
    def _decoder(self) -> str:
        decoder = self.hf.backend_tokenizer.decoder
        return "" if decoder is None else json.dumps(json.loads(decoder.__getstate__()), ensure_ascii=False)

    def chat(self, messages: Messages, *, tools: Tools = ()) -> list[int]:
        """Return the token ids of a chat, up to the assistant's answer. Arguments and errors as of `chat_text`."""
        return self.encode(self.chat_text(messages, tools=tools))

    def chat_text(self, messages: Messages, *, tools: Tools | None = None, to_answer: bool = True, in_words: bool = False) -> str:
        """Render a chat with the template, in a form that it writes in full (see `data.forms`).

        Args:
            messages: each with `role` and `content`, and further keys that the template knows.
            to_answer: whether to add the text before the assistant's next answer, such as "<|im_start|>assistant".
            in_words: always write tools, calls and results in Hermes' format.

        Raises:
            ModelError: there is no chat template, or it refuses these messages.
        """
        return self.render(*self.written(messages, tools or (), in_words=in_words), to_answer=to_answer)

    def written(
        self, messages: Messages, tools: Tools = (), *, in_words: bool = False) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Return a chat and its tools in the form for the template. Arguments and errors as of `chat_text`."""
        return self.form(with_tools=bool(tools) and not in_words).write(messages, tools, in_words=in_words)

    def form(self, *, with_tools: bool = False) -> Form:
        """Return the form of chats for the template, with or without tools; raises ModelError if there is no chat template."""
        special, own = json.dumps(self.hf.special_tokens_map, default=str), json.dumps(dict(self.template_kwargs), default=str)
        return form_of(self.template(with_tools=with_tools), special, own, with_tools)

    def template(self, *, with_tools: bool = False) -> str:
        """Return the chat template that is used with or without tools; raises ModelError if there is none."""
        if not self.has_chat_template:
            raise ModelError(
                f"tokenizer {self.name!r} has no chat template; set data.chat_template to a file with one, put a chat_template.jinja beside"
                " its tokenizer.json, or use plain prompts (data.chat_template = false)")
        try:
            return str(self.hf.get_chat_template(tools=[{}] if with_tools else None))
        except ValueError as exc:
            raise ModelError(
                f"tokenizer {self.name!r} has chat templates by name, of which none is the default; set data.chat_template to a file with"
                " the one that is to be used") from exc

    def template_reads(self, *, with_tools: bool = False) -> frozenset[str]:
        """Return the variables that the chat template reads and does not set itself, such as "enable_thinking". Errors as of `template`."""
        return variables_read(self.template(with_tools=with_tools))

    def render(self, messages: Messages, tools: Tools = (), *, to_answer: bool = True) -> str:
        """Render a chat that already has the form for the template. Errors as of `chat_text`."""
        template = self.template(with_tools=bool(tools))
        with Caught() as caught:  # a template is a program, and may raise anything
            return render_template(template, self._template_variables, self._with_parts(messages), tools, to_answer=to_answer)
        roles, exc = ", ".join(str(m.get("role")) for m in messages), caught.take()
        raise ModelError(f"the chat template of tokenizer {self.name!r} refuses messages with roles {roles}: {exc}") from exc

    def generated(self, messages: Messages, tools: Tools = ()) -> tuple[str, list[tuple[int, int]]]:
        """Render a chat as `render` does, and return the ranges of characters between the template's marks of generation as well."""
        return render_marked(self.template(with_tools=bool(tools)), self._template_variables, self._with_parts(messages), tools)

    def _with_parts(self, messages: Messages) -> Messages:
        return messages if self.images is None else with_parts(messages)

    @property
    def _template_variables(self) -> dict[str, Any]:
        return {**self.hf.special_tokens_map, **self.template_kwargs}

    def save(self, folder: str | Path) -> None:
        """Write tokenizer.json, tokenizer_config.json and the chat template into `folder`."""
        self.hf.save_pretrained(folder)


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Read a tokenizer from a folder or, if there is no such folder, from the hub.

    Raises ModelError if files are missing or unreadable, the hub cannot be reached, or there is no end token.
    """
    folder = Path(path)
    if not folder.is_dir():
        folder = _download(str(path))
    missing = [name for name in _REQUIRED if not (folder / name).is_file()]
    if missing:
        raise ModelError(f"tokenizer {str(path)!r} has no {' and no '.join(missing)}; it needs {' and '.join(_REQUIRED)}")
    with Caught() as caught:  # the Rust library raises bare Exception
        hf = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
    if (exc := caught.error) is not None:
        raise ModelError(f"tokenizer {str(path)!r} cannot be read: {exc}; save it again with save_pretrained") from exc
    return Tokenizer(hf, str(path))


def _download(hub_id: str) -> Path:
    if hub_id.startswith(("/", ".", "~")) or hub_id.count("/") > 1 or not hub_id:
        raise ModelError(
            f"tokenizer folder {hub_id!r} does not exist; give a folder with {' and '.join(_REQUIRED)}, or a hub id like 'org/name'")
    try:
        return Path(snapshot_download(hub_id, allow_patterns=list(_WANTED)))
    except (OSError, ValueError) as exc:
        raise ModelError(
            f"tokenizer {hub_id!r} is not a folder here and could not be fetched from the hub ({type(exc).__name__});"
            " check the name and the connection, or give a folder") from exc


def character_tokenizer(alphabet: str = DEFAULT_ALPHABET, *, chat_template: str | None = DEFAULT_CHAT_TEMPLATE) -> Tokenizer:
    """Build a tokenizer with one token per character of `alphabet`, after `<eos>` (id 0), `<pad>` (1) and `<unk>` (2).

    Args:
        alphabet: distinct characters; others in a text become `<unk>`.
        chat_template: Jinja text; None leaves the tokenizer without a template.

    Raises:
        ModelError: the alphabet is empty or repeats a character.
    """
    if not alphabet or len(set(alphabet)) < len(alphabet):
        raise ModelError(f"the alphabet of a character tokenizer must hold each character once, and at least one; got {alphabet!r}")
    vocab = {token: i for i, token in enumerate((EOS, PAD, UNK, *alphabet))}
    backend = Backend(models.WordLevel(vocab, unk_token=UNK))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    hf = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=EOS, pad_token=PAD, unk_token=UNK,
        clean_up_tokenization_spaces=False, chat_template=chat_template)
    return Tokenizer(hf, "characters", alphabet=alphabet)
