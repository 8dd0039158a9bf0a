"""What the parts of the service say to each other cannot be changed by who hears it."""

import inspect
from dataclasses import FrozenInstanceError, fields, is_dataclass

import msgspec
import pytest

from offbeat.service import types
from offbeat.service.types import Caller, EngineStatus, FailedRequest, ModelStatus, OwnerStatus, Pending, QueueStatus, Status

ALL = [kind for _, kind in inspect.getmembers(types, is_dataclass) if kind.__module__ == types.__name__]


@pytest.mark.parametrize("kind", ALL)
def test_every_type_is_frozen(kind: type) -> None:
    made = object.__new__(kind)
    with pytest.raises(FrozenInstanceError):
        setattr(made, fields(kind)[0].name, None)


def test_a_request_that_has_not_ended_is_active_unless_something_is_said() -> None:
    assert Pending() == Pending("active", "") and Caller("alice") == Caller("alice")


def test_the_status_is_the_same_after_json() -> None:
    status = Status(
        "base", trainers_alive=True, trained_tokens=1, sampled_tokens=2, training=QueueStatus(1, 2, 0.5),
        models=(ModelStatus("m", "alice", 8, 3, True, 1.5),), owners=(OwnerStatus("alice", 1, 2, 3),),
        engines=(EngineStatus("engine 0", "serving", ("m@0",), 5),), failures=(FailedRequest(1.0, "m:1", "alice", "why"),))
    assert msgspec.json.decode(msgspec.json.encode(status), type=Status) == status
