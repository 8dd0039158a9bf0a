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
    """An engine's standing: only engines that are SERVING, or UNPROVEN where adapters are sampled, get requests."""

    UNPROVEN = "has no proven version yet"
    SERVING = "serving"
    QUARANTINED = "quarantined"
    HEALING = "healing"


@dataclass
class Member:
    """One engine's standing.

    Attributes:
        version: the version of the whole weights that the engine proved last; None before its first proof.
        reason: why the engine is out of service; empty while it is in service.
        outstanding_tokens: tokens of its requests: their prompts, and the most that each may generate.
        busy_since_s: wall-clock time since which it has had requests without a break.
        stint: event of one stretch of service; set when a quarantine ends the stretch, and replaced when the engine returns.
        news: event that is set at each proof, and then replaced.
        held: lock held by a step of its healing, and while the train ranks have its device: no such step begins then.
    """

    client: EngineClient
    state: State = State.UNPROVEN
    version: Version | None = None
    reason: str = ""
    outstanding_tokens: int = 0
    busy_since_s: float = 0.0
    stint: asyncio.Event = field(default_factory=asyncio.Event)
    news: asyncio.Event = field(default_factory=asyncio.Event)
    held: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def out(self) -> bool:
        """Whether the engine is out of service, so that its answers must not be trusted."""
        return self.state in (State.QUARANTINED, State.HEALING)

    @property
    def healthy(self) -> bool:
        """Whether the engine is in service, with a proven version or none yet."""
        return self.state in (State.UNPROVEN, State.SERVING)

    def serves(self, version: Version) -> bool:
        """Whether the engine has proven this version of the whole weights, or a newer one."""
        return self.version is not None and self.version >= version

    def tell_version(self) -> None:
        """Wake every request that waits for this engine to prove a version."""
        self.news.set()
        self.news = asyncio.Event()

    async def while_in_service(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of `work`; raises EngineError if a quarantine of the engine has ended it, or does so first."""
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
                task.exception()  # retrieved, so that asyncio does not report the late failure of an engine that is out anyway


@dataclass(frozen=True)
class Guarded:
    """An `EngineControl` for publishers, whose calls raise EngineError as soon as the engine is quarantined, before their deadlines."""

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
