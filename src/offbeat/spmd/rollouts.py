"""Rollouts of a rank in SPMD mode: none, or its share on rank 0's engines. Rank 0 itself has a plain `EngineRollouts`. Torch-free."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

from offbeat.algorithms.experience import sft_batch
from offbeat.config.rollout import RolloutConfig
from offbeat.config.train import SftConfig
from offbeat.controller.inputs import RunInputs
from offbeat.data.batch import Batch
from offbeat.data.dataset import EveryNth
from offbeat.data.row import Row
from offbeat.data.stream import PromptStream
from offbeat.data.trajectory import Group
from offbeat.errors import ConfigError, DataError
from offbeat.inference.sampling import Sampling
from offbeat.journal.records import CallEntry
from offbeat.journal.standing import HeldGroups
from offbeat.rollout.outcomes import GroupListener
from offbeat.runs.rank_info import RankInfo
from offbeat.telemetry.tracker import StatsPart
from offbeat.types import Version


@dataclass(frozen=True)
class NoRolloutSource:
    """The `RolloutSource` of a rank that gets its share of every batch from rank 0."""

    inputs: RunInputs

    draws = False

    def rollouts(
        self, stream: PromptStream, *, version: Version, last_version: Version, num_flat_rejected: int = 0,  # noqa: ARG002
    ) -> "NoRollouts":
        return NoRollouts(self.inputs.sampling)

    def rollouts_of_set(self, name: str) -> "NoRollouts":
        return NoRollouts(self.inputs.sets[name].sampling)

    def sft_batch(self, stream: PromptStream, count: int) -> Batch:  # noqa: ARG002
        return sft_batch([])


@dataclass(frozen=True)
class NoRollouts:
    """Rollouts of a rank that does not roll out."""

    sampling: Sampling
    in_flight: tuple[str, ...] = ()
    num_flat_rejected: int = 0
    has_ahead: bool = True
    held: tuple[Group, ...] = ()
    num_tries: Mapping[str, int] = field(default_factory=dict)
    calls: Sequence[CallEntry] = ()

    def take_over(self, held: HeldGroups) -> None:
        """Do nothing, since there are no groups."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        pass

    async def prepare_batch(self) -> list[Group]:
        """Return no groups: rank 0 sends the batch to the trainers."""
        return []

    async def take_ahead(self) -> list[Group]:
        return []

    def advance(self, version: Version) -> None:
        """Do nothing, since no group is admitted."""

    def serve(self, version: Version) -> None:
        """Do nothing, since no group is admitted."""

    def take_stats(self) -> StatsPart:
        return StatsPart()

    async def rollout_batch(
        self, rows: Iterable[Row], *, group_size: int, sampling: Sampling,  # noqa: ARG002
        listener: GroupListener | None = None,  # noqa: ARG002
    ) -> list[Group]:
        raise AssertionError("a rank without rollouts was asked to play some")


def share_limits(rollout: RolloutConfig, sft: SftConfig, rank_info: RankInfo) -> dict[str, RolloutConfig | SftConfig]:
    """Return both sections by name, as one head has them: limits that count groups or sequences are divided by the number of heads.

    For example, a batch of 7 groups over 2 ranks is 4 on rank 0 and 3 on rank 1.

    Raises:
        ConfigError: a batch has fewer groups or sequences than there are heads.
    """
    for name, size in (("rollout.consumer_batch_size", rollout.consumer_batch_size), ("sft.batch_size", sft.batch_size)):
        if size < rank_info.world:
            raise ConfigError(
                f"{name} must be at least the number of ranks = {rank_info.world} with rollout.single_rank_load = false, got {size};"
                " raise it, or let one rank load")
    own = rollout.model_copy(update={
        "consumer_batch_size": _share(rollout.consumer_batch_size, rank_info),
        "max_concurrent_rollouts": max(_share(rollout.max_concurrent_rollouts, rank_info), 1)})
    return {"rollout": own, "sft": sft.model_copy(update={"batch_size": _share(sft.batch_size, rank_info)})}


def share_rows(inputs: RunInputs, rank_info: RankInfo) -> RunInputs:
    """Return the inputs with the rows that one head draws; raises DataError if there are fewer rows than heads."""
    num_rows = inputs.train.num_rows
    if num_rows is not None and num_rows < rank_info.world:
        raise DataError(
            f"the dataset has {num_rows} rows to train on, fewer than the {rank_info.world} ranks that draw from it with"
            " rollout.single_rank_load = false; let one rank load, or start fewer ranks")
    return replace(inputs, train=EveryNth(inputs.train, rank_info.rank, rank_info.world))


def _share(count: int, rank_info: RankInfo) -> int:
    return count // rank_info.world + (rank_info.rank < count % rank_info.world)
