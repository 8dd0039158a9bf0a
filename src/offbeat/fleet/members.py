"""One engine's standing in the pool, and its control while it is in service."""

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeVar

from offbeat.errors import EngineError
from offbeat.inference.client import EngineClient
from offbeat.types import Version
from offbeat.weights.protocol import Interrupt, Manifest, Proof

T = TypeVar("T")


class State(Enum):
    """Whether an engine is asked to generate."""

    UNPROVEN = "has no proven version yet"
    SERVING = "serving"
    QUARANTINED = "quarantined"
    HEALING = "healing"


@dataclass
class Member:
    """One engine's standing.

    Attributes:
        version: of the whole weights, as last proven.
        reason: why it does not serve.
        stint: one stretch of service; set when a quarantine ends it, and replaced when the engine returns.
        news: set, and replaced, at each proof.
    """

    client: EngineClient
    state: State = State.UNPROVEN
    version: Version | None = None
    reason: str = ""
    outstanding_tokens: int = 0
    busy_since_s: float = 0.0
    stint: asyncio.Event = field(default_factory=asyncio.Event)
    news: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def out(self) -> bool:
        """Whether the engine is out of service, and must not be trusted."""
        return self.state in (State.QUARANTINED, State.HEALING)

    @property
    def healthy(self) -> bool:
        """Whether the engine is in service, with a proven version or none yet."""
        return self.state in (State.UNPROVEN, State.SERVING)

    def tell_version(self) -> None:
        """Wake all who wait for a proof of this engine."""
        self.news.set()
        self.news = asyncio.Event()

    async def while_in_service(self, work: Coroutine[Any, Any, T]) -> T:
        """Return what `work` gives, unless a quarantine of the engine ends it first.

        Raises:
            EngineError: the engine is or was quarantined.
        """
        stint = self.stint
        task, ended = asyncio.ensure_future(work), asyncio.ensure_future(stint.wait())
        try:
            if not stint.is_set():
                await asyncio.wait({task, ended}, return_when=asyncio.FIRST_COMPLETED)
            if not stint.is_set():
                return task.result()
            raise EngineError(f"{self.client.name} was quarantined while it answered: {self.reason}")
        finally:
            ended.cancel()
            if not task.cancel() and not task.cancelled():
                task.exception()  # looked at: a late failure of an engine that is out is no news


@dataclass(frozen=True)
class Guarded:
    """An engine in service, for publishers: what is asked of it ends with its service, before any deadline of its own."""

    member: Member

    @property
    def name(self) -> str:
        return self.member.client.name

    async def stage(self, manifest: Manifest, *, timeout_s: float) -> None:
        await self.member.while_in_service(self.member.client.stage(manifest, timeout_s=timeout_s))

    async def switch(self, manifest: Manifest, *, interrupt: Interrupt, timeout_s: float) -> None:
        await self.member.while_in_service(self.member.client.switch(manifest, interrupt=interrupt, timeout_s=timeout_s))

    async def prove(self, canary: tuple[int, ...], *, timeout_s: float, adapter: str = "") -> Proof:
        return await self.member.while_in_service(self.member.client.prove(canary, timeout_s=timeout_s, adapter=adapter))

    async def load_adapter(self, name: str, folder: str, *, timeout_s: float) -> None:
        await self.member.while_in_service(self.member.client.load_adapter(name, folder, timeout_s=timeout_s))

    async def unload_adapter(self, name: str, *, timeout_s: float) -> None:
        await self.member.while_in_service(self.member.client.unload_adapter(name, timeout_s=timeout_s))
