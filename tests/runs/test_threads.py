"""How many CPU threads each process gets."""

import os
from pathlib import Path

import pytest

from offbeat.config.load import load_config
from offbeat.config.root import Config
from offbeat.runs.rank_info import RankInfo
from offbeat.runs.threads import choose_threads, divide_cores, quotas, usable_cores

ALONE = RankInfo()


def config(**changes: str) -> Config:
    return load_config(None, [(name.replace("__", "."), value) for name, value in changes.items()])


def threads(given: Config, *, cores: int, rank_info: RankInfo = ALONE, trains: bool = True) -> tuple[int, int]:
    chosen = choose_threads(given.for_plan, cores=cores, rank_info=rank_info, trains=trains)
    return chosen.train.threads, chosen.inference.threads


@pytest.mark.parametrize(("cores", "num_ranks", "num_engines", "expected"), [
    (2, 1, 1, (1, 1)), (1, 1, 1, (1, 1)), (2, 2, 2, (1, 1)), (8, 1, 1, (4, 4)), (9, 1, 1, (5, 4)), (8, 2, 1, (3, 2)), (7, 1, 2, (3, 2)),
    (8, 0, 1, (1, 8)), (8, 0, 3, (1, 2)), (8, 2, 0, (4, 4)),
])
def test_ranks_and_engines_share_the_cores_and_the_rest_goes_to_the_ranks(
    cores: int, num_ranks: int, num_engines: int, expected: tuple[int, int],
) -> None:
    given = divide_cores(cores, num_ranks=num_ranks, num_engines=num_engines)
    assert (given[0] if num_ranks else 1, given[1]) == expected


def test_no_more_threads_compute_than_there_are_cores() -> None:
    for cores in range(1, 40):
        for num_ranks in range(1, 6):
            for num_engines in range(6):
                rank, engine = divide_cores(cores, num_ranks=num_ranks, num_engines=num_engines)
                assert rank >= 1 and engine >= 1
                assert num_ranks * rank + num_engines * engine <= max(cores, num_ranks + num_engines)


def test_what_is_given_stays_and_the_others_get_what_it_leaves() -> None:
    assert threads(config(train__threads="5"), cores=8) == (5, 3)
    assert threads(config(inference__threads="6"), cores=8) == (2, 6)
    assert threads(config(inference__threads="6", inference__num_engines="2"), cores=8) == (1, 6)
    given = config(train__threads="1", inference__threads="2")
    assert choose_threads(given.for_plan, cores=64) == given.for_plan


def test_only_what_the_run_starts_is_counted() -> None:
    assert threads(config(), cores=8) == (4, 4)
    assert threads(config(inference__urls='["http://there:1", "http://there:2"]'), cores=8) == (8, 0)
    assert threads(config(inference__num_engines="2"), cores=8, trains=False) == (0, 4)


def test_a_machine_of_spmd_mode_divides_its_cores_among_the_ranks_that_it_has_and_the_first_with_the_engines() -> None:
    spmd = config(run__mode="spmd", train__num_ranks="4", inference__num_engines="2")
    assert threads(spmd, cores=8, rank_info=RankInfo(rank=1, world=4, local_rank=1, local_world=2)) == (2, 2)
    assert threads(spmd, cores=8, rank_info=RankInfo(rank=3, world=4, local_rank=1, local_world=2)) == (4, 0)


def test_beside_an_accelerator_a_few_are_enough() -> None:
    devices = {"train__devices_per_rank": "1", "inference__devices_per_engine": "1"}
    assert threads(config(**devices), cores=64) == (4, 4)
    assert threads(config(**devices, train__threads="9"), cores=64) == (9, 4)
    assert threads(config(train__devices_per_rank="1"), cores=64) == (4, 32)


def test_on_a_ray_cluster_each_asks_for_one_core_and_on_a_ray_of_its_own_a_run_divides_them() -> None:
    assert threads(config(cluster__launcher="ray"), cores=8) == (4, 4)
    assert threads(config(cluster__launcher="ray", cluster__ray_address="head:6379"), cores=8) == (1, 1)


def test_the_cores_are_those_that_this_process_may_use() -> None:
    allowed = os.sched_getaffinity(0)
    assert 1 <= usable_cores() <= len(allowed)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        assert usable_cores() == 1
    finally:
        os.sched_setaffinity(0, allowed)


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text + "\n")


def test_a_quota_of_a_group_or_of_one_that_holds_it_bounds_the_cores(tmp_path: Path) -> None:
    mount, membership = tmp_path / "cgroup", tmp_path / "membership"
    membership.write_text("0::/slice/service\n")
    write(mount / "slice" / "service", cpu__max="max 100000")
    assert list(quotas(mount, membership)) == []
    write(mount / "slice", cpu__max="350000 100000")
    assert list(quotas(mount, membership)) == [3]
    write(mount, cpu__max="50000 100000")
    assert list(quotas(mount, membership)) == [3, 1], "half a core is one"


def test_a_quota_of_control_groups_of_version_1_is_read_also_where_a_container_hides_the_path(tmp_path: Path) -> None:
    mount, membership = tmp_path / "cgroup", tmp_path / "membership"
    membership.write_text("4:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n0::/docker/abc\n")
    write(mount / "cpu", cpu__cfs_quota_us="-1", cpu__cfs_period_us="100000")
    assert list(quotas(mount, membership)) == []
    write(mount / "cpu", cpu__cfs_quota_us="400000")
    assert list(quotas(mount, membership)) == [4]


def test_no_control_groups_are_no_quota(tmp_path: Path) -> None:
    assert list(quotas(tmp_path, tmp_path / "membership")) == []
