"""What a train engine gives out: the whole model, or the adapter that it trains. Chosen once, with the strategy.

A product is copied out by all ranks together; afterwards rank 0 writes the copy, so that no peer waits in a collective for a disk.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from offbeat.checkpoint.export import export_folder
from offbeat.data.model_folder import check_model_folder
from offbeat.dist.offer import Offer
from offbeat.model.checkpoint_names import published_names
from offbeat.model.fingerprint import fingerprint
from offbeat.model.lora import AdapterBank
from offbeat.model.peft_io import Adapter, write_adapter
from offbeat.trainer.state import Dtype, as_dtype, full_state, parameter_bytes, rounded


class Copy(Protocol):
    """A product as it was at one moment. Its methods are for rank 0 alone, and raise StorageError where nothing can be written."""

    def fingerprint(self) -> str:
        """What an engine finds in what `publish` writes."""
        ...

    def publish(self, folder: Path) -> None:
        """Write what engines load."""
        ...

    def offer(self, folder: Path, *, host: str, num_receivers: int, timeout_s: float) -> Offer | None:
        """Offer it to engines by broadcast, once, after all else; None where it was published to `folder` instead.

        Args:
            folder: written for engines that cannot be reached otherwise.
            host, num_receivers, timeout_s: see `Offer`, as for what else it raises.
        """
        ...

    def export(self, folder: Path, *, tokenizer_folder: Path) -> None:
        """Write a Hugging Face folder for others."""
        ...


class Product(Protocol):
    """What is given out."""

    def rounded(self, dtype: Dtype) -> AbstractContextManager[None]:
        """Compute with the weights as they are published in `dtype` while the body runs."""
        ...

    def copy(self, dtype: Dtype, *, keep: bool) -> Copy:
        """The present weights in `dtype`, for ranks that want to `keep` them; collective."""
        ...


@dataclass(frozen=True, eq=False)
class ModelCopy:
    """A whole model.

    Attributes:
        state: all weights as CPU tensors by the names of their modules, tied ones once; empty where they were not kept.
    """

    model: PreTrainedModel
    model_folder: Path
    state: dict[str, Tensor]
    dtype: Dtype

    def fingerprint(self) -> str:
        """See `Copy.fingerprint`."""
        return fingerprint(parameter_bytes(self.model, self.state))

    def publish(self, folder: Path) -> None:
        """See `Copy.publish`; a Hugging Face folder."""
        self._write(folder, published_names(self.model, self.state))

    def offer(self, folder: Path, *, host: str, num_receivers: int, timeout_s: float) -> Offer:
        """See `Copy.offer`."""
        state = published_names(self.model, self.state)
        return Offer(state, host=host, num_receivers=num_receivers, timeout_s=timeout_s, write_folder=partial(self._write, folder))

    def export(self, folder: Path, *, tokenizer_folder: Path) -> None:
        """See `Copy.export`."""
        state = published_names(self.model, self.state)
        export_folder(state, folder, model_folder=self.model_folder, tokenizer_folder=tokenizer_folder, dtype=self.dtype)

    def _write(self, folder: Path, state: Mapping[str, Tensor]) -> None:
        export_folder(state, folder, model_folder=self.model_folder, dtype=self.dtype)


class WholeModel:
    """The model of a strategy."""

    def __init__(self, model: PreTrainedModel, model_folder: Path) -> None:
        self._model = model
        self._model_folder = model_folder

    def rounded(self, dtype: Dtype) -> AbstractContextManager[None]:
        """See `Product.rounded`."""
        return rounded(self._model, dtype)

    def copy(self, dtype: Dtype, *, keep: bool) -> ModelCopy:
        """See `Product.copy`."""
        return ModelCopy(self._model, self._model_folder, full_state(self._model, dtype=dtype, keep=keep), dtype)


@dataclass(frozen=True, eq=False)
class AdapterCopy:
    """An adapter, always in float32, and the frozen model beside it; `base` names that in the adapter's folder."""

    adapter: Adapter
    model: PreTrainedModel
    base: str
    dropout: float
    dtype: Dtype

    def fingerprint(self) -> str:
        """See `Copy.fingerprint`."""
        return self.adapter.fingerprint()

    def publish(self, folder: Path) -> None:
        """See `Copy.publish`; a PEFT folder."""
        write_adapter(self.adapter, folder, base_model=self.base, dropout=self.dropout)

    def offer(self, folder: Path, *, host: str, num_receivers: int, timeout_s: float) -> None:  # noqa: ARG002
        """See `Copy.offer`; an adapter is small, and always published to the folder."""
        self.publish(folder)

    def export(self, folder: Path, *, tokenizer_folder: Path) -> None:
        """See `Copy.export`; the model with the adapter merged into it, and the adapter itself in `adapter` inside."""

        def add_adapter(part: Path) -> None:
            self.publish(part / "adapter")

        export_folder(
            self.merged_state(), folder, model_folder=check_model_folder(self.base), tokenizer_folder=tokenizer_folder, dtype=self.dtype,
            add=add_adapter)

    @torch.no_grad()
    def merged_state(self) -> dict[str, Tensor]:
        """The weights of a plain model that computes the same; summed in float32 and rounded once."""
        state = full_state(self.model, dtype="float32", keep=True)
        for layer, (a, b) in self.adapter.pairs.items():
            state[f"{layer}.weight"].addmm_(b, a, alpha=self.adapter.scaling)
        return as_dtype(published_names(self.model, state), self.dtype)


class AdapterOfModel:
    """The adapter in one slot of a bank over a whole, frozen model."""

    def __init__(self, bank: AdapterBank, slot: int, *, model: PreTrainedModel, base: str, dropout: float) -> None:
        self._bank = bank
        self._slot = slot
        self._model = model
        self._base = base
        self._dropout = dropout

    def rounded(self, dtype: Dtype) -> AbstractContextManager[None]:  # noqa: ARG002
        """See `Product.rounded`; an adapter is published as it is."""
        return nullcontext()

    def copy(self, dtype: Dtype, *, keep: bool) -> AdapterCopy:  # noqa: ARG002
        """See `Product.copy`; small enough to be kept by all."""
        return AdapterCopy(self._bank.adapter(self._slot), self._model, self._base, self._dropout, dtype)
