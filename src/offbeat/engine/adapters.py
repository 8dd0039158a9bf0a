"""The adapters that an engine holds, and the batches that use them. Owned by `engine.Engine`, on its thread.

A name is bound to one folder for as long as it is held. At most `max_adapters` are held: to make room, the least recently used adapter
that no request uses is evicted. A request holds its adapter from its submission to its end, even when the adapter is unloaded meanwhile.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from offbeat.engine.forward import Forward
from offbeat.engine.lora import BASE, AdapterRows, AdapterStack
from offbeat.engine.options import EngineOptions
from offbeat.errors import BusyError, RefusedError
from offbeat.model.peft_io import Adapter, read_adapter

MAX_NAME = 200
"""Largest number of characters in an adapter's name."""


class UnknownAdapterError(RefusedError):
    """The adapter is not held, or is being unloaded; or no model has that name."""

    param = "model"


@dataclass(eq=False)
class HeldAdapter:
    """One adapter under its name; if it is `leaving`, it was unloaded, and is dropped as soon as no request uses it."""

    folder: str
    adapter: Adapter
    leaving: bool = False


class AdapterRequests(Protocol):
    """An engine's requests."""

    def adapters_in_use(self) -> set[str]:
        """Return the names of adapters that waiting and running requests hold."""
        ...


class EngineAdapters:
    """Names, folders and weights of the adapters that the engine holds.

    Attributes:
        folders: folders of the adapters that requests may use now, by name; replaced and never changed, so any thread may read it.
        num_evicted: number of adapters evicted to make room for another, since the start.
    """

    def __init__(self, forward: Forward, options: EngineOptions, *, requests: AdapterRequests) -> None:
        self.folders: dict[str, str] = {}
        self.num_evicted = 0
        self._linears = {linear.name: linear for group in forward.lora_groups.values() for linear in group}
        self._max_adapters = options.max_adapters
        self._max_rank = options.max_adapter_rank
        self._requests = requests
        self._held: dict[str, HeldAdapter] = {}  # least recently used first
        self._fixed = forward.row_multiple > 1
        # One rank for all, because sums depend on it; a product with a single column sums its rows in ways of its own.
        self._stack = AdapterStack(forward.lora_groups, device=forward.device, least_rank=max(2, self._max_rank) if self._fixed else 1)
        self._last_key: tuple[int, tuple[str, ...], int] | None = None
        self._last_rows: AdapterRows | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.folders)

    def has(self, name: str, folder: str) -> bool:
        """Whether the adapter is held; one being unloaded stays. Raises RefusedError for a bad name, or one of another folder."""
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
            ModelError: the folder holds no adapter that can be read.
            RefusedError: its rank is too large, or it adapts modules that the model does not have.
        """
        adapter = read_adapter(folder)
        if adapter.rank > self._max_rank:
            raise RefusedError(
                f"the adapter in {folder} has rank {adapter.rank}; this engine takes at most max_adapter_rank = {self._max_rank}"
            )
        for module, (a, b) in adapter.pairs.items():
            linear = self._linears.get(module)
            if linear is None:
                raise RefusedError(f"the adapter in {folder} adapts {module!r}, which is not a linear layer of this model's decoder")
            if (a.shape[1], b.shape[0]) != (linear.inputs, linear.outputs):
                raise RefusedError(
                    f"the adapter in {folder} maps {a.shape[1]} to {b.shape[0]} numbers beside {module!r}, which maps {linear.inputs} to "
                    f"{linear.outputs}; it was trained on another model"
                )
        return adapter

    def add(self, name: str, folder: str, adapter: Adapter) -> None:
        """Hold an adapter that `read` returned; raises RefusedError as `has`, BusyError if requests use all that are held."""
        if self.has(name, folder):
            return
        if len(self._held) >= self._max_adapters:
            used = self._requests.adapters_in_use()
            idle = next((other for other in self._held if other not in used), None)
            if idle is None:
                raise BusyError(
                    f"there is no room for adapter {name}: requests use all {len(self._held)} adapters, as many as max_adapters allows; "
                    "try again later"
                )
            del self._held[idle]
            self.num_evicted += 1
        self._held[name] = HeldAdapter(folder, adapter)
        self._show_names()

    def unload(self, name: str) -> None:
        """Refuse new requests for an adapter, and drop it when its last request ends; an unknown name is no error."""
        if name in self._held:
            self._held[name].leaving = True
            self.drop_leaving()
            self._show_names()

    def drop_leaving(self) -> None:
        """Drop adapters that were unloaded and are no longer used. Called when requests end."""
        leaving = [name for name, held in self._held.items() if held.leaving]
        used = self._requests.adapters_in_use() if leaving else set()
        for name in leaving:
            if name not in used:
                del self._held[name]

    def _show_names(self) -> None:
        self.folders = {name: held.folder for name, held in self._held.items() if not held.leaving}

    def use(self, name: str) -> None:
        """Mark an adapter as the latest used; "" is the base model. Raises UnknownAdapterError if it is not held, or is being unloaded."""
        if not name:
            return
        held = self._held.get(name)
        if held is None or held.leaving:
            raise UnknownAdapterError(f"adapter {name[:MAX_NAME]!r} is not loaded in this engine; load it before asking for it")
        self._held[name] = self._held.pop(name)

    def place(self, names: Iterable[str]) -> None:
        """Place exactly these adapters, which must be held, among the weights that serve; empty names are the base model."""
        self._stack.place(self._held[name].adapter for name in dict.fromkeys(names) if name)

    def of(self, names: Iterable[str]) -> list[Adapter | None]:
        """Return the adapter of each name, which must be held; None for the base model."""
        return [self._held[name].adapter if name else None for name in names]

    def rows(self, names: Sequence[str], *, repeat: int = 1) -> AdapterRows | None:
        """Return the adapter of each of a batch's rows, `repeat` rows for each name; None where all sequences use the base model.

        Adapters must be placed; the empty name is the base model.
        """
        if not any(names):
            return None
        key = (self._stack.layout, tuple(names), repeat)
        if key != self._last_key:
            slots = {name: self._stack.adapters.index(self._held[name].adapter) if name else BASE for name in dict.fromkeys(names)}
            rows = np.repeat(np.array([slots[name] for name in names]), repeat)
            self._last_key, self._last_rows = key, AdapterRows(self._stack, rows, fixed=self._fixed)
        return self._last_rows

    def live(self, name: str) -> Adapter:
        """Copy a placed adapter back from the weights that serve, so that its fingerprint is taken of the numbers in use."""
        return self._stack.read(self._held[name].adapter)
