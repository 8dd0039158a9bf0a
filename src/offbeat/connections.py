"""Bounds connections before the client is known: their number, bytes and times. Used by `listening`.

uvicorn with its fast parser bounds none of this. Bounded here are: connections, in total and per address; bytes, fields and time of a
request's head; requests sent before earlier ones are answered; the rest of a body whose request was answered without reading it; and
answers that are not fetched. Bodies that are read have their own bounds (`listening.read_body`, and `Bodies` of the service).

    Connections.sweep   consumes deadlines of connections; closes those that passed them; called every second by the server's tick
"""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address
from typing import Any, Protocol

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

IsExempt = Callable[[str], bool]
"""Whether an address, such as "127.0.0.1", is exempt from a bound."""

_REASONS = {400: "Bad Request", 408: "Request Timeout", 431: "Request Header Fields Too Large", 503: "Service Unavailable"}


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Bounds of connections.

    Attributes:
        connections: number of connections at a time; the oldest idle one gives way to a new one.
        of_address: number of connections of one address; this machine's own is exempt, as a proxy on it acts for many clients.
        head_bytes, head_fields: size of the request line and header; SDK clients send about 1 KB in 25 fields.
        head_s: time from the first byte of a connection or request to the end of its head.
        pipelined: requests that wait for the answer of another on the same connection; hardly any client sends one.
        unread_s: time for the rest of a body whose request is answered, so that the client reads the answer before the connection ends.
        unfetched_s: time without progress while an answer waits to be fetched.
    """

    connections: int = 8192
    of_address: int = 1024
    head_bytes: int = 32768
    head_fields: int = 128
    head_s: float = 10.0
    pipelined: int = 4
    unread_s: float = 3.0
    unfetched_s: float = 60.0


class WriteRefusal(Protocol):
    """Writes the body of an error."""

    def __call__(self, message: str, *, status: int) -> bytes: ...


class Connection(Protocol):
    """The part of a connection that `Connections` needs."""

    address: str

    def close_idle(self) -> None:
        """Close the connection because another one needs its place."""
        ...

    def check(self, now: float) -> None:
        """Close the connection if it has passed a deadline."""
        ...


def write_detail(message: str, *, status: int, param: str = "") -> bytes:  # noqa: ARG001
    """Write the body of a refusal as `{"detail": message}`, which the SDK of the service expects."""
    return msgspec.json.encode({"detail": message})


class Connections:
    """All open connections of a server. For one event loop."""

    def __init__(self, bounds: Bounds, *, is_exempt: IsExempt = lambda _: False, write_error: WriteRefusal = write_detail) -> None:
        """`is_exempt` says whether an address may have any number of connections; `write_error` writes the body of a refusal."""
        self.bounds = bounds
        self.write_error = write_error
        self._is_exempt = is_exempt
        self._open: dict[Connection, None] = {}
        self._idle: dict[Connection, None] = {}
        self._of_address: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._open)

    def admit(self, connection: Connection) -> bool:
        """Whether a new connection may stay; the oldest idle connection makes room for it."""
        bounds, address = self.bounds, connection.address
        if not self._is_exempt(address) and self._of_address[address] >= bounds.of_address and not self._free(address):
            return False
        if len(self._open) >= bounds.connections and not self._free(None):
            return False
        self._open[connection] = None
        self._of_address[address] += 1
        self.idle(connection)
        return True

    def idle(self, connection: Connection) -> None:
        """Note that a connection waits for its client, with no request under way."""
        if connection in self._open:
            self._idle.pop(connection, None)
            self._idle[connection] = None

    def busy(self, connection: Connection) -> None:
        """Note that a connection has received a complete head."""
        self._idle.pop(connection, None)

    def leave(self, connection: Connection) -> None:
        """Note that a connection is closed or about to be; may be called more than once."""
        self._idle.pop(connection, None)
        if connection in self._open:
            del self._open[connection]
            self._of_address[connection.address] -= 1
            if not self._of_address[connection.address]:
                del self._of_address[connection.address]

    def sweep(self) -> None:
        """Close the connections that have passed a deadline."""
        now = time.monotonic()
        for connection in tuple(self._open):
            connection.check(now)

    def _free(self, address: str | None) -> bool:
        """Close the oldest idle connection, of an address if one is given. Returns whether there was one."""
        oldest = next((other for other in self._idle if address in (None, other.address)), None)
        if oldest is not None:
            self.leave(oldest)
            oldest.close_idle()
        return oldest is not None


class _Refused(Exception):  # noqa: N818 (it never leaves this module)
    """Stops the parsing of a request."""


class GuardedProtocol(HttpToolsProtocol):
    """uvicorn's protocol within bounds, as a `Connection`.

    Everything received since the parser last passed something on (a complete head, a piece of a body, an end) counts as held by it, which
    bounds trailers and the like, too.
    """

    def __init__(self, *args: Any, connections: Connections, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.address = ""
        self._connections = connections
        self._bounds = connections.bounds
        self._refusal: tuple[int, str] = 400, "this is not a request of HTTP/1.1"
        self._ended = False
        self._in_head = self._in_body = False
        self._held_bytes = self._head_bytes = self._head_fields = 0
        self._deadline: float | None = None
        self._unsent_bytes, self._unsent_deadline, self._drained = 0, 0.0, False

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.address = address_of(self.client[0] if self.client else "")
        self._deadline = time.monotonic() + self._bounds.head_s
        if not self._connections.admit(self):
            self._refuse(503, "this server has as many connections as it can hold; try again later")

    def connection_lost(self, exc: Exception | None) -> None:
        self._ended = True
        self._connections.leave(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._ended:
            return
        begins, self._held_bytes = self._held_bytes == 0, self._held_bytes + len(data)
        super().data_received(data)
        if self._held_bytes > self._bounds.head_bytes:
            self._refuse_head()
        elif begins and self._held_bytes and not (self._in_body or self._is_answering):
            self._deadline = time.monotonic() + self._bounds.head_s

    def resume_writing(self) -> None:
        self._drained = True
        super().resume_writing()

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def close_idle(self) -> None:
        self._ended = True
        self.transport.close()

    def check(self, now: float) -> None:
        self._check_unsent(now)
        if self._deadline is None or now < self._deadline or self._is_answering:
            return
        if self._in_body or not self._in_head:  # its request was answered, or it never sent one
            self.transport.abort()
        else:
            self._refuse(408, f"the head of a request did not arrive within {self._bounds.head_s:g} s")

    def _check_unsent(self, now: float) -> None:
        unsent = self.transport.get_write_buffer_size()
        if not self._unsent_bytes or self._drained or unsent < self._unsent_bytes:
            self._unsent_deadline = now + self._bounds.unfetched_s
        elif unsent and now > self._unsent_deadline:
            self.transport.abort()
        self._unsent_bytes, self._drained = unsent, False

    def _refuse(self, status: int, sentence: str) -> None:
        """Answer like the server's other refusals, unless an answer is already on its way, and close the connection."""
        if self._ended:
            return
        self._ended = True
        if not (self._is_answering and self.cycle.response_started):
            body = self._connections.write_error(sentence, status=status)
            self.transport.write(
                b"HTTP/1.1 %d %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%s"
                % (status, _REASONS[status].encode(), len(body), body))
        self.transport.close()

    def _refuse_head(self) -> None:
        self._refuse(431, f"the head of a request may have {self._bounds.head_bytes} bytes and {self._bounds.head_fields} fields")

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002 (uvicorn's own words)
        """Answer when parsing ends in an error, which is either one of our refusals or input that is not HTTP."""
        self._refuse(*self._refusal)

    def on_message_begin(self) -> None:
        self._head_bytes = self._head_fields = 0
        self._in_head = True
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """Called by httptools with a piece of the URL."""
        self._add_to_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_body:
            return  # a trailer, which nobody reads and which must not be taken for a header field
        self._head_fields += 1
        self._add_to_head(len(name) + len(value))
        super().on_header(name, value)

    def _add_to_head(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > self._bounds.head_bytes or self._head_fields > self._bounds.head_fields:
            self._refuse_head()
            raise _Refused

    def on_headers_complete(self) -> None:
        if len(self.pipeline) >= self._bounds.pipelined:
            self._refuse(400, f"at most {self._bounds.pipelined} requests may wait for the answer of another; wait for answers")
            raise _Refused
        self._held_bytes, self._in_head, self._in_body, self._deadline = 0, False, True, None
        self._connections.busy(self)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Called by httptools with a piece of the body."""
        self._held_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._held_bytes, self._in_body = 0, False
        if not self._is_answering:  # its arrival has stopped uvicorn's own clock
            self._deadline = time.monotonic() + self.timeout_keep_alive
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Called by uvicorn when the answer is complete."""
        super().on_response_complete()
        if self._is_answering or self.transport.is_closing():
            return  # the next request, which had to wait, is now being answered
        self._connections.idle(self)
        if self._in_body:
            self._deadline = time.monotonic() + self._bounds.unread_s
        elif self._in_head:
            self._deadline = time.monotonic() + self._bounds.head_s


def address_of(host: str) -> str:
    """Return the key by which connections are counted: the IPv4 address, or the /64 network of an IPv6 address, e.g. "2001:db8::/64"."""
    try:
        address = ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, IPv6Address):
        mapped: IPv4Address | None = address.ipv4_mapped
        return str(mapped or (address if address.is_loopback else IPv6Network((address, 64), strict=False)))
    return str(address)
