"""An engine's sleep: the memory of its cache and weights is free for others, while its requests wait. Owned by `engine.Engine`.

Weights that are dropped come back with the next version that is switched to; those that are kept wait in host memory.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from offbeat.engine.cache import SlotCache
from offbeat.engine.forward import Forward
from offbeat.engine.prefixes import PrefixCache
from offbeat.engine.versions import VersionStore
from offbeat.errors import RefusedError
from offbeat.sync.platform import current_platform


class EngineSleep:
    """The sleep of an engine, in which nothing may be computed, and the weights that it keeps meanwhile."""

    def __init__(self, forward: Forward, caches: Sequence[SlotCache | PrefixCache], versions: VersionStore) -> None:
        self.asleep = False
        self._forward = forward
        self._caches = caches
        self._versions = versions
        self._kept: dict[str, Tensor] | None = None

    @torch.inference_mode()
    def free_memory(self, *, keep_weights: bool) -> None:
        """Free the memory. Weights to be kept go to host memory; on a CPU, they are there already, and stay."""
        self.asleep = True  # whatever fails below
        for cache in self._caches:
            cache.release()
        holds = self._kept is None and self._versions.holds_live
        if not keep_weights:
            if holds:
                self._forward.release()
            self._kept = None
            self._versions.forget_live()
        elif holds and self._forward.device.type != "cpu":
            self._kept = {name: tensor.cpu() for name, tensor in self._forward.tensors().items()}
            self._forward.release()
        current_platform.return_memory()

    @torch.inference_mode()
    def restore(self) -> None:
        """Bring kept weights back to the device. Raises RefusedError if they were dropped."""
        if not self._versions.holds_live:
            raise RefusedError("its weights are gone, because it sleeps without them; stage a version and switch to it")
        if self._kept is not None:
            self._forward.install(self._forward.prepare(self._kept))
        self.note_installed()

    def note_installed(self) -> None:
        self.asleep, self._kept = False, None
