"""Fields of bodies become one shaping, written back as they were; what cannot be meant is refused in a sentence."""

import json

import msgspec
import pytest

from offbeat.chat.shaping import MAX_STRUCTURE_CHARS, PLAIN, Shaping, ShapingFields, Structure, structure_of
from offbeat.data import wire
from offbeat.errors import RefusedError
from offbeat.inference.sampling import Sampling

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def read(**fields) -> Shaping:
    return msgspec.json.decode(json.dumps(fields), type=ShapingFields).shaping()


def test_every_field_acts_and_comes_back_as_it_was_written():
    fields = {
        "min_p": 0.5, "presence_penalty": -1.0, "frequency_penalty": 2.0, "repetition_penalty": 1.5, "logit_bias": {"7": -2.5, "12": 3.0},
        "bad_words": ["no", "never"], "allowed_token_ids": [3, 7, 12], "min_tokens": 4}
    shaping = read(**fields)
    assert shaping == Shaping(
        min_p=0.5, presence_penalty=-1.0, frequency_penalty=2.0, repetition_penalty=1.5, logit_bias=((7, -2.5), (12, 3.0)),
        bad_words=("no", "never"), allowed_token_ids=(3, 7, 12), min_tokens=4)
    assert set(shaping.acting) == set(fields)
    assert read(**shaping.fields()) == shaping


@pytest.mark.parametrize("fields", [
    {}, {"min_p": None, "presence_penalty": 0, "repetition_penalty": 1, "logit_bias": {}, "bad_words": [], "min_tokens": 0},
    {"response_format": {"type": "text"}}, {"response_format": None, "structured_outputs": None}, {"structured_outputs": {"json": None}}])
def test_what_changes_nothing_is_plain(fields):
    shaping = read(**fields)
    assert shaping == PLAIN and shaping.is_plain and not shaping.acting and not shaping.fields()


@pytest.mark.parametrize(("fields", "kind", "content"), [
    ({"response_format": {"type": "json_object"}}, "json_object", True),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}}, "json_schema", SCHEMA),
    ({"structured_outputs": {"json": SCHEMA}}, "json_schema", SCHEMA),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, "json_schema", SCHEMA),
    ({"structured_outputs": {"json_object": True}}, "json_object", True),
    ({"structured_outputs": {"regex": "a+"}}, "regex", "a+"),
    ({"structured_outputs": {"choice": ["yes", "nö"]}}, "choice", ["yes", "nö"]),
    ({"structured_outputs": {"grammar": 'start: "a"'}}, "grammar", 'start: "a"'),
    ({"guided_json": SCHEMA}, "json_schema", SCHEMA), ({"guided_regex": "a|b"}, "regex", "a|b"),
    ({"guided_choice": ["a"]}, "choice", ["a"]), ({"guided_grammar": "root ::= [a-z]"}, "grammar", "root ::= [a-z]")])
def test_structures_are_read_in_every_form(fields, kind, content):
    structure = read(**fields).structure
    assert structure is not None and structure.kind == kind
    assert (json.loads(structure.definition) if kind == "json_schema" else structure.content) == content
    assert read(**read(**fields).fields()) == read(**fields)


def test_the_form_of_responses_and_messages_has_the_schema_beside_its_type():
    assert structure_of({"type": "json_schema", "name": "x", "schema": SCHEMA}, "text.format") == Structure.of_schema(SCHEMA)


@pytest.mark.parametrize(("fields", "told"), [
    ({"min_p": 1.5}, "min_p must be 0 to 1, got 1.5"),
    ({"presence_penalty": 3}, "presence_penalty must be -2 to 2, got 3"),
    ({"frequency_penalty": -2.5}, "frequency_penalty must be -2 to 2"),
    ({"repetition_penalty": 0}, "repetition_penalty must be 0.001 to 1000"),
    ({"logit_bias": {"5": 101}}, "logit_bias must be -100 to 100"),
    ({"logit_bias": {"five": 1}}, "logit_bias takes token ids as keys"),
    ({"logit_bias": {"05": 1}}, "logit_bias takes token ids as keys"),
    ({"bad_words": ["a", ""]}, "bad_words must not hold an empty string"),
    ({"bad_words": ["a"] * 257}, "bad_words takes at most 256 texts, got 257"),
    ({"allowed_token_ids": []}, "allowed_token_ids is empty"),
    ({"min_tokens": -1}, "min_tokens must be >= 0"),
    ({"response_format": {"type": "xml"}}, "response_format.type must be 'text', 'json_object' or 'json_schema', got 'xml'"),
    ({"response_format": {"type": "json_schema"}}, "response_format of type 'json_schema' needs a schema"),
    ({"guided_regex": ""}, "the regex of an answer's structure is empty"),
    ({"guided_choice": []}, "choice takes 1 to 4096 texts"),
    ({"guided_regex": "a" * (MAX_STRUCTURE_CHARS + 1)}, "may have 131072 characters"),
    ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "an answer can have one structure, got json_object, regex"),
    ({"guided_regex": "a", "min_tokens": 2}, "min_tokens cannot be kept beside the structure of an answer")])
def test_what_cannot_be_meant_is_refused(fields, told):
    with pytest.raises(RefusedError) as caught:
        read(**fields)
    assert told in str(caught.value)


def test_sampling_crosses_processes_with_its_shaping():
    sampling = Sampling(5, shaping=Shaping(min_p=0.5, logit_bias=((3, 1.0),), structure=Structure("regex", "a+")))
    assert wire.decode(Sampling, wire.encode(sampling)) == sampling and sampling.is_restricted
