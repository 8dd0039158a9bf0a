"""Answers as clients read them."""

from offbeat.service.app.reply import accepted, answer, payload, refusal
from offbeat.service.types import Payload


def test_answers_are_json_and_payloads_go_as_they_are() -> None:
    assert (answer({"a": [1]}).body, answer({}).headers["content-type"]) == (b'{"a":[1]}', "application/json")
    assert accepted("m:1", model_id="m").body == b'{"request_id":"m:1","model_id":"m"}'
    refused = refusal("too much", status=429, headers={"retry-after": "2"})
    assert (refused.status_code, refused.body, refused.headers["retry-after"]) == (429, b'{"detail":"too much"}', "2")
    given = payload(Payload("application/x-protobuf", b"\x01"))
    assert (given.body, given.headers["content-type"]) == (b"\x01", "application/x-protobuf")
