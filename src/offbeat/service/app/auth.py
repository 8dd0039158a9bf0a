"""Access control: API keys for clients, and this machine alone for viewers of the status. Called by `app` before a handler runs."""

from collections.abc import Iterable
from ipaddress import ip_address

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from offbeat.hosts import bearer_key, is_loopback
from offbeat.service.app.reply import refusal
from offbeat.service.errors import NameRefusedError, UnknownError, UnknownKeyError
from offbeat.service.keys import Keys
from offbeat.service.types import Caller

_HEADER = "x-api-key"
_FORWARDED = {"forwarded", "x-forwarded-for", "x-forwarded-host", "x-forwarded-proto", "x-real-ip", "via"}
"""Headers that proxies add."""


def authenticate(http: Request, keys: Keys) -> Caller:
    """Return the owner of the request's key; raises UnknownKeyError if the key is missing or unknown."""
    key = http.headers.get(_HEADER) or bearer_key(http.headers.get("authorization", ""))
    if not key:
        raise UnknownKeyError(
            "this server requires an API key; set TINKER_API_KEY, or send the key as X-API-Key or 'Authorization: Bearer KEY'")
    return keys.caller(key)


class HostNames:
    """Host names that this server answers to.

    A foreign web page could read every page without a key if its own host name came to resolve to this machine (DNS rebinding), since a
    browser would then treat both as one site. A literal address such as 127.0.0.1 cannot come to mean another one.
    """

    def __init__(self, allowed: Iterable[str] = (), *, any_address: bool = False) -> None:
        """`allowed` are names in addition to localhost; with `any_address`, addresses other than this machine's own are accepted."""
        self._allowed = {name.lower().rstrip(".") for name in allowed}
        self._any_address = any_address

    def demand(self, http: Request) -> None:
        """Raise NameRefusedError unless a request is addressed to one of the names."""
        name = (_hostname(http) or "").lower().rstrip(".")
        if not (is_loopback(name) or name in self._allowed or (self._any_address and _is_address(name))):
            raise NameRefusedError(
                f"this server answers to 127.0.0.1, localhost and its own names only here, not to {name[:80]!r}; add the name to "
                "serve.allowed_hosts to change that")


LOCAL_NAMES = HostNames()
"""Names of this machine only."""


def demand_local(http: Request, names: HostNames, *, public: bool) -> None:
    """Raise UnknownError for a request of another machine unless `public`, NameRefusedError for one to a name that is not the server's.

    A request that came through a proxy, such as one with an X-Forwarded-For header, never counts as this machine's.
    """
    if not public and (_FORWARDED & set(http.headers.keys()) or not is_loopback(http.client.host if http.client else "")):
        raise UnknownError("the status of this server is shown to its own machine only; start it with --public-status to change that")
    names.demand(http)


class NamesGate:
    """Middleware that refuses requests to other names. Where any key is accepted, foreign web pages could otherwise use the whole API."""

    def __init__(self, app: ASGIApp, *, names: HostNames) -> None:
        self._app = app
        self._names = names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        if scope["type"] == "http":
            try:
                self._names.demand(Request(scope))
            except NameRefusedError as exc:
                app = refusal(f"{exc}, or start it with --keys", status=exc.status)
        await app(scope, receive, send)


def _hostname(http: Request) -> str | None:
    try:
        return http.url.hostname
    except ValueError:  # such as "[::1"
        return None


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True
