"""The table of fields: it has every field of the SDKs' types, its refusals name the field, and what acts has a place in the readers."""

import importlib.util
import json
from pathlib import Path

import pytest

from offbeat.chat import anthropic, completions, responses
from offbeat.chat.fields import FIELDS, SURFACES, check_fields
from offbeat.engine.wire import CompletionBody
from offbeat.errors import RefusedError

ROOT = Path(__file__).parents[2]


def test_every_field_that_the_sdks_can_send_is_in_the_table() -> None:
    """The names are those of the request types of the newest SDKs, listed by `tools/sdk_fields.py`."""
    listed = json.loads((ROOT / "tests/chat/sdk_fields.json").read_text())
    missing = {api: sorted(set(names) - set(FIELDS[api])) for api, names in listed["fields"].items()}
    assert missing == {api: [] for api in FIELDS}


def test_the_page_is_what_the_table_says() -> None:
    spec = importlib.util.spec_from_file_location("api_fields", ROOT / "tools/api_fields.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.PAGE.read_text() == module.page(), "run `python tools/api_fields.py`"


@pytest.mark.parametrize(("api", "reader"), [
    ("chat completions", completions._CompletionsBody), ("completions", CompletionBody), ("Responses", responses._ResponsesBody),
    ("Messages", anthropic._AnthropicBody)])
def test_what_acts_is_read(api, reader) -> None:
    read = set(reader.__struct_fields__)
    acting = {name.partition(".")[0] for name, field in FIELDS[api].items() if {"acts", "run"} & {field.use(at) for at in SURFACES}}
    containers = {name.partition(".")[0] for name in FIELDS[api] if "." in name}
    assert acting - containers <= read


def test_a_refusal_names_the_field_the_value_and_what_to_do() -> None:
    with pytest.raises(RefusedError, match="^previous_response_id is not honoured in training, got r1; leave it out .answers") as raised:
        check_fields("Responses", "proxy", {"input": "a", "previous_response_id": "r1"})
    assert raised.value.param == "previous_response_id"
    with pytest.raises(RefusedError, match="^verbosityy is no field of chat completions that is known here; leave it out") as raised:
        check_fields("chat completions", "engine", {"verbosityy": 1})
    assert raised.value.param == "verbosityy"
    with pytest.raises(RefusedError, match="^text.verbosity is not honoured by this service, got low") as raised:
        check_fields("Responses", "service", {"text": {"verbosity": "low"}})
    assert raised.value.param == "text.verbosity"
    with pytest.raises(RefusedError, match="stream_options.usage is no field"):
        check_fields("completions", "engine", {"stream_options": {"usage": True}})


def test_null_and_neutral_values_are_taken_where_a_field_is_refused() -> None:
    for api, fields in FIELDS.items():
        for surface in SURFACES:
            for name, field in fields.items():
                if "." in name and fields[name.partition(".")[0]].use(surface) == "refused":
                    continue
                outer, _, inner = name.partition(".")
                for value in (None, *field.neutral):
                    check_fields(api, surface, {outer: {inner: value}} if inner else {outer: value})


def test_a_number_is_no_truth_value() -> None:
    with pytest.raises(RefusedError, match="echo is not honoured by this engine, got 0"):
        check_fields("chat completions", "engine", {"echo": 0})
