"""The place of this process among the processes that run the loop: alone in single-controller mode, a rank of torchrun's in SPMD mode.

It is read from the environment before anything is started, so that a command that does not fit the mode ends at once. Torch-free.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from offbeat.config.run import RunConfig
from offbeat.config.train import TrainConfig
from offbeat.errors import ConfigError

_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_COMMAND = "torchrun --nproc-per-node 2 -m offbeat train CONFIG --run.mode spmd"


@dataclass(frozen=True)
class RankInfo:
    """The place of one process that runs the loop.

    Attributes:
        rank, world: rank of this process and number of ranks; 0 of 1 for a controller.
        local_rank, local_world: the same among the ranks on this machine.
        store_host, store_port: address of the store by torchrun, such as "10.0.0.1" and 29500; "" and 0 for a controller.
        store_is_served: whether torchrun itself serves that store, so that it outlives every rank.
        attempt: number of times that torchrun has restarted the ranks.
    """

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1
    store_host: str = ""
    store_port: int = 0
    store_is_served: bool = False
    attempt: int = 0

    @property
    def leads(self) -> bool:
        """Whether this process writes the run's files and talks to the user."""
        return self.rank == 0

    @property
    def is_on_first_machine(self) -> bool:
        """Whether it is on the machine of rank 0, which starts the engines."""
        return self.rank == self.local_rank


def read_rank_info(run: RunConfig, train: TrainConfig, environ: Mapping[str, str] = os.environ) -> RankInfo:
    """Determine this process's place for the run's mode.

    Raises:
        ConfigError: SPMD mode without torchrun's variables, or with a number of ranks other than `train.num_ranks`; or, conversely,
            torchrun started several processes in single-controller mode.
    """
    if run.mode == "spmd":
        return _read_torchrun(train, environ)
    if "TORCHELASTIC_RUN_ID" in environ and environ.get("WORLD_SIZE", "1") != "1":
        raise ConfigError(
            f"torchrun started {environ['WORLD_SIZE']} processes, but run.mode = 'controller' needs a single one, which starts its ranks"
            " itself; add --run.mode spmd, or start it as offbeat train CONFIG --train.num_ranks N")
    return RankInfo()


def resolve_ranks(run: RunConfig, train: TrainConfig, rank_info: RankInfo) -> TrainConfig:
    """Return [train] with torchrun's number of ranks; a controller's stays. Raises ConfigError if [train.parallel] does not divide it."""
    if run.mode == "controller":
        return train
    try:
        train.parallel.num_replicas(rank_info.world)
    except ValueError as exc:
        raise ConfigError(str(exc)) from exc
    return train.model_copy(update={"num_ranks": rank_info.world})


def _read_torchrun(train: TrainConfig, environ: Mapping[str, str]) -> RankInfo:
    if missing := [name for name in _VARIABLES if not environ.get(name)]:
        raise ConfigError(
            f"run.mode = 'spmd' needs the variables that torchrun sets, and {', '.join(missing)} are missing; start it as {_COMMAND}")
    rank, world, local_rank, local_world, port = (
        _integer(environ, name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT"))
    if not 0 <= rank < world:
        raise ConfigError(f"RANK must be 0 to WORLD_SIZE - 1 = {world - 1}, got {rank}; start it as {_COMMAND}")
    if train.num_ranks not in (1, world):
        raise ConfigError(
            f"train.num_ranks = {train.num_ranks} and torchrun's WORLD_SIZE = {world} differ; leave train.num_ranks out, or start"
            f" as many with --nproc-per-node")
    return RankInfo(
        rank, world, local_rank, local_world, environ["MASTER_ADDR"], port,
        store_is_served=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True", attempt=int(environ.get("TORCHELASTIC_RESTART_COUNT", "0")))


def _integer(environ: Mapping[str, str], name: str) -> int:
    try:
        return int(environ[name])
    except ValueError:
        raise ConfigError(f"{name} must be a whole number, got {environ[name]!r}; start it as {_COMMAND}") from None
