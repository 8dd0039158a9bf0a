"""An environment behind an openenv server, which has to allow as many sessions as there are episodes at the same time."""

import json
from typing import Any

from openenv import GenericEnvClient  # pyright: ignore[reportMissingImports]

from offbeat.data.row import Row


class OpenEnv:
    """One session of a server.

    The model's text is the action's field `text_field`; with `text_field = ""`, it has to be the whole action as JSON. The model sees the
    observation's field `shown_field`, or the whole observation as JSON.
    """

    def __init__(self, url: str, *, text_field: str = "message", shown_field: str = "") -> None:
        self._client: Any = GenericEnvClient(base_url=url)
        self._text_field = text_field
        self._shown_field = shown_field
        self._entered = False

    async def reset(self, row: Row, seed: int) -> str:  # noqa: ARG002 - a server knows its tasks
        await self._client.__aenter__()
        self._entered = True
        return self._shown(await self._client.reset(seed=seed))

    async def step(self, text: str) -> tuple[str, float, bool]:
        try:
            action = {self._text_field: text} if self._text_field else json.loads(text)
        except ValueError:
            return "Error: an action has to be a JSON object", 0.0, False
        result = await self._client.step(action)
        return self._shown(result), float(result.reward or 0.0), bool(result.done)

    async def close(self) -> None:
        if self._entered:
            await self._client.__aexit__(None, None, None)

    def _shown(self, result: Any) -> str:
        observation = result.observation
        if isinstance(observation, dict) and self._shown_field:
            observation = observation.get(self._shown_field, "")
        return observation if isinstance(observation, str) else json.dumps(observation, default=str)
