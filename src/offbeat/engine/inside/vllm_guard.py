"""Requires a vLLM server's key on every path. Used by `vllm_inside`, beside it in vLLM's API server.

By itself vLLM checks VLLM_API_KEY only below /v1 and on a few other paths; others, such as /invocations, generate for everybody.
"""

import hmac
from collections.abc import Callable
from typing import Any

from starlette.responses import JSONResponse

_REFUSAL = "this engine wants its key; send it as 'Authorization: Bearer KEY'"


def may_enter(scope: Any, key: str) -> bool:
    """Whether an HTTP request or a web socket carries the key; if no key is set, everyone may enter."""
    given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
    scheme, _, own = given.partition(b" ")
    return not key or (scheme.lower() == b"bearer" and hmac.compare_digest(own.strip(), key.encode()))


async def refuse(scope: Any, receive: Callable[..., Any], send: Callable[..., Any]) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008})
    else:
        await JSONResponse({"error": {"message": _REFUSAL, "code": 401}}, status_code=401)(scope, receive, send)
