"""Structured outputs: the tokens that may follow, so that a text keeps to a JSON schema, an expression, a choice or a grammar.

`Grammars` compiles a `Structure` for one tokenizer, on any thread; a `Grammar` follows one sample. The work of both is bounded by the
limits below, whatever a client sends: beyond them a structure is refused. Built on llguidance, which needs no other package, compiles
within milliseconds because it computes states as they are reached, knows byte-level and sentencepiece tokenizers, and never fetches the
references of a schema. xgrammar needs torch and triton of its own choice; outlines-core compiles an automaton over the whole vocabulary.
"""

import json
import re
import threading
from collections import OrderedDict
from typing import Any

import numpy as np

from offbeat.chat.shaping import JSON_SPACE, Structure
from offbeat.data.tokenizer import Tokenizer
from offbeat.errors import RefusedError, first_line
from offbeat.extras import require

MAX_CACHED = 32
"""Number of compiled structures that are kept for later requests."""

_LIMITS = {
    "max_items_in_row": 10_000, "initial_lexer_fuel": 1_000_000, "step_lexer_fuel": 200_000, "step_max_items": 100_000,
    "max_lexer_states": 20_000, "max_grammar_size": 200_000, "verbose_errors": False}
"""Steps of compiling (about 20 ms of them) and of a token (20 ms), and states, of which each takes 1 to 2 kB."""

MAX_REPEATS = 9999
"""Largest number of repetitions in an expression: a token costs time in proportion to it, 20 ms at 8,000."""

_TOO_MANY = re.compile(r"\{(?:\d{1,4},)?\d{5,}(?:,\d*)?\}")

_JSON: Any = {"whitespace_pattern": JSON_SPACE}

_LIBRARY_ERRORS = (ValueError, TypeError, RuntimeError)
"""Errors by which the Rust library refuses a tokenizer or a structure."""


class Grammar:
    """The place of one sample in its structure, which has `ended` if an end token has come after a complete text."""

    def __init__(self, matcher: Any, *, ends: frozenset[int], vocab_size: int) -> None:
        self.ended = False
        self._matcher = matcher
        self._ends = ends
        self._vocab_size = vocab_size

    def for_sample(self) -> "Grammar":
        """Return a grammar for another sample, at the beginning of its text."""
        return Grammar(self._matcher.deep_copy(), ends=self._ends, vocab_size=self._vocab_size)

    def push(self, token: int) -> None:
        self._matcher.consume_token(token)
        self.ended = token in self._ends

    def allowed(self, vocab_size: int) -> np.ndarray:
        """[V] bool, the tokens that may follow, V = `vocab_size`: none where the structure has become too complex."""
        words = np.zeros(-(-self._vocab_size // 32), np.int32)
        if not self._matcher.is_error():
            self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if self._matcher.is_error():
            words[:] = 0
        bits = np.unpackbits(words.view(np.uint8), bitorder="little")[: self._vocab_size].astype(bool)
        return bits[:vocab_size] if len(bits) >= vocab_size else np.pad(bits, (0, vocab_size - len(bits)))

    @property
    def trouble(self) -> str:
        """Reason why no token may follow; empty if one may."""
        return _one_line(self._matcher.get_error()) if self._matcher.is_error() else ""


class Grammars:
    """Compiles structures for a tokenizer, and keeps the latest. May be called on any thread."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._vocabulary: Any = None
        self._compiled: OrderedDict[Structure, Grammar] = OrderedDict()

    def compile(self, structure: Structure) -> Grammar:
        """Compile a structure; takes milliseconds, and a second for the first of a large vocabulary.

        Raises:
            RefusedError: it is wrong or too complex, or the tokenizer is of an unknown kind; the message says which.
            MissingExtraError: llguidance is not installed.
        """
        with self._lock:
            if (known := self._compiled.get(structure)) is not None:
                self._compiled.move_to_end(structure)
                return known
            if self._vocabulary is None:
                self._vocabulary = vocabulary_of(self._tokenizer)
            grammar = _compile(structure, self._vocabulary)
            self._compiled[structure] = grammar
            if len(self._compiled) > MAX_CACHED:
                self._compiled.popitem(last=False)
            return grammar


def vocabulary_of(tokenizer: Tokenizer) -> Any:
    """Return llguidance's form of a tokenizer, with both of its end tokens.

    Raises RefusedError if the bytes of its tokens cannot be known, MissingExtraError if llguidance is not installed.
    """
    require("train", ("llguidance",), wanted_by="a structured output")
    import llguidance  # noqa: PLC0415 (only structured outputs need it)
    import llguidance.hf  # noqa: PLC0415

    ends = [tokenizer.eos_token_id]
    if tokenizer.end_of_turn_id is not None and tokenizer.end_of_turn_id not in ends:
        ends.append(tokenizer.end_of_turn_id)
    decoder = (json.loads(tokenizer.hf.backend_tokenizer.to_str()).get("decoder") or {}).get("type")
    try:
        if decoder == "Fuse":  # tokens are pieces of text, as in a tokenizer over characters
            return llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Pieces(tokenizer)), eos_token=ends)
        return llguidance.hf.from_tokenizer(tokenizer.hf, eos_token=ends)
    except _LIBRARY_ERRORS as exc:
        raise RefusedError(
            f"structured outputs are not offered with tokenizer {tokenizer.name!r}, the bytes of whose tokens are not known:"
            f" {first_line(exc)}") from exc


class _Pieces:
    """A tokenizer whose text is its tokens joined, as llguidance takes it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id, self.bos_token_id = tokenizer.eos_token_id, None
        self.special_token_ids = sorted(set(tokenizer.special_tokens.values()))
        self.tokens = [tokenizer.decode([token], skip_special_tokens=False).encode() for token in range(tokenizer.vocab_size)]

    def __call__(self, text: bytes | str) -> list[int]:
        return self._tokenizer.encode(text.decode() if isinstance(text, bytes) else text)


def _compile(structure: Structure, vocabulary: Any) -> Grammar:
    import llguidance  # noqa: PLC0415 (only structured outputs need it)

    def refuse(why: object) -> RefusedError:
        return RefusedError(f"the {structure.kind} of the answer's structure cannot be kept: {_one_line(why)}")

    if (repeats := _TOO_MANY.search(structure.definition)) is not None:
        raise refuse(f"it repeats something {repeats[0][:40]} times, and at most {MAX_REPEATS} are taken")
    try:
        if structure.kind in ("json_schema", "json_object"):
            schema = structure.definition or '{"type": "object"}'
            text = llguidance.LLMatcher.grammar_from_json_schema(schema, defaults=_JSON)
        elif structure.kind == "choice":  # as one word of a grammar, which is found in a table and not parsed
            texts = " | ".join(json.dumps(text, ensure_ascii=False) for text in json.loads(structure.definition))
            text = llguidance.LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {texts}")
        else:
            text = llguidance.grammar_from(structure.kind, structure.definition)
    except _LIBRARY_ERRORS as exc:
        raise refuse(exc) from exc
    matcher = llguidance.LLMatcher(vocabulary, text, log_level=0, limits=llguidance.LLParserLimits(**_LIMITS))
    if matcher.is_error():
        raise refuse(matcher.get_error())
    return Grammar(matcher, ends=frozenset(vocabulary.eos_tokens), vocab_size=vocabulary.vocab_size)


def _one_line(why: object) -> str:
    return " ".join(str(why).split())[:300]
