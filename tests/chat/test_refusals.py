"""Statuses and forms of errors, which all servers share."""

import asyncio
import json
import logging
from functools import partial

import pytest
from starlette.exceptions import HTTPException
from starlette.requests import Request

from offbeat.chat.anthropic import Anthropic
from offbeat.chat.refusals import Refusal, Refusals, error_response, errors_of, no_such_endpoint
from offbeat.connections import write_detail
from offbeat.errors import BusyError, RefusedError

REFUSALS = Refusals("the engine", {BusyError: 429, RefusedError: 400}, {429: {"Retry-After": "1"}})


def test_the_first_kind_that_fits_gives_the_status_and_its_headers() -> None:
    assert REFUSALS.explain(BusyError("full")) == Refusal("full", 429, {"Retry-After": "1"})
    assert REFUSALS.explain(RefusedError("no", param="n")) == Refusal("no", 400, param="n")


def test_an_unexpected_error_is_logged_and_says_where(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        told = REFUSALS.explain(KeyError("k"))
    assert told == Refusal("unexpected KeyError: 'k'; the engine's log says where", 500)
    assert "a request to the engine failed" in caplog.text and "KeyError" in caplog.text


def test_an_error_is_written_as_its_endpoint_writes_errors() -> None:
    response = error_response(Refusal("no", 404, {"Retry-After": "1"}), Anthropic().error)
    assert response.status_code == 404 and response.headers["retry-after"] == "1"
    assert json.loads(bytes(response.body))["error"] == {"type": "not_found_error", "message": "no"}
    assert json.loads(bytes(error_response(Refusal("no", 500)).body))["error"]["type"] == "server_error"


@pytest.mark.parametrize(("path", "kind"), [
    ("/v1/messages", "anthropic"), ("/sessions/k/v1/messages", "anthropic"), ("/anthropic/api/v1/x", "anthropic"),
    ("/v1/chat/completions", "openai"), ("/oai/api/v1/x", "openai"), ("/api/v1/telemetry", "detail")])
def test_a_path_that_is_not_there_is_answered_in_the_form_of_its_api(path: str, kind: str) -> None:
    http = Request({"type": "http", "method": "GET", "path": path, "headers": [], "query_string": b"", "server": ("h", 1)})
    answer = partial(no_such_endpoint, own=write_detail)
    missing, wrong = (asyncio.run(answer(http, HTTPException(status))) for status in (404, 405))
    told = json.loads(bytes(missing.body))
    form = "detail" if "detail" in told else "anthropic" if told.get("type") == "error" else "openai"
    assert (missing.status_code, form) == (404, kind) and f"this server has no GET {path}".encode() in bytes(missing.body)
    assert wrong.status_code == 405 and f"{path} does not take GET".encode() in bytes(wrong.body)


def test_errors_are_those_of_openai_where_a_server_has_no_form_of_its_own() -> None:
    assert json.loads(errors_of("/pause")("no", status=400))["error"]["message"] == "no"
