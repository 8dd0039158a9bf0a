"""Names of the models that an engine serves: its own and those of its adapters. Used by `server` and its endpoints."""

import time
from pathlib import Path
from typing import Any

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from offbeat.chat.dialects import list_models, model_entry
from offbeat.chat.refusals import json_response
from offbeat.engine.adapters import MAX_NAME, UnknownAdapterError
from offbeat.engine.engine import EmbeddedEngine
from offbeat.engine.web import Handler

_MAX_NAMES = 8
"""Number of adapters named in the error for an unknown model."""


class ServedModels:
    """The model of an engine and its adapters, by name.

    Attributes:
        own_name: the model's own, that of its folder.
        started: time of the start in seconds since 1970, the `created` of all of them.
    """

    def __init__(self, engine: EmbeddedEngine, *, folder: str) -> None:
        self.own_name = Path(folder).name
        self.started = time.time()
        self._engine = engine
        self._folder = folder

    def routes(self) -> list[tuple[str, str, Handler]]:
        """Return method, path and handler of each endpoint."""
        return [("GET", "/v1/models", self._list), ("GET", "/v1/models/{name:path}", self._describe)]

    def adapter_of(self, model: str) -> str:
        """Return the adapter that a request's `model` names; empty for the base model, which its folder's name, its path and "" name.

        Raises UnknownAdapterError if nothing here has that name.
        """
        if model in ("", self.own_name, self._folder):
            return ""
        if model not in (names := self._engine.adapters.names) and "@" not in model:  # the engine says which adapters are gone
            served = ", ".join(map(repr, [self.own_name, *sorted(names)[:_MAX_NAMES]]))
            raise UnknownAdapterError(
                f"no model is called {model[:MAX_NAME]!r} here; this engine serves {served}; leave model out for the first")
        return model

    async def _list(self, _: HttpRequest) -> Response:
        models = self._entries()
        return json_response(list_models(dict.fromkeys(models, self.started), models))

    async def _describe(self, http: HttpRequest) -> Response:
        name = self.adapter_of(http.path_params["name"]) or self.own_name
        if (more := self._entries().get(name)) is None:
            raise UnknownAdapterError(f"no model is called {name[:MAX_NAME]!r} here; GET /v1/models lists them")
        return json_response(msgspec.json.encode({**model_entry(name, self.started), **more}))

    def _entries(self) -> dict[str, dict[str, Any]]:
        """Fields of each model's entry besides its name: the model itself first, then the loaded adapters."""
        size = {"max_model_len": self._engine.max_context}
        adapters = {name: {**size, "parent": self.own_name, "root": folder} for name, folder in self._engine.adapters.folders.items()}
        return {self.own_name: size, **adapters}
