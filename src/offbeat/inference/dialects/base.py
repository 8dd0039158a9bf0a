"""What every dialect can say, and the wire that it says it over."""

from collections.abc import Mapping
from typing import Any, Protocol

from offbeat.inference.sampling import PromptScore, Sample, Sampling, ScoreRequest
from offbeat.weights.protocol import Interrupt, Manifest, Proof


class Wire(Protocol):
    """One engine's HTTP connection; `offbeat.inference.client.EngineClient` implements it.

    Attributes:
        name: the engine's, for messages.
    """

    @property
    def name(self) -> str: ...

    async def call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The answer's JSON object; {} for an empty body or one that is not an object.

        Raises:
            RefusedError, BusyError, EngineError: the engine refused, is busy, failed or cannot be reached.
        """
        ...


class Dialect(Protocol):
    """How one kind of engine is spoken to. Deadlines are the caller's. All methods raise as `Wire.call`."""

    async def check(self, wire: Wire) -> None:
        """Return if the engine is ready and offers what this dialect needs.

        Raises:
            EngineError: it is not ready, or lacks an interface; says which and what to do.
        """
        ...

    async def generate(self, wire: Wire, prompt: tuple[int, ...], sampling: Sampling, *, n: int, adapter: str) -> list[Sample]:
        """n whole continuations, by the adapter of that name, or by the base model where it is empty.

        Raises:
            RefusedError: the engine cannot sample so, or cannot tell what is wanted of the samples.
        """
        ...

    async def score(self, wire: Wire, request: ScoreRequest, *, adapter: str) -> PromptScore:
        """What the adapter of that name, or the base model, says of given tokens.

        Raises:
            RefusedError: the engine cannot tell what is wanted.
        """
        ...

    async def stage(self, wire: Wire, manifest: Manifest) -> None:
        """Load a version of the whole weights beside the one that is served, as far as the engine can."""
        ...

    async def switch(self, wire: Wire, manifest: Manifest, interrupt: Interrupt) -> None:
        """Serve a staged version from the next decode step on; no cached prefix of the old one is used again."""
        ...

    async def prove(self, wire: Wire, canary: tuple[int, ...], *, adapter: str) -> Proof:
        """What the engine samples from now: the whole weights, or the adapter of that name."""
        ...

    async def load_adapter(self, wire: Wire, name: str, folder: str) -> None:
        """Load a PEFT folder under a new name; the same name and folder again is no change."""
        ...

    async def unload_adapter(self, wire: Wire, name: str) -> None:
        """Forget an adapter; requests in flight finish with it. An unknown name is no error."""
        ...

    async def adapters(self, wire: Wire) -> dict[str, str]:
        """Folders of the adapters that the engine holds, by name; empty where it does not say."""
        ...

    async def health(self, wire: Wire) -> dict[str, Any]:
        """Raises unless the engine serves; what it says of itself, with "version" where it knows one.

        "paused" is true, or says who has done that, where it samples nothing although no publisher of ours is at work on it.
        """
        ...

    async def resume(self, wire: Wire) -> None:
        """End a pause that `health` tells of."""
        ...
