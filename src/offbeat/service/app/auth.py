"""Who asks: API keys for clients, and this machine alone for those who look at the server. Called by `app` before a handler runs."""

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from offbeat.hosts import is_loopback
from offbeat.service.app.reply import refusal
from offbeat.service.errors import UnknownError, UnknownKeyError
from offbeat.service.keys import Keys
from offbeat.service.types import Caller

_HEADER = "x-api-key"


def authenticate(http: Request, keys: Keys) -> Caller:
    """The owner of the request's key.

    Raises:
        UnknownKeyError: there is no key, or nobody knows it.
    """
    key = http.headers.get(_HEADER)
    if not key:
        raise UnknownKeyError("this server wants an API key; set TINKER_API_KEY, or send the key as X-API-Key")
    return keys.caller(key)


def demand_local(http: Request) -> None:
    """Let only this machine pass.

    Raises:
        UnknownError: the request comes from another one.
    """
    if not is_loopback(http.client.host if http.client else ""):
        raise UnknownError("the status of this server is shown to its own machine only; start it with --public-status to change that")


class LocalNames:
    """Middleware that refuses requests to any other name than this machine's own.

    Where any key will do, a page from elsewhere could ask for everything: its host's name need only come to mean this machine, for then a
    browser takes the two for one site.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        if scope["type"] == "http" and not is_loopback(name := Request(scope).url.hostname or ""):
            app = refusal(
                f"this server takes any key, and so answers to 127.0.0.1 and localhost only, not to {name[:80]!r}; start it with --keys to "
                "change that", status=403)
        await app(scope, receive, send)
