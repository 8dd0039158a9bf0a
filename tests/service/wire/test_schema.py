"""The table has the fields of the public client's messages, with their numbers and types."""

from offbeat.service.wire.schema import SCHEMA
from wire_golden import GOLDEN

# As protocol buffers number them: TYPE_DOUBLE and so on; 11 is a message, 14 an enum.
TYPES = {"double": {1}, "int64": {3}, "int32": {5, 14}, "bool": {8}, "string": {9}, "bytes": {12}, "uint32": {13}}
UNREAD = {("Chunk", "dmel"), ("ImageChunk", "override_dimensions")}  # messages, whose bytes are enough to refuse them


def test_every_field_is_one_of_the_clients() -> None:
    for message, fields in SCHEMA.items():
        if message.startswith("entry of "):
            continue
        theirs = {number: (name, kind, repeated) for number, name, kind, repeated in GOLDEN["schema"][message]}
        for number, field in fields.items():
            name, kind, repeated = theirs[number]
            assert (field.name, field.form != "one") == (name, repeated)
            assert kind in TYPES.get(field.kind, {11}) or (message, name) in UNREAD, f"{message}.{name}"


def test_every_message_that_is_named_is_there() -> None:
    kinds = {field.kind for fields in SCHEMA.values() for field in fields.values()}
    assert kinds - SCHEMA.keys() == TYPES.keys()


def test_only_spans_and_dimensions_of_images_are_left_out() -> None:
    ours = {(message, field.name) for message, fields in SCHEMA.items() for field in fields.values()}
    theirs = {(message, name) for message, fields in GOLDEN["schema"].items() if not message.endswith("Entry") for _, name, *_ in fields}
    left_out = {message for message, _ in theirs - ours} - {"ImageDimensions", "DmelChunk"}
    assert left_out == {"Datum", "ProvenanceSpan", "PromptProvenanceSpan", "SampledProvenanceSpan"}
