"""The set-up of a process of user code."""

from offbeat.user_code.functions import resolve
from offbeat.user_code.given import give, pack, withdraw
from offbeat.user_code.handshake import Handshake, enter


def test_the_roles_request_and_functions_that_were_given_as_objects_arrive() -> None:
    factor = 3
    name = give(lambda number: factor * number, kind="rollout.reward")
    try:
        payload = Handshake(b"mine", given=pack([name])).pack()
    finally:
        withdraw([name])
    found = enter(payload)
    try:
        assert (found.load, found.memory_bytes) == (b"mine", 0) and resolve(name, kind="reward")(2) == 6
    finally:
        withdraw([name])
