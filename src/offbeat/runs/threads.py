"""Chooses the number of CPU threads of each process of a run, from the cores that this process may use. Torch-free.

Called once, before anything is started and recorded, so that a run's own `config.toml` states the choice.
"""

import os
from collections.abc import Iterator
from pathlib import Path

from offbeat.config.for_processes import PlanConfig
from offbeat.runs.rank_info import RankInfo

_CONTROLLER = RankInfo()
_MOST_BESIDE_DEVICE = 4
"""Most threads beside an accelerator: the cores only feed it, moving and converting weights, which a few threads do as well as many."""


def choose_threads(
    config: PlanConfig, *, cores: int, rank_info: RankInfo = _CONTROLLER, trains: bool = True, serves: bool = True,
) -> PlanConfig:
    """Return the sections with numbers in place of a `train.threads` or `inference.threads` of 0.

    The cores of a machine are divided among the ranks and engines that this run has there; see `divide_cores`. On a Ray cluster a worker's
    machine and its load are unknown beforehand, so each worker requests one core and computes on one.

    Args:
        cores: number of cores that this process may use.
        trains: whether there are train ranks. A setting without processes keeps its 0.
    """
    spmd = config.run.mode == "spmd"
    num_ranks = (rank_info.local_world if spmd else config.train.num_ranks) if trains else 0
    num_engines = config.inference.num_engines if serves and rank_info.is_on_first_machine and not config.inference.urls else 0
    on_cluster = config.cluster.launcher == "ray" and bool(config.cluster.ray_address)
    chosen = divide_cores(
        1 if on_cluster else cores, num_ranks=num_ranks, num_engines=num_engines, rank_threads=config.train.threads,
        engine_threads=config.inference.threads)
    updates = {}
    devices = config.train.devices_per_rank, config.inference.devices_per_engine
    for name, section, count, threads, beside in zip(
            ("train", "inference"), (config.train, config.inference), (num_ranks, num_engines), chosen, devices, strict=True):
        if count and not section.threads:
            most = _MOST_BESIDE_DEVICE if beside else cores
            updates[name] = section.model_copy(update={"threads": min(most, threads)})
    return config.model_copy(update=updates)


def divide_cores(cores: int, *, num_ranks: int, num_engines: int, rank_threads: int = 0, engine_threads: int = 0) -> tuple[int, int]:
    """Return the number of threads for each train rank and each engine of one machine, at least 1.

    Both get the same share, and the remainder goes to the ranks as far as it can be divided; for example, 8 cores for 1 rank and 2 engines
    are 4 for the rank and 2 for each engine. The rule is the same for runs whose ranks and engines take turns, as with a staleness of 0:
    idle threads cost nothing, and a run may let its engines go ahead at any time.

    `rank_threads` and `engine_threads` that are given stay; 0 is chosen from the cores that the others leave.
    """
    if not engine_threads:
        sharing = num_engines + (0 if rank_threads else num_ranks)
        engine_threads = max(1, (cores - num_ranks * rank_threads) // max(1, sharing))
    if not rank_threads:
        rank_threads = max(1, (cores - num_engines * engine_threads) // max(1, num_ranks))
    return rank_threads, engine_threads


def usable_cores() -> int:
    """Return the number of cores that this process may use: the ones of its affinity, within a container's quota."""
    affinity = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    return min([len(affinity), *quotas(Path("/sys/fs/cgroup"), Path("/proc/self/cgroup"))])


def quotas(mount: Path, membership: Path) -> Iterator[int]:
    """Yield the whole cores, at least 1, that each control group of a process and its ancestors allow; for versions 1 and 2.

    Args:
        mount: folder where control groups are mounted, such as /sys/fs/cgroup.
        membership: file with the process's groups, a line "ID:CONTROLLERS:PATH" for each hierarchy; without controllers it is version 2.
    """
    for line in _read_text(membership).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        top = mount / "cpu" if controllers else mount
        lowest = top / path.strip("/")  # visible only to a process outside of any container
        for group in [lowest, *lowest.parents]:
            if group.is_relative_to(top):
                quota, period = _read_text(group / "cpu.cfs_quota_us"), _read_text(group / "cpu.cfs_period_us")
                if not controllers:
                    quota, _, period = _read_text(group / "cpu.max").partition(" ")
                if quota.isdigit() and period.isdigit():  # otherwise "max" or -1: no quota
                    yield max(1, int(quota) // int(period))


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return ""  # nothing is set, or this is no Linux
