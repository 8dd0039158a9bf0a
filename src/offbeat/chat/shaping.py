"""Settings that change the distribution of the next token besides temperature, top_k and top_p, and their fields in bodies of requests.

Engines get a `Shaping`; `ShapingFields` are the fields of a body, for completions and for all dialects of chats. The names are those of
OpenAI and vLLM. Torch-free, no I/O.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from offbeat.errors import RefusedError

StructureKind = Literal["json_schema", "json_object", "regex", "choice", "grammar"]

_STRUCTURED: Mapping[StructureKind, str] = {
    "json_schema": "json", "json_object": "json_object", "regex": "regex", "choice": "choice", "grammar": "grammar"}
"""The field of vLLM's `structured_outputs` for each kind."""

MAX_STRUCTURE_CHARS = 1 << 17
"""Largest number of characters in the definition of a structure."""

JSON_SPACE = r"[\x20\x0A\x0D\x09]{1,64}"
"""White space between the parts of a JSON text: bounded, since a model may otherwise write nothing else until its last token."""

MAX_CHOICES = 4096
"""Largest number of alternatives in a choice."""

MAX_BAD_WORDS, MAX_BAD_WORD_CHARS = 256, 4096
"""Largest number of bad words, and of characters in all of them: each is compared with the end of the text at every token."""

MAX_BIAS = 100.0
"""Largest bias of a logit, as in OpenAI's interface."""


@dataclass(frozen=True)
class Structure:
    """The form that the text of an answer must have.

    Attributes:
        kind: a JSON text that a schema accepts; any JSON object; a text that a regular expression matches as a whole; one of several texts;
            or a text that a grammar produces.
        definition: the schema as JSON text, the expression, the texts as a JSON list of strings such as '["yes", "no"]', or the grammar in
            Lark's or llama.cpp's notation; "" for any JSON object.
    """

    kind: StructureKind
    definition: str = ""

    def __post_init__(self) -> None:
        if len(self.definition) > MAX_STRUCTURE_CHARS:
            raise RefusedError(
                f"the {self.kind} of an answer's structure may have {MAX_STRUCTURE_CHARS} characters, got {len(self.definition)}")
        if not self.definition and self.kind != "json_object":
            raise RefusedError(f"the {self.kind} of an answer's structure is empty; give one, or leave it out")

    @property
    def content(self) -> str | list[str] | bool:
        """The definition as vLLM writes it: the texts of a choice as a list, and true for any JSON object."""
        if self.kind == "choice":
            return json.loads(self.definition)
        return self.definition or True

    @classmethod
    def of_schema(cls, schema: Mapping[str, Any] | str) -> "Structure":
        """The form of a JSON schema, given as an object or as its JSON text."""
        return cls("json_schema", schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False))

    @classmethod
    def of_choices(cls, choices: list[str]) -> "Structure":
        """One of these texts. Raises RefusedError where there is none, one is empty, or they are too many."""
        if not choices or not all(choices) or len(choices) > MAX_CHOICES:
            raise RefusedError(f"choice takes 1 to {MAX_CHOICES} texts, none of them empty, got {str(choices)[:80]}")
        return cls("choice", json.dumps(choices, ensure_ascii=False))


