"""The key of a vLLM server, asked for by an application that stands in for vLLM's."""

import asyncio
from typing import Any

import pytest

PATHS = ("/v1/completions", "/invocations", "/health", "/pause", "/collective_rpc", "/v1/weights/stage", "/tokenize")


def answered(path: str, *headers: tuple[bytes, bytes], kind: str = "http", key: str = "the-key") -> Any:
    """What goes back: the status of a response, or the code with which a web socket is closed; "served" where vLLM would be asked."""
    from vllm_guard import may_enter, refuse  # noqa: PLC0415 (found beside the test, see conftest)

    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    async def main() -> Any:
        scope = {"type": kind, "path": path, "headers": list(headers), "method": "OPTIONS"}
        if may_enter(scope, key):
            return "served"
        await refuse(scope, None, send)
        return sent[0].get("status", sent[0].get("code"))

    return asyncio.run(main())


@pytest.mark.parametrize("path", PATHS)
def test_every_path_wants_the_key(path: str) -> None:
    assert answered(path) == 401
    assert answered(path, (b"authorization", b"Bearer another")) == 401
    assert answered(path, (b"authorization", b"the-key")) == 401
    for scheme in (b"Bearer", b"bearer"):
        assert answered(path, (b"authorization", scheme + b" the-key")) == "served"
    assert answered(path, (b"authorization", b"the-key")) == 401


def test_a_web_socket_wants_it_as_well() -> None:
    assert answered("/v1/realtime", kind="websocket") == 1008


def test_without_a_key_everybody_is_served() -> None:
    assert answered("/v1/completions", key="") == "served"
