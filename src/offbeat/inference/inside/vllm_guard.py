"""The key of a vLLM server, wanted for every path. Used by `vllm_inside`, beside it in vLLM's API server.

By itself vLLM asks for VLLM_API_KEY below /v1 and a few other paths; what is elsewhere, /invocations among it, generates for everybody.
"""

import hmac
from collections.abc import Callable
from typing import Any

from starlette.responses import JSONResponse

_REFUSAL = "this engine wants its key; send it as 'Authorization: Bearer KEY'"


def may_enter(scope: Any, key: str) -> bool:
    """Whether an HTTP request or a web socket carries the key; without one, everybody may."""
    given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
    return not key or hmac.compare_digest(given, f"Bearer {key}".encode())


async def refuse(scope: Any, receive: Callable[..., Any], send: Callable[..., Any]) -> None:
    """Answer what may not enter."""
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008})
    else:
        await JSONResponse({"error": {"message": _REFUSAL, "code": 401}}, status_code=401)(scope, receive, send)
