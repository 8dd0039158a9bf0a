"""Snapshots of the trainee: consistent copies of the whole model, or of an adapter, to be published or exported.

All ranks take a snapshot together; afterwards rank 0 writes it, or each rank its part (`parts`): no peer waits in a collective for a disk.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from offbeat.data.model_folder import check_model_folder
from offbeat.errors import StorageError
from offbeat.model.changes_io import smaller_changes, write_changes
from offbeat.model.checkpoint_names import published_names
from offbeat.model.fingerprint import combine, digests
from offbeat.model.fused_experts import split_name
from offbeat.model.peft_io import Adapter, write_adapter
from offbeat.sync.weight_broadcast import Changes, WeightBroadcast
from offbeat.trainer.export import export_folder
from offbeat.trainer.messages import Dtype
from offbeat.trainer.state import as_dtype, parameter_bytes


class Snapshot(Protocol):
    """A copy of the trainee. Only for rank 0; its methods raise StorageError if they cannot write."""

    @property
    def num_bytes(self) -> int:
        """Size of the tensors."""
        ...

    def fingerprint(self) -> str:
        """Return the fingerprint that an engine computes from the files of `write`."""
        ...

    def write(self, folder: Path) -> None:
        """Write the files that engines load."""
        ...

    def write_changes(self, folder: Path, *, since: "Snapshot", base: Path) -> int:
        """Write the changes since `since`, written in `base`, and return their size in bytes; if not smaller, write none and return 0."""
        ...

    def offer(
        self, folder: Path | None, *, host: str, num_receivers: int, timeout_s: float, since: "Snapshot | None" = None, base: str = "",
    ) -> WeightBroadcast | None:
        """Offer the snapshot to engines by broadcast; returns None if it was written to `folder` instead.

        Args:
            folder: written for engines that cannot be reached otherwise; None if engines see no folder of this machine.
            host, num_receivers, timeout_s: see `WeightBroadcast`, which may also raise.
            since: an earlier snapshot, which engines know by the folder `base`. Those that have it are offered the changes, where smaller.
        """
        ...

    def export(self, folder: Path, *, tokenizer_folder: Path) -> None:
        """Write a Hugging Face folder for other programs."""
        ...


@dataclass(frozen=True, eq=False)
class ModelSnapshot:
    """The `Snapshot` of a whole model, or of a part of it: some whole tensors.

    `state` has the weights as CPU tensors, by the names of their modules, tied ones once; it is empty on ranks that do not keep any.
    """

    model: PreTrainedModel
    model_folder: Path
    state: dict[str, Tensor]
    dtype: Dtype

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.state.values())

    def fingerprint(self) -> str:
        return combine(self.digests())

    def digests(self) -> dict[str, bytes]:
        """Return the digest of each weight by published name; the digests of all parts make the fingerprint of the whole model."""
        return digests(parameter_bytes(self.model, self.state))

    def published(self) -> dict[str, Tensor]:
        """Return the weights by their published names, such as "lm_head.weight" [V, H]."""
        return published_names(self.model, self.state)

    def write(self, folder: Path) -> None:
        """See `Snapshot.write`; writes a Hugging Face folder."""
        self._write(folder, self.published())

    def write_changes(self, folder: Path, *, since: Snapshot, base: Path) -> int:
        assert isinstance(since, ModelSnapshot), "a model's changes are those of a model"
        return write_changes(self.published(), folder, since=since.published(), base=base)

    def offer(
        self, folder: Path | None, *, host: str, num_receivers: int, timeout_s: float, since: Snapshot | None = None, base: str = "",
    ) -> WeightBroadcast:
        assert since is None or isinstance(since, ModelSnapshot), "a model's changes are those of a model"
        state = self.published()
        found = None if since is None else smaller_changes(state, since=since.published())
        return WeightBroadcast(
            state, host=host, num_receivers=num_receivers, timeout_s=timeout_s, write_folder=partial(self._write_fallback, folder),
            changes=None if found is None else Changes(base, found))

    def export(self, folder: Path, *, tokenizer_folder: Path) -> None:
        export_folder(self.published(), folder, model_folder=self.model_folder, tokenizer_folder=tokenizer_folder, dtype=self.dtype)

    def _write_fallback(self, folder: Path | None, state: Mapping[str, Tensor]) -> None:
        if folder is None:
            raise StorageError("engines see no folder of rank 0's machine; give weights.dir a folder that both see")
        self._write(folder, state)

    def _write(self, folder: Path, state: Mapping[str, Tensor]) -> None:
        export_folder(state, folder, model_folder=self.model_folder, dtype=self.dtype)


@dataclass(frozen=True, eq=False)
class AdapterSnapshot:
    """The `Snapshot` of an adapter, always in float32, with its frozen model, which the adapter's folder names `base`.

    For `export`, `state` has the frozen model's weights in float32, as `ModelSnapshot` has them; else it is empty.
    """

    adapter: Adapter
    model: PreTrainedModel
    base: str
    dropout: float
    dtype: Dtype
    state: dict[str, Tensor]

    @property
    def num_bytes(self) -> int:
        return self.adapter.num_bytes

    def fingerprint(self) -> str:
        return self.adapter.fingerprint()

    def write(self, folder: Path) -> None:
        """See `Snapshot.write`; writes a PEFT folder."""
        write_adapter(self.adapter, folder, base_model=self.base, dropout=self.dropout)

    def write_changes(self, folder: Path, *, since: Snapshot, base: Path) -> int:  # noqa: ARG002
        """See `Snapshot.write_changes`; an adapter is small, and is always written whole."""
        return 0

    def offer(
        self, folder: Path | None, *, host: str, num_receivers: int, timeout_s: float, since: Snapshot | None = None,  # noqa: ARG002
        base: str = "",  # noqa: ARG002
    ) -> None:
        """See `Snapshot.offer`; an adapter is small, and is always written to the folder."""
        assert folder is not None, "adapters are not broadcast"
        self.write(folder)

    def export(self, folder: Path, *, tokenizer_folder: Path) -> None:
        """See `Snapshot.export`; writes the model with the adapter merged into it, and the adapter itself to `adapter` inside.

        It is the last use of the snapshot, whose `state` it overwrites.
        """
        export_folder(
            self._merged(), folder, model_folder=check_model_folder(self.base), tokenizer_folder=tokenizer_folder, dtype=self.dtype,
            add=lambda part: self.write(part / "adapter"))

    @torch.no_grad()
    def _merged(self) -> dict[str, Tensor]:
        """Return the weights W + scaling * B A, each [O, I], of a plain model that computes the same; float32 sums, rounded once."""
        for layer, (a, b) in self.adapter.pairs.items():
            of_expert = split_name(layer)
            weight = self.state[f"{layer}.weight"] if of_expert is None else self.state["{}.{}".format(*of_expert)][of_expert[2]]
            weight.addmm_(b, a, alpha=self.adapter.scaling)
        return as_dtype(published_names(self.model, self.state), self.dtype)
