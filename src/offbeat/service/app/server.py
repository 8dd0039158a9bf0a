"""The listening socket of the service. Used by `service.serve`."""

import socket

from offbeat.listening import bind


def listen(host: str, port: int) -> socket.socket:
    """Return a socket bound to the address; connections are refused until the server is ready.

    Raises:
        PortBusyError: the address cannot be bound.
    """
    return bind(host, port, who="the service", another="another --port")
