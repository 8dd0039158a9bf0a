"""Access to the live page: for programs of this machine, or for clients with the key. Wraps the whole application, files included."""

import secrets

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from offbeat.hosts import bearer_key, names_loopback

_HEADERS = {
    # Only the page's own scripts run, never one in a model's text; nothing is loaded from elsewhere, and no other site may frame the page.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:;"
    " base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class AccessGate:
    """Passes requests with the key; if there is no key, requests addressed to this machine, such as to "localhost:8765"."""

    def __init__(self, app: ASGIApp, *, key: str) -> None:
        """`key` is empty where only this machine can reach the server."""
        self._app = app
        self._key = key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        http = Request(scope, receive)
        answer = self._refusal(http)
        await (answer or self._app)(scope, receive, send_with_headers)

    def _refusal(self, http: Request) -> PlainTextResponse | RedirectResponse | None:
        """Return the refusal or redirection of a request, or None if it may reach the application."""
        if not self._key:
            if names_loopback(http.headers.get("host", "")):
                return None
            # A foreign page's own host name may resolve to this machine (DNS rebinding), and a browser would let it read everything.
            return PlainTextResponse("this page has no key, and so answers to 127.0.0.1 and localhost only\n", 403)
        cookie = f"offbeat-watch-{(http.scope.get('server') or ('', 0))[1]}"
        if (given := http.query_params.get("key")) is not None and http.url.path == "/" and self._is_key(given):
            response = RedirectResponse("/", 303)  # so that the key is not left in the address bar
            response.set_cookie(cookie, given, httponly=True, samesite="strict")
            return response
        bearer = bearer_key(http.headers.get("authorization", ""))
        if self._is_key(bearer) or self._is_key(http.cookies.get(cookie, "")):
            return None
        return PlainTextResponse("this page wants its key; open the address that offbeat watch has printed, with ?key=…\n", 401)

    def _is_key(self, given: str) -> bool:
        return secrets.compare_digest(given.encode(), self._key.encode())
