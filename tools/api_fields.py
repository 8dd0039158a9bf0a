#!/usr/bin/env python3
"""Write docs/api-fields.md from the table of fields, `offbeat.chat.fields`; a test compares the page with it."""

import json
from pathlib import Path

from offbeat.chat.fields import FIELDS, SURFACES, Field

PAGE = Path(__file__).parents[1] / "docs" / "api-fields.md"
_PATHS = {
    "chat completions": "POST /v1/chat/completions", "completions": "POST /v1/completions", "Responses": "POST /v1/responses",
    "Messages": "POST /v1/messages and /v1/messages/count_tokens"}
_HEAD = """# Fields of requests

What each field of a request does, at [`offbeat engine`](engine.md), at the [proxy of agents in training](recording.md) and at
[`offbeat serve`](service.md#chats-and-completions). `tools/api_fields.py` writes this page from the table by which requests are checked
(`src/offbeat/chat/fields.py`), and tests send each field to each server.

| | |
|---|---|
| acts | honoured |
| harmless | accepted; the answer is the same without it |
| run's | accepted; the setting of the run counts, because the trainer has to know how tokens were drawn |
| refused | status 400 with a sentence and the field's name in `param`, but for null and the neutral values in the last column |
| – | this server does not have the API |

A field that is not listed is refused. A field that is null counts as left out. A name such as `text.format` is a key of an object.
[Recording](recording.md#what-the-endpoints-understand) describes the keys of messages, items and tools; unknown ones are ignored there,
since clients send back what they were answered.
"""
_TOLD = {"acts": "acts", "harmless": "harmless", "run": "run's", "refused": "refused", "": "–"}


def page() -> str:
    """Return the text of the page."""
    parts = [_HEAD]
    for api, fields in FIELDS.items():
        rows = [_row(field) for field in sorted(fields.values(), key=lambda field: field.name)]
        title = api[0].upper() + api[1:]
        parts.append("\n".join([
            f"## {title}\n", f"`{_PATHS[api]}`\n", f"| field | {' | '.join(SURFACES)} | |", "|---|---|---|---|---|", *rows]) + "\n")
    return "\n".join(parts)


def _row(field: Field) -> str:
    notes = [field.note] if field.note else []
    if field.neutral and "refused" in (field.engine, field.proxy, field.service):
        notes.append("neutral: " + ", ".join(f"`{json.dumps(value)}`" for value in field.neutral))
    return f"| `{field.name}` | {' | '.join(_TOLD[field.use(surface)] for surface in SURFACES)} | {'; '.join(notes)} |"


if __name__ == "__main__":
    PAGE.write_text(page())
