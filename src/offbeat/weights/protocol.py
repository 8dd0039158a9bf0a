"""The types of publishing: a version of weights, an engine's proof of the version that it serves, and the calls that bring it there."""

from dataclasses import dataclass
from typing import Literal, Protocol

from offbeat.types import Version
from offbeat.weights.adapters import adapter_name

Interrupt = Literal["recompute", "keep", "drain"]


@dataclass(frozen=True)
class Manifest:
    """One immutable version of the whole weights or of an adapter, as the trainer wrote it.

    Attributes:
        version: number of optimizer steps published; for an adapter, the number of this version among its versions.
        folder: folder that holds the weights, in Hugging Face's format, or PEFT's for an adapter; never written again.
        fingerprint: `model.fingerprint` of the tensors as written; of an adapter's as float32, under the names in the folder.
        canary: [n] token IDs whose log-probabilities prove the policy.
        canary_logprobs: [n - 1] log-probabilities of canary[1:] under the trainer's weights; for an adapter that an earlier Offbeat has
            written, their mean alone.
        broadcast: `host:port` where rank 0 offers the weights (`offbeat.sync.weight_broadcast`), such as "10.0.0.4:41207"; the folder is
            then written only for engines that it cannot reach otherwise. Empty where the folder holds them.
        adapter: name of the adapter; empty for whole weights.
        num_bytes: size of the tensors in the folder, or in the broadcast to engines that have `base`.
        base: folder of an earlier version, if only the changes since then are in this one's folder, or are broadcast to engines that have
            the earlier one; empty if all weights are.
    """

    version: Version
    folder: str
    fingerprint: str
    canary: tuple[int, ...]
    canary_logprobs: tuple[float, ...]
    broadcast: str = ""
    adapter: str = ""
    num_bytes: int = 0
    base: str = ""

    @property
    def name(self) -> str:
        """Name by which engines know this version of an adapter: `adapter@version`, such as "alice@12"."""
        return adapter_name(self.adapter, self.version)


@dataclass(frozen=True)
class Proof:
    """An engine's statement on the weights that it samples from now.

    Attributes:
        fingerprint: fingerprint of its weights; None if the engine can read them neither back nor as they were loaded, so that the canary
            alone proves them.
        canary_logprobs: [n - 1] log-probabilities of the canary's tokens but the first, by the forward pass that serves.
        live: whether the fingerprint was computed from the weights in use, rather than from the file that was read.
    """

    version: Version
    fingerprint: str | None
    canary_logprobs: tuple[float, ...]
    live: bool = True


class EngineControl(Protocol):
    """One engine as publishers see it. All methods raise EngineError or DeadlineError if the engine fails."""

    @property
    def name(self) -> str:
        """Name of the engine, such as "engine 0"."""
        ...

    async def stage(self, manifest: Manifest, *, timeout_s: float) -> None:
        """Load the version beside the one that is served."""
        ...

    async def switch(self, manifest: Manifest, *, interrupt: Interrupt, timeout_s: float) -> None:
        """Serve a staged version from the next decode step on."""
        ...

    async def prove(self, canary: tuple[int, ...], *, timeout_s: float, adapter: str = "") -> Proof:
        """Return a proof of the whole weights, or of the adapter of that name, by the forward pass that serves."""
        ...

    async def load_adapter(self, name: str, folder: str, *, timeout_s: float) -> None:
        """Load a PEFT folder under a new name; repeating it with the same name and folder changes nothing."""
        ...

    async def unload_adapter(self, name: str, *, timeout_s: float) -> None:
        """Unload an adapter; requests in flight finish with it."""
        ...
