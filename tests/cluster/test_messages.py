"""Every message survives the wire."""

import dataclasses
import inspect

import numpy as np
import pytest

from offbeat.cluster import messages
from offbeat.cluster.messages import (
    BroadcastRequest,
    BuildRequest,
    EngineAddress,
    EngineAddresses,
    EngineStart,
    ExportRequest,
    Folder,
    JoinRequest,
    Loaded,
    Objective,
    Published,
    PublishRequest,
    ServerStart,
    Shard,
    StoreAddress,
    Trained,
)
from offbeat.data import wire
from offbeat.errors import DataError
from train_samples import make_batch

STORE = StoreAddress("10.0.0.1", 4321)
EXAMPLES = [
    STORE, BuildRequest("folder", "{}", 54, 0, None, 7), JoinRequest(1, 4, STORE, "{}", "folder"), Objective("ppo", 10),
    Trained({"train/loss": 0.1, "train/tokens": 3.0}, 1.5, 2.5, 0.75), PublishRequest(3, "v3", "float32", (1, 2, 3)),
    PublishRequest(3, "v3", "float32", (1, 2, 3), BroadcastRequest("10.0.0.1", 2, 60)), BroadcastRequest("10.0.0.1", 2, 60),
    Published("abc", (-1.25, -2.0)), Published("abc", (-1.25,), "10.0.0.1:99"), Folder("x"),
    ExportRequest("x", "y"), Loaded(12), EngineStart("{}"), EngineAddress("http://127.0.0.1:1"),
    EngineAddresses({"engine 0": "http://127.0.0.1:1"}, "the-key"),
    ServerStart(("python", "-m", "server"), {"A": "1"}, "127.0.0.1", 5.0, "the-key"),
]


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_a_message_comes_back_equal(message: object) -> None:
    assert wire.decode(type(message), wire.encode(message)) == message


def test_a_shard_comes_back_with_its_arrays() -> None:
    shard = Shard(make_batch(2, 2), ((np.array([0, 2]), np.array([1, 3])), (np.array([], np.int64),)))
    back = wire.decode(Shard, wire.encode(shard))
    for field in dataclasses.fields(shard.batch):
        sent, got = (np.asarray(getattr(batch, field.name)) for batch in (shard.batch, back.batch))
        assert sent.dtype == got.dtype
        np.testing.assert_array_equal(sent, got)
    assert [[m.tolist() for m in step] for step in back.minibatches] == [[[0, 2], [1, 3]], [[]]]


def test_every_message_is_tested_and_frozen() -> None:
    own = {cls for _, cls in inspect.getmembers(messages, dataclasses.is_dataclass) if cls.__module__ == messages.__name__}
    assert own == {type(example) for example in EXAMPLES} | {Shard}
    assert all(cls.__dataclass_params__.frozen for cls in own)


def test_bytes_of_another_message_are_refused() -> None:
    with pytest.raises(DataError, match="not a JoinRequest"):
        wire.decode(JoinRequest, wire.encode(Folder("x")))
