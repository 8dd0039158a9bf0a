"""Who may ask an engine, and the statuses of its errors; the server's tests ask it over HTTP."""

import pytest
from starlette.requests import Request

from offbeat.engine.adapters import UnknownAdapterError
from offbeat.engine.web import Disconnected, refusal, refusal_of
from offbeat.errors import BusyError, EngineError, RefusedError


def asked(method: str = "POST", **headers: str) -> Request:
    named = {"host": "127.0.0.1:1", **{name.replace("_", "-"): value for name, value in headers.items()}}
    return Request({"type": "http", "method": method, "path": "/", "headers": [(k.encode(), v.encode()) for k, v in named.items()]})


@pytest.mark.parametrize(("http", "status"), [
    (asked(), None), (asked(host="localhost"), None), (asked(host="evil.example"), 403), (asked(origin="https://evil.example"), 403),
    (asked(content_type="text/plain"), 415), (asked("GET", content_type="text/plain"), None)])
def test_without_a_key_only_programs_of_this_machine_may_ask(http, status) -> None:
    refused = refusal(http, "")
    assert (refused and refused.status) == status


@pytest.mark.parametrize(("http", "allowed"), [
    (asked(authorization="Bearer k"), True), (asked(authorization="bearer k"), True),
    (asked(x_api_key="k"), True), (asked(), False), (asked(authorization="k"), False),
    (asked(authorization="Bearer x", x_api_key="k"), False), (asked(host="evil.example", authorization="Bearer k"), True)])
def test_with_a_key_only_its_holders_may_ask(http, allowed) -> None:
    refused = refusal(http, "k")
    assert refused is None if allowed else refused is not None and refused.status == 401


@pytest.mark.parametrize(("exc", "status", "param"), [
    (BusyError("full"), 429, ""), (UnknownAdapterError("gone"), 404, "model"), (RefusedError("no", param="n"), 400, "n"),
    (EngineError("broken"), 500, ""), (Disconnected(), 499, ""), (KeyError("k"), 500, "")])
def test_each_error_has_its_status(exc: Exception, status: int, param: str) -> None:
    told = refusal_of(exc)
    assert (told.status, told.param) == (status, param)
    assert told.headers == ({"Retry-After": "1"} if status == 429 else {})
