"""The interface that every dialect implements, and the connection that it uses."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

from offbeat.inference.hearing import Hearing
from offbeat.inference.sampling import PromptScore, Sample, Sampling, ScoreRequest
from offbeat.weights.protocol import Interrupt, Manifest, Proof

T = TypeVar("T")


class Wire(Protocol):
    """One engine's HTTP connection; `offbeat.inference.client.EngineClient` implements it."""

    @property
    def name(self) -> str: ...

    async def call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return the answer's JSON object; {} for an empty body or one that is not an object.

        Raises:
            RefusedError, BusyError, EngineError: the engine refused, is busy, failed or cannot be reached.
        """
        ...

    async def fetch(self, path: str, body: Mapping[str, Any], read: Callable[[bytes], T]) -> T:
        """POST the body, and return the result of `read` on the answer's bytes; it is called on a thread if they are many.

        Raises:
            RefusedError, BusyError, EngineError: as `call`; also where `read` says that the answer is not JSON.
        """
        ...


class Dialect(Protocol):
    """The requests and answers of one kind of engine. Deadlines are set by the caller. All methods raise the errors of `Wire.call`."""

    async def check(self, wire: Wire) -> None:
        """Return if the engine is ready and meets this dialect's requirements; else EngineError says what it lacks, and how to fix it."""
        ...

    async def generate(self, wire: Wire, prompt: tuple[int, ...], sampling: Sampling, *, n: int, adapter: str) -> list[Sample]:
        """Generate n complete continuations with the adapter of that name, or with the base model where it is empty.

        Raises:
            RefusedError: the engine does not support these settings, or cannot report the numbers requested of the samples.
        """
        ...

    async def hear_running(self, wire: Wire, hearings: Mapping[str, Hearing]) -> None:
        """Bring the samples of running requests up to date, by the requests' names. Raises RefusedError if the engine cannot tell them."""
        ...

    async def score(self, wire: Wire, request: ScoreRequest, *, adapter: str) -> PromptScore:
        """Score tokens with the adapter, or the base model if it is ""; raises RefusedError if the engine cannot report what is asked."""
        ...

    async def stage(self, wire: Wire, manifest: Manifest) -> None:
        """Load a version of the whole weights beside the one being served, as far as the engine can."""
        ...

    async def switch(self, wire: Wire, manifest: Manifest, interrupt: Interrupt) -> None:
        """Serve a staged version from the next decode step on; cached prefixes of the old version are never used again."""
        ...

    async def prove(self, wire: Wire, canary: tuple[int, ...], *, adapter: str) -> Proof:
        """Prove which weights the engine samples from now: the whole weights, or the adapter of that name."""
        ...

    async def sleep(self, wire: Wire, *, keep_weights: bool) -> None:
        """Free the memory of the cache and of the weights, until the next `switch`, or with `keep_weights` until `wake`; requests wait.

        Raises RefusedError if the engine cannot sleep.
        """
        ...

    async def wake(self, wire: Wire) -> None:
        """Bring back the weights that `sleep` has kept, and go on; an engine that is awake is no error."""
        ...

    async def load_adapter(self, wire: Wire, name: str, folder: str) -> None:
        """Load a PEFT folder under a new name; loading the same folder under the same name again changes nothing."""
        ...

    async def unload_adapter(self, wire: Wire, name: str) -> None:
        """Unload an adapter; requests in flight finish with it. An unknown name is no error."""
        ...

    async def adapters(self, wire: Wire) -> dict[str, str]:
        """Folders of the adapters that the engine holds, by name; empty where the engine does not report them."""
        ...

    async def health(self, wire: Wire) -> dict[str, Any]:
        """Return the engine's report about itself, with "version" where it knows one; raises unless the engine serves requests.

        "paused" is true, or the pausing client's name, where the engine samples nothing although no publisher of this run is working on it.
        """
        ...

    async def resume(self, wire: Wire) -> None:
        """End a pause that `health` reports."""
        ...