@dataclass(frozen=True, kw_only=True)
class Shaping:
    """Changes of the distribution of the next token besides temperature, top_k and top_p. The defaults change nothing.

    They act in this order on the logits: the structure, `allowed_token_ids` and `bad_words` leave tokens out, and so does `min_tokens`;
    then `logit_bias`; then the penalties; then the temperature; then `min_p`; then top_k and top_p.

    Attributes:
        min_p: leave out tokens whose probability is below this share of the likeliest token's; 0 leaves out none.
        presence_penalty: subtracted from the logit of every token that the sample holds already.
        frequency_penalty: subtracted once for each time that the sample holds the token.
        repetition_penalty: divides the positive and multiplies the negative logits of tokens in the prompt or the sample; 1 does nothing.
        logit_bias: pairs of a token id and a number that is added to its logit, such as ((50, -100.0),).
        bad_words: texts that must not appear: where all tokens of one but the last were just generated, the last is left out.
        allowed_token_ids: the only tokens that may be drawn, end tokens among them or not; () allows all.
        min_tokens: number of tokens before which no end token is drawn and no stop string ends the sample.
        structure: the form that the text must have; None for any.
    """

    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[str, ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    structure: Structure | None = None

    def __post_init__(self) -> None:
        biases = [bias for _, bias in self.logit_bias]
        checks = (
            (0 <= self.min_p <= 1, "min_p must be 0 to 1", self.min_p),
            (-2 <= self.presence_penalty <= 2, "presence_penalty must be -2 to 2", self.presence_penalty),
            (-2 <= self.frequency_penalty <= 2, "frequency_penalty must be -2 to 2", self.frequency_penalty),
            (1e-3 <= self.repetition_penalty <= 1e3, "repetition_penalty must be 0.001 to 1000; 1 does nothing", self.repetition_penalty),
            (all(-MAX_BIAS <= bias <= MAX_BIAS for bias in biases), f"logit_bias must be -{MAX_BIAS:g} to {MAX_BIAS:g}", biases[:9]),
            (all(self.bad_words), "bad_words must not hold an empty string", list(self.bad_words)[:9]),
            (len(self.bad_words) <= MAX_BAD_WORDS, f"bad_words takes at most {MAX_BAD_WORDS} texts", len(self.bad_words)),
            (sum(map(len, self.bad_words)) <= MAX_BAD_WORD_CHARS, f"bad_words takes at most {MAX_BAD_WORD_CHARS} characters in all",
             sum(map(len, self.bad_words))),
            (0 <= self.min_tokens < 2**31, "min_tokens must be >= 0 and below 2**31", self.min_tokens),
        )
        for holds, rule, value in checks:
            if not holds:
                raise RefusedError(f"{rule}, got {value!r}")
        self._check_structure()

    def _check_structure(self) -> None:
        """Refuse settings that may leave no token that the structure accepts."""
        if self.structure is None:
            return
        for name, given in (("allowed_token_ids", self.allowed_token_ids), ("bad_words", self.bad_words), ("min_tokens", self.min_tokens)):
            if given:
                raise RefusedError(f"{name} cannot be kept beside the structure of an answer, got {str(given)[:80]}; leave one of them out")

    @property
    def is_plain(self) -> bool:
        """Whether it changes nothing."""
        return self == PLAIN

    @property
    def acting(self) -> tuple[str, ...]:
        """Names of the settings that change something."""
        return tuple(name for name in self.__dataclass_fields__ if getattr(self, name) != getattr(PLAIN, name))

    def fields(self) -> dict[str, Any]:
        """Write it as fields of a body of the embedded engine or of vLLM; those that change nothing are left out."""
        told: dict[str, Any] = {name: getattr(self, name) for name in self.acting}
        if self.logit_bias:
            told["logit_bias"] = {str(token): bias for token, bias in self.logit_bias}
        if (structure := told.pop("structure", None)) is not None:
            told["structured_outputs"] = {_STRUCTURED[structure.kind]: structure.content}
        return told


PLAIN = Shaping()
"""Changes nothing."""


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True):
    """vLLM's `structured_outputs`: one of these."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class ShapingFields(msgspec.Struct, kw_only=True):
    """Fields of a body that become a `Shaping`; null is the same as nothing.

    Attributes:
        logit_bias: biases by the token id as text, such as {"50": -100}.
        response_format: OpenAI's, {"type": "text" | "json_object"} or {"type": "json_schema", "json_schema": {"schema": ...}}.
        structured_outputs: vLLM's, one of {"json", "regex", "choice", "grammar", "json_object"}.
        guided_json, guided_regex, guided_choice, guided_grammar: vLLM's older names of the same.
    """

    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    min_tokens: int | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None

    def shaping(self, *, structure: Structure | None = None) -> Shaping:
        """Return the fields as a `Shaping`; `structure` is a form that the dialect writes in a field of its own.

        Raises RefusedError if a value is out of range, `response_format` is of an unknown type, or several forms are given.
        """
        if self.allowed_token_ids == []:
            raise RefusedError("allowed_token_ids is empty, so no token could be drawn; give token ids, or leave it out")
        return Shaping(
            min_p=self.min_p or 0.0, presence_penalty=self.presence_penalty or 0.0, frequency_penalty=self.frequency_penalty or 0.0,
            repetition_penalty=1.0 if self.repetition_penalty is None else self.repetition_penalty, logit_bias=_biases(self.logit_bias),
            bad_words=tuple(self.bad_words or ()), allowed_token_ids=tuple(sorted(set(self.allowed_token_ids or ()))),
            min_tokens=self.min_tokens or 0, structure=self._structure(structure))

    def _structure(self, own: Structure | None) -> Structure | None:
        given = self.structured_outputs or StructuredOutputs()
        found = [
            own,
            structure_of(self.response_format, "response_format"),
            *(None if schema is None else Structure.of_schema(schema) for schema in (given.json, self.guided_json)),
            *(None if regex is None else Structure("regex", regex) for regex in (given.regex, self.guided_regex)),
            *(None if choices is None else Structure.of_choices(choices) for choices in (given.choice, self.guided_choice)),
            *(None if grammar is None else Structure("grammar", grammar) for grammar in (given.grammar, self.guided_grammar)),
            Structure("json_object") if given.json_object else None,
        ]
        structures = [structure for structure in found if structure is not None]
        if len(structures) > 1:
            raise RefusedError(f"an answer can have one structure, got {', '.join(structure.kind for structure in structures)}; leave one")
        return structures[0] if structures else None


def structure_of(form: Mapping[str, Any] | None, field: str) -> Structure | None:
    """Read a format of answers in OpenAI's or Anthropic's form.

    Args:
        form: {"type": "text"}, {"type": "json_object"}, {"type": "json_schema", "json_schema": {"schema": {...}}} as in chat completions,
            or {"type": "json_schema", "schema": {...}} as in Responses and Messages; None for none.
        field: its name, for messages.

    Raises:
        RefusedError: the type is another, or the schema is missing.
    """
    kind = "text" if form is None else form.get("type")
    if form is None or kind == "text":
        return None
    if kind == "json_object":
        return Structure("json_object")
    if kind != "json_schema":
        raise RefusedError(f"{field}.type must be 'text', 'json_object' or 'json_schema', got {str(kind)[:80]!r}")
    inner = form.get("json_schema", form)
    schema = inner.get("schema") if isinstance(inner, Mapping) else None
    if not isinstance(schema, Mapping):
        raise RefusedError(f"{field} of type 'json_schema' needs a schema, which is an object, got {str(schema)[:80]}")
    return Structure.of_schema(schema)


def _biases(given: Mapping[str, float] | None) -> tuple[tuple[int, float], ...]:
    for token, bias in (given or {}).items():
        if not (token.isascii() and token.isdigit() and len(token) < 10 and str(int(token)) == token and math.isfinite(bias)):
            raise RefusedError(f"logit_bias takes token ids as keys and numbers as values, got {token[:80]!r}: {bias}")
    return tuple(sorted((int(token), bias) for token, bias in (given or {}).items()))
