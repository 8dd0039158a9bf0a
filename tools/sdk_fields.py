#!/usr/bin/env python3
"""List the fields that the request types of the SDKs have, as tests/chat/sdk_fields.json. Run by a Python that has openai and anthropic."""

import importlib.metadata
import json
import sys
from pathlib import Path

from anthropic.types import beta, message_count_tokens_params, message_create_params
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat
from openai.types.responses import response_create_params as responses

PAGE = Path(__file__).parents[1] / "tests" / "chat" / "sdk_fields.json"
TYPES = {
    "chat completions": (chat.CompletionCreateParamsNonStreaming, chat.CompletionCreateParamsStreaming),
    "completions": (
        completion_create_params.CompletionCreateParamsNonStreaming, completion_create_params.CompletionCreateParamsStreaming),
    "Responses": (responses.ResponseCreateParamsNonStreaming, responses.ResponseCreateParamsStreaming),
    "Messages": (
        message_create_params.MessageCreateParamsNonStreaming, message_create_params.MessageCreateParamsStreaming,
        message_count_tokens_params.MessageCountTokensParams, beta.message_create_params.MessageCreateParamsNonStreaming),
}


def listed() -> dict:
    """Return the names of fields by API, and the versions of the SDKs."""
    versions = {name: importlib.metadata.version(name) for name in ("openai", "anthropic")}
    names = {
        api: sorted({name for kind in kinds for name in (*kind.__required_keys__, *kind.__optional_keys__)})
        for api, kinds in TYPES.items()}
    return {"versions": versions, "fields": names}


if __name__ == "__main__":
    text = json.dumps(listed(), indent=1) + "\n"
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(text)
    else:
        print(text)
