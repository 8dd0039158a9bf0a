"""What a version of weights is, what an engine shows of the one that it serves, and what an engine must be able to do with it."""

from dataclasses import dataclass
from typing import Literal, Protocol

from offbeat.types import Version
from offbeat.weights.adapters import adapter_name

Interrupt = Literal["recompute", "keep", "drain"]


@dataclass(frozen=True)
class Manifest:
    """One immutable version of the whole weights or of an adapter, as the trainer wrote it.

    Attributes:
        version: optimizer steps published; of an adapter, its number in the order of its versions.
        folder: holds the weights, in Hugging Face's format, or PEFT's for an adapter; never written again.
        fingerprint: `model.fingerprint` of the tensors as written; of an adapter's as float32, under the names in the folder.
        canary: token ids whose log-probability proves the policy.
        canary_logprobs: log-probability of each of canary[1:] under the trainer's weights; or their mean alone, of an adapter that an
            earlier Offbeat has written.
        broadcast: `host:port` where rank 0 offers the weights (`offbeat.sync.offer`), and the folder is written only for engines that it
            cannot reach otherwise; empty where the folder holds them.
        adapter: name of the adapter; empty for whole weights.
        num_bytes: size of an adapter's tensors.
    """

    version: Version
    folder: str
    fingerprint: str
    canary: tuple[int, ...]
    canary_logprobs: tuple[float, ...]
    broadcast: str = ""
    adapter: str = ""
    num_bytes: int = 0

    @property
    def name(self) -> str:
        """The name by which engines know this version of an adapter: `adapter@version`."""
        return adapter_name(self.adapter, self.version)


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


class EngineControl(Protocol):
    """One engine, as publishers see it. All methods raise `EngineError` or `DeadlineError`."""

    @property
    def name(self) -> str: ...

    async def stage(self, manifest: Manifest, *, timeout_s: float) -> None:
        """Load the version beside the one that is served."""
        ...

    async def switch(self, manifest: Manifest, *, interrupt: Interrupt, timeout_s: float) -> None:
        """Serve a staged version from the next decode step on."""
        ...

    async def prove(self, canary: tuple[int, ...], *, timeout_s: float, adapter: str = "") -> Proof:
        """Tell what the engine samples from now, through the serving forward: the whole weights, or the adapter of that name."""
        ...

    async def load_adapter(self, name: str, folder: str, *, timeout_s: float) -> None:
        """Load a PEFT folder under a new name; the same name and folder again is no change."""
        ...

    async def unload_adapter(self, name: str, *, timeout_s: float) -> None:
        """Forget an adapter; requests in flight finish with it."""
        ...
