"""Every message survives the wire."""

import dataclasses
import inspect

import pytest

from offbeat.cluster import messages
from offbeat.cluster.messages import (
    BuildRequest,
    EngineAddress,
    EngineAddresses,
    EngineStart,
    JoinRequest,
    ServerStart,
    StoreAddress,
)
from offbeat.data import wire
from offbeat.errors import DataError

STORE = StoreAddress("10.0.0.1", 4321)
EXAMPLES = [
    STORE, BuildRequest("folder", "{}", 54, 0, None, 7), JoinRequest(1, 4, STORE, "{}", "folder"),
    JoinRequest(1, 4, STORE, "{}", "folder", many=True), EngineStart("{}"), EngineAddress("http://127.0.0.1:1"),
    EngineAddresses({"engine 0": "http://127.0.0.1:1"}, "the-key"),
    ServerStart(("python", "-m", "server"), {"A": "1"}, "127.0.0.1", 5.0, "the-key"),
]


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_a_message_comes_back_equal(message: object) -> None:
    assert wire.decode(type(message), wire.encode(message)) == message


def test_every_message_is_tested_and_frozen() -> None:
    own = {cls for _, cls in inspect.getmembers(messages, dataclasses.is_dataclass) if cls.__module__ == messages.__name__}
    assert own == {type(example) for example in EXAMPLES}
    assert all(cls.__dataclass_params__.frozen for cls in own)


def test_bytes_of_another_message_are_refused() -> None:
    with pytest.raises(DataError, match="not a JoinRequest"):
        wire.decode(JoinRequest, wire.encode(EngineAddress("x")))
