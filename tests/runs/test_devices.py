"""How many devices each process gets where the configuration leaves it open."""

import pytest

from offbeat.config.load import load_config
from offbeat.config.root import Config
from offbeat.errors import ConfigError
from offbeat.runs.devices import describe_devices
from offbeat.runs.plan import place
from offbeat.runs.rank_info import RankInfo

ALONE = RankInfo()


def config(**changes: str) -> Config:
    return load_config(None, [(name.replace("__", "."), value) for name, value in changes.items()])


def chosen(devices: int, *, rank_info: RankInfo = ALONE, trains: bool = True, serves: bool = True, **changes: str) -> tuple[int, int, bool]:
    """Devices of each rank and each engine, and whether they share them."""
    result = place(config(**changes), devices=devices, rank_info=rank_info, trains=trains, serves=serves)
    return result.train.devices_per_rank, result.inference.devices_per_engine, result.cluster.share_devices


def test_every_process_gets_a_device_where_there_are_enough() -> None:
    assert chosen(2) == chosen(8) == (1, 1, False)
    assert chosen(8, train__num_ranks="4", inference__num_engines="4") == (1, 1, False)
    assert chosen(6, rollout__reward="model:judge", rollout__reward_workers="4") == (1, 1, False)


def test_with_fewer_devices_engines_share_those_of_the_ranks_and_ranks_never_share() -> None:
    assert chosen(1) == (1, 1, True)
    assert chosen(2, train__num_ranks="2", inference__num_engines="8") == (1, 1, True)
    assert chosen(1, train__num_ranks="2") == (0, 0, False)


def test_engines_that_take_turns_with_the_ranks_share_their_devices_however_many_there_are() -> None:
    assert chosen(8, cluster__take_turns="true") == (1, 1, True)
    assert config(cluster__take_turns="true").cluster.devices_are_shared and not config(cluster__take_turns="true").cluster.share_devices


def test_without_devices_and_on_a_ray_cluster_nothing_is_chosen() -> None:
    assert chosen(0) == (0, 0, False)
    assert chosen(0, train__devices_per_rank="1") == (1, 0, False)  # a rank that finds none will say so
    assert chosen(8, cluster__launcher="ray", cluster__ray_address="10.0.0.1:6379") == (0, 0, False)
    assert chosen(8, cluster__launcher="ray") == (1, 1, False)
    assert chosen(1, cluster__launcher="ray") == (0, 0, False)


def test_what_is_given_stays_and_what_is_open_takes_what_is_left() -> None:
    vllm = {"inference__engine": "vllm", "inference__num_engines": "2"}
    assert chosen(8, **vllm, inference__devices_per_engine="2", train__num_ranks="4") == (1, 2, False)
    assert chosen(6, **vllm, inference__devices_per_engine="2", train__num_ranks="4") == (0, 2, False)
    assert chosen(4, **vllm, inference__devices_per_engine="2", train__num_ranks="4", cluster__share_devices="true") == (1, 2, True)
    assert chosen(4, train__devices_per_rank="1", train__num_ranks="4") == (1, 0, False)


def test_only_what_the_run_starts_is_counted() -> None:
    assert chosen(1, trains=False) == (0, 1, False)
    assert chosen(1, serves=False) == (1, 0, False)
    assert chosen(1, inference__urls='["http://there:1"]') == (1, 0, False)


def test_in_spmd_mode_each_machine_has_its_ranks_and_the_first_the_engines() -> None:
    spmd = {"run__mode": "spmd", "train__num_ranks": "8", "inference__num_engines": "4"}
    assert chosen(8, rank_info=RankInfo(1, 8, 1, 4), **spmd) == (1, 1, False)
    assert chosen(4, rank_info=RankInfo(5, 8, 1, 4), **spmd) == (1, 0, False)
    with pytest.raises(ConfigError, match="torchrun started 4 ranks on a machine that shows 2 devices, and each rank needs its own"):
        chosen(2, rank_info=RankInfo(1, 8, 1, 4), **spmd)
    given = spmd | {"inference__engine": "vllm", "inference__devices_per_engine": "2", "inference__num_engines": "1"}
    assert chosen(4, rank_info=RankInfo(5, 8, 1, 4), **given) == (1, 2, False)
    with pytest.raises(ConfigError, match=r"4 ranks, 1 engines of 2 devices and 0 reward models need 6 devices, and the machine of rank 0"):
        chosen(4, rank_info=RankInfo(0, 8, 0, 4), **given)  # not the CPU, since the ranks of the other machine have devices


def test_reward_models_of_evaluation_sets_need_devices_too() -> None:
    sets = {"rollout__reward": "model:ours", "evaluate__sets__other__rollout__reward": "model:other"}
    workers = int(config().rollout.reward_workers)
    assert chosen(2 + 2 * workers, **sets) == (1, 1, False)
    assert chosen(1 + 2 * workers, **sets) == (1, 1, True)


def test_engines_with_int8_weights_stay_on_the_cpu() -> None:
    assert chosen(1, inference__quantization="int8") == (1, 0, False)
    assert chosen(2, inference__quantization="int8", inference__engine="vllm") == (1, 1, False)


def test_what_was_chosen_is_said_where_there_are_devices() -> None:
    assert describe_devices(config().for_plan, devices=0) == ""
    assert describe_devices(place(config(), devices=1), devices=1) == (
        "devices: 1 device for each train rank, 1 device for each engine, of 1 that are visible, shared")
    few = config(train__num_ranks="9")
    assert describe_devices(place(few, devices=4), devices=4) == (
        "devices: the CPU for each train rank, the CPU for each engine, of 4 that are visible")
