"""Listening sockets."""

import socket

import pytest

from offbeat.errors import PortBusyError
from offbeat.listening import bind


def test_a_port_that_is_taken_is_told() -> None:
    with bind("127.0.0.1", 0, who="the engine") as listener:
        listener.listen()
        with pytest.raises(PortBusyError, match="the engine cannot listen on .* choose another port"):
            bind("127.0.0.1", listener.getsockname()[1], who="the engine")


def test_answers_do_not_wait_for_more_to_send() -> None:
    with bind("127.0.0.1", 0, who="the engine") as listener:
        assert listener.proto == socket.IPPROTO_TCP  # by which asyncio knows that it may turn Nagle's algorithm off
