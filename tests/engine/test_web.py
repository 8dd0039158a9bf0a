"""Who may ask an engine, and how it answers; the server's tests ask it over HTTP."""

import json

import pytest
from starlette.requests import Request

from offbeat.chat.anthropic import Anthropic
from offbeat.engine.web import error_answer, refusal


def asked(method: str = "POST", **headers: str) -> Request:
    named = {"host": "127.0.0.1:1", **{name.replace("_", "-"): value for name, value in headers.items()}}
    return Request({"type": "http", "method": method, "path": "/", "headers": [(k.encode(), v.encode()) for k, v in named.items()]})


@pytest.mark.parametrize(("http", "status"), [
    (asked(), None), (asked(host="localhost"), None), (asked(host="evil.example"), 403), (asked(origin="https://evil.example"), 403),
    (asked(content_type="text/plain"), 415), (asked("GET", content_type="text/plain"), None)])
def test_without_a_key_only_programs_of_this_machine_may_ask(http, status) -> None:
    refused = refusal(http, "")
    assert (refused and refused[1]) == status


@pytest.mark.parametrize(("http", "allowed"), [
    (asked(authorization="Bearer k"), True), (asked(authorization="bearer k"), True),
    (asked(x_api_key="k"), True), (asked(), False), (asked(authorization="k"), False),
    (asked(authorization="Bearer x", x_api_key="k"), False), (asked(host="evil.example", authorization="Bearer k"), True)])
def test_with_a_key_only_its_holders_may_ask(http, allowed) -> None:
    refused = refusal(http, "k")
    assert refused is None if allowed else refused is not None and refused[1] == 401


def test_an_error_is_written_as_its_endpoint_writes_errors() -> None:
    response = error_answer("no", status=404, write=Anthropic().error, headers={"Retry-After": "1"})
    assert response.status_code == 404 and response.headers["retry-after"] == "1"
    assert json.loads(bytes(response.body))["error"] == {"type": "not_found_error", "message": "no"}
    assert json.loads(bytes(error_answer("no", status=500).body))["error"]["type"] == "server_error"
