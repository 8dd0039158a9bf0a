"""The first message to a process of user code, and the set-up of that process before any user code runs in it."""

import resource
from dataclasses import dataclass

import msgspec

from offbeat.user_code.given import Given, receive


@dataclass(frozen=True)
class Handshake:
    """Argument of a process's first call, `load`.

    Attributes:
        load: the role's own request, such as an encoded `RewardLoadRequest`.
        memory_bytes: memory limit of the process; 0 for none.
        given: functions and classes that a Python program gave as objects.
    """

    load: bytes
    memory_bytes: int = 0
    given: tuple[Given, ...] = ()

    def pack(self) -> bytes:
        """Encode as MessagePack."""
        return msgspec.msgpack.encode(self)


def enter(payload: bytes) -> Handshake:
    """Set the memory limit of this process, and receive the functions that were given as objects, from the bytes of `Handshake.pack`.

    Raises CodeError if a function cannot be loaded here.
    """
    handshake = msgspec.msgpack.decode(payload, type=Handshake)
    if handshake.memory_bytes:
        resource.setrlimit(resource.RLIMIT_DATA, (handshake.memory_bytes, handshake.memory_bytes))
    receive(handshake.given)
    return handshake
