"""The adapters that an engine holds, and the batches that use them. Owned by `engine.Engine`, on its thread.

A name is bound to one folder for as long as it is held. At most `max_adapters` are held: the least recently used that no request uses makes
room. A request holds its adapter from its submission to its end, also when the adapter is unloaded meanwhile.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from offbeat.errors import BusyError, RefusedError
from offbeat.inference.embedded.forward import Forward
from offbeat.inference.embedded.lora import BASE, AdapterRows, AdapterStack
from offbeat.inference.embedded.options import EngineOptions
from offbeat.model.peft_io import Adapter, read_adapter

MAX_NAME = 200
"""Characters of an adapter's name."""


class UnknownAdapterError(RefusedError):
    """The adapter is not held, or is being unloaded."""


@dataclass(eq=False)
class Held:
    """One adapter under its name.

    Attributes:
        leaving: unloaded, and dropped as soon as no request uses it.
    """

    folder: str
    adapter: Adapter
    leaving: bool = False


class Adapters:
    """Names, folders and weights.

    Attributes:
        folders: of those that requests may use now, by name; replaced, never changed, so that any thread may read it.
        num_evicted: adapters that made room for another, since the start.
    """

    def __init__(self, forward: Forward, options: EngineOptions, *, in_use: Callable[[], set[str]]) -> None:
        """`in_use` gives the names that waiting and running requests hold."""
        self.folders: dict[str, str] = {}
        self.num_evicted = 0
        self._linears = {linear.name: linear for group in forward.lora_groups.values() for linear in group}
        self._max_adapters = options.max_adapters
        self._max_rank = options.max_adapter_rank
        self._in_use = in_use
        self._held: dict[str, Held] = {}  # the least recently used first
        self._stack = AdapterStack(forward.lora_groups, device=forward.device)
        self._last_key: tuple[int, tuple[str, ...], int] | None = None
        self._last_rows: AdapterRows | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Of adapters that requests may use now."""
        return tuple(self.folders)

    # -- loading and unloading ---------------------------------------------------------------------------------------------------------

    def has(self, name: str, folder: str) -> bool:
        """Whether the adapter is held already; one that was leaving stays.

        Raises:
            RefusedError: the name cannot be one, or stands for another folder.
        """
        if not 0 < len(name) <= MAX_NAME:
            raise RefusedError(f"an adapter's name has 1 to {MAX_NAME} characters, got {name[:MAX_NAME]!r}")
        held = self._held.get(name)
        if held is None:
            return False
        if held.folder != folder:
            raise RefusedError(f"adapter {name} is {held.folder} and cannot become {folder}; an adapter is immutable, use a new name")
        held.leaving = False
        self._show_names()
        return True

    def read(self, folder: str) -> Adapter:
        """Read a PEFT folder and check that it fits the model. May run on any thread.

        Raises:
            ModelError: it holds no adapter that can be read.
            RefusedError: its rank is too large, or it adapts what the model does not have.
        """
        adapter = read_adapter(folder)
        if adapter.rank > self._max_rank:
            raise RefusedError(
                f"the adapter in {folder} has rank {adapter.rank}; this engine takes at most max_adapter_rank = {self._max_rank}"
            )
        for module, (a, b) in adapter.pairs.items():
            linear = self._linears.get(module)
            if linear is None:
                raise RefusedError(f"the adapter in {folder} adapts {module!r}, which is no linear layer of this model's decoder")
            if (a.shape[1], b.shape[0]) != (linear.inputs, linear.outputs):
                raise RefusedError(
                    f"the adapter in {folder} maps {a.shape[1]} to {b.shape[0]} numbers beside {module!r}, which maps {linear.inputs} to "
                    f"{linear.outputs}; it was trained on another model"
                )
        return adapter

    def add(self, name: str, folder: str, adapter: Adapter) -> None:
        """Hold an adapter that `read` gave.

        Raises:
            RefusedError: as `has`.
            BusyError: no adapter can make room, because requests use them all.
        """
        if self.has(name, folder):
            return
        if len(self._held) >= self._max_adapters:
            used = self._in_use()
            idle = next((other for other in self._held if other not in used), None)
            if idle is None:
                raise BusyError(
                    f"adapter {name} finds no room: requests use all {len(self._held)} adapters, as many as max_adapters allows; "
                    "try again later"
                )
            del self._held[idle]
            self.num_evicted += 1
        self._held[name] = Held(folder, adapter)
        self._show_names()

    def unload(self, name: str) -> None:
        """Refuse new requests for an adapter, and drop it when the last one is done; an unknown name is no error."""
        if name in self._held:
            self._held[name].leaving = True
            self.drop_leaving()
            self._show_names()

    def drop_leaving(self) -> None:
        """Drop what was unloaded and is no longer used. Called when requests end."""
        leaving = [name for name, held in self._held.items() if held.leaving]
        used = self._in_use() if leaving else set()
        for name in leaving:
            if name not in used:
                del self._held[name]

    def _show_names(self) -> None:
        self.folders = {name: held.folder for name, held in self._held.items() if not held.leaving}

    # -- use ---------------------------------------------------------------------------------------------------------------------------

    def use(self, name: str) -> None:
        """Note that a request wants an adapter; the empty name is the base model.

        Raises:
            UnknownAdapterError: it is not held, or is being unloaded.
        """
        if not name:
            return
        held = self._held.get(name)
        if held is None or held.leaving:
            raise UnknownAdapterError(f"adapter {name[:MAX_NAME]!r} is not loaded in this engine; load it before asking for it")
        self._held[name] = self._held.pop(name)

    def place(self, names: Iterable[str]) -> None:
        """Make the weights that serve those of these adapters, all held; empty names are the base model."""
        self._stack.place(self._held[name].adapter for name in dict.fromkeys(names) if name)

    def rows(self, names: Sequence[str], *, repeat: int = 1) -> AdapterRows | None:
        """The adapters of a batch.

        Args:
            names: adapter of each sequence, all placed; empty for the base model.
            repeat: rows of each sequence.

        Returns:
            None where all sequences are the base model's.
        """
        if not any(names):
            return None
        key = (self._stack.layout, tuple(names), repeat)
        if key != self._last_key:
            slots = {name: self._stack.adapters.index(self._held[name].adapter) if name else BASE for name in dict.fromkeys(names)}
            rows = np.repeat(np.array([slots[name] for name in names]), repeat)
            self._last_key, self._last_rows = key, AdapterRows(self._stack, rows)
        return self._last_rows

    def live(self, name: str) -> Adapter:
        """An adapter, placed before, copied from the weights that serve: its fingerprint is that of what is computed with."""
        return self._stack.read(self._held[name].adapter)
