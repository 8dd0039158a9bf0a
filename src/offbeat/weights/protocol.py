"""What a published version is, and what an engine must be able to do with it."""

from dataclasses import dataclass
from typing import Literal, Protocol

from offbeat.types import Version

Interrupt = Literal["recompute", "keep", "drain"]


@dataclass(frozen=True)
class Manifest:
    """One immutable version, as the trainer wrote it.

    Attributes:
        version: optimizer steps published.
        folder: Hugging Face folder that holds the weights; never written again.
        fingerprint: `model.fingerprint` of the tensors as written.
        canary: token ids whose log-probability proves the policy.
        canary_logprobs: log-probability of each of canary[1:] under the trainer's weights.
        broadcast: `host:port` where rank 0 offers the weights (`offbeat.dist.offer`), and the folder is written only for engines that it
            cannot reach otherwise; empty where the folder holds them.
    """

    version: Version
    folder: str
    fingerprint: str
    canary: tuple[int, ...]
    canary_logprobs: tuple[float, ...]
    broadcast: str = ""

    @property
    def canary_logprob(self) -> float:
        """The mean of them."""
        return sum(self.canary_logprobs) / len(self.canary_logprobs)


@dataclass(frozen=True)
class Proof:
    """What an engine says of the weights that it samples from now.

    Attributes:
        fingerprint: None where the engine can read its weights neither back nor as they were loaded; the canary alone proves them then.
        canary_logprobs: log-probability of each of its tokens but the first, through the forward that serves.
        live: whether the fingerprint is of what it computes with; otherwise of what it has read.
    """

    version: Version
    fingerprint: str | None
    canary_logprobs: tuple[float, ...]
    live: bool = True

    @property
    def canary_logprob(self) -> float:
        """The mean of them."""
        return sum(self.canary_logprobs) / len(self.canary_logprobs)


class EngineControl(Protocol):
    """One engine, seen from publishers. All methods raise `EngineError` or `DeadlineError`."""

    @property
    def name(self) -> str: ...

    async def stage(self, manifest: Manifest, *, timeout_s: float) -> None:
        """Load the version beside the one that is served."""
        ...

    async def switch(self, manifest: Manifest, *, interrupt: Interrupt, timeout_s: float) -> None:
        """Serve a staged version from the next decode step on."""
        ...

    async def prove(self, canary: tuple[int, ...], *, timeout_s: float, adapter: str = "") -> Proof:
        """What the engine samples from now, through the serving forward: the whole weights, or the adapter of that name."""
        ...

    async def load_adapter(self, name: str, folder: str, *, timeout_s: float) -> None:
        """Load a PEFT folder under a new name; the same name and folder again is no change."""
        ...

    async def unload_adapter(self, name: str, *, timeout_s: float) -> None:
        """Forget an adapter; requests in flight finish with it."""
        ...


class Channel(Protocol):
    """How weights leave the trainer."""

    async def write(self, version: Version) -> Manifest:
        """Make the trainer's weights available as an immutable version."""
        ...

    async def rewrite(self, manifest: Manifest) -> Manifest | None:
        """Write a version again that is not on disk as it was written; None where it is, or the trainer has other weights by now."""
        ...

    def prune(self) -> None:
        """Remove versions that no engine needs any more."""
        ...
