"""Answers as clients read them."""

import asyncio

from offbeat.errors import StorageError
from offbeat.service.app.reply import accepted, answer, explain, payload, refusal
from offbeat.service.errors import FailedError, OverLimitError, UnknownError
from offbeat.service.types import Payload


def test_answers_are_json_and_payloads_go_as_they_are() -> None:
    assert (answer({"a": [1]}).body, answer({}).headers["content-type"]) == (b'{"a":[1]}', "application/json")
    assert accepted("m:1", model_id="m").body == b'{"request_id":"m:1","model_id":"m"}'
    refused = refusal("too much", status=429)
    assert (refused.status_code, refused.body) == (429, b'{"detail":"too much"}')
    given = payload(Payload("application/x-protobuf", b"\x01"))
    assert (given.body, given.headers["content-type"]) == (b"\x01", "application/x-protobuf")


def test_what_clients_are_told_of_an_error_says_nothing_of_the_server() -> None:
    later = explain(OverLimitError("the queue is full", retry_after_s=2.5), "POST /v1/messages")
    assert (later.sentence, later.status, later.headers) == ("the queue is full", 429, {"retry-after": "2.5"})
    assert explain(UnknownError("no such thing"), "").status == 404 and explain(FailedError("send it again"), "").status == 503
    for exc in (StorageError("/secret is full"), KeyError("secret"), asyncio.CancelledError("secret")):
        told = explain(exc, "POST /v1/messages")
        assert told.status >= 500 and "secret" not in told.sentence
