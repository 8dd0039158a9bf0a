"""Rollouts of a rank in SPMD mode: none, or its share on rank 0's engines. Rank 0 itself has a plain `Arena`. Torch-free."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Self

from offbeat.algorithms.experience import sft_batch
from offbeat.cluster.material import Material
from offbeat.cluster.place import Place
from offbeat.config.root import Config
from offbeat.data.batch import Batch
from offbeat.data.dataset import EveryNth, PromptStream
from offbeat.data.row import Row
from offbeat.data.trajectory import Group
from offbeat.errors import ConfigError, DataError
from offbeat.inference.sampling import Sampling
from offbeat.telemetry.tracker import StatsPart
from offbeat.types import Version


@dataclass(frozen=True)
class Bystander:
    """The stage of a rank that gets its share of every batch from rank 0."""

    material: Material

    def rollouts(self, stream: PromptStream, *, version: Version, last_version: Version) -> "NoRollouts":  # noqa: ARG002
        """See `Stage.rollouts`."""
        return NoRollouts(self.material.sampling)

    def sft_batch(self, stream: PromptStream, count: int) -> Batch:  # noqa: ARG002
        """See `Stage.sft_batch`."""
        return sft_batch([])


@dataclass(frozen=True)
class NoRollouts:
    """Rollouts of a rank that does not roll out."""

    sampling: Sampling
    in_flight: tuple[str, ...] = ()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        pass

    async def prepare_batch(self) -> list[Group]:
        """Return nothing: rank 0 sends the batch to the trainers."""
        return []

    def advance(self, version: Version) -> None:
        """Do nothing, since nothing is admitted."""

    def take_stats(self) -> StatsPart:
        """Return empty statistics."""
        return StatsPart()

    async def rollout_batch(self, rows: Iterable[Row], *, group_size: int, sampling: Sampling) -> list[Group]:  # noqa: ARG002
        """Never called: rank 0 evaluates."""
        raise AssertionError("a rank without rollouts was asked to play some")


def share_limits(config: Config, place: Place) -> Config:
    """Return the configuration of one head: every limit that counts groups or sequences is divided by the number of heads.

    Raises:
        ConfigError: a batch has fewer groups or sequences than there are heads.
    """
    for name, size in (("rollout.consumer_batch_size", config.rollout.consumer_batch_size), ("sft.batch_size", config.sft.batch_size)):
        if size < place.world:
            raise ConfigError(
                f"{name} must be at least the number of ranks = {place.world} with rollout.single_rank_load = false, got {size};"
                " raise it, or let one rank load")
    rollout = config.rollout.model_copy(update={
        "consumer_batch_size": _share(config.rollout.consumer_batch_size, place),
        "max_concurrent_rollouts": max(_share(config.rollout.max_concurrent_rollouts, place), 1)})
    sft = config.sft.model_copy(update={"batch_size": _share(config.sft.batch_size, place)})
    return config.model_copy(update={"rollout": rollout, "sft": sft})


def share_rows(material: Material, place: Place) -> Material:
    """Return the material with the rows that one head draws.

    Raises:
        DataError: there are fewer rows than heads.
    """
    num_rows = material.train.num_rows
    if num_rows is not None and num_rows < place.world:
        raise DataError(
            f"the dataset has {num_rows} rows to train on, fewer than the {place.world} ranks that draw from it with"
            " rollout.single_rank_load = false; let one rank load, or start fewer ranks")
    return replace(material, train=EveryNth(material.train, place.rank, place.world))


def _share(count: int, place: Place) -> int:
    return count // place.world + (place.rank < count % place.world)
