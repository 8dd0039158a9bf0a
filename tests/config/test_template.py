"""Templates of prompts: names of columns and nothing else."""

import pytest

from offbeat.config.template import parse_template
from offbeat.errors import DataError


@pytest.mark.parametrize(("template", "text"), [
    ("{q}\nAnswer:", "why?\nAnswer:"),
    ("{{{q}}} {{}}", "{why?} {}"),
    ("{a b.c[0]!r:>9}", "odd"),
    ("{n} {x} {yes} {list} {object}", '7 0.5 true ["é"] {"a": null}'),
])
def test_columns_are_filled_in(template, text):
    record = {"q": "why?", "a b.c[0]!r:>9": "odd", "n": 7, "x": 0.5, "yes": True, "list": ["é"], "object": {"a": None}}
    assert parse_template(template).fill(record, "here") == text


def test_a_field_reaches_no_attribute_and_no_item_of_a_value():
    for name in ("q.__class__", "q[0]", "q!r", "q:>9", "0", ""):
        with pytest.raises((DataError, ValueError)):
            parse_template(f"{{{name}}}").fill({"q": "text"}, "here")


def test_what_stands_in_a_record_is_no_template():
    assert parse_template("{q}").fill({"q": "{a} {{"}, "here") == "{a} {{"


def test_columns_are_listed_once_in_order():
    assert parse_template("{b} {a} {b} {{c}}").columns == ("b", "a")


@pytest.mark.parametrize(("template", "sentence"), [
    ("{q", "it has a single '{' at character 0; write {column} for a column, and '{{' for the brace"),
    ("q}", "it has a single '}' at character 1"),
    ("{ }", "it has a field without a name at character 0"),
    ("no column {{}}", "it names no column"),
])
def test_a_template_that_cannot_be_read_says_where(template, sentence):
    with pytest.raises(ValueError) as caught:
        parse_template(template)
    assert sentence in str(caught.value)
