"""Where a process stands, from torchrun's variables."""

from pathlib import Path

import pytest

from offbeat.config.root import Config
from offbeat.errors import ConfigError
from offbeat.runs.rank_info import RankInfo, read_rank_info, resolve_ranks
from small_run import small_config

TORCHRUN = {
    "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500",
    "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_RUN_ID": "x",
}


def rank_info_of(config: Config, environ: dict[str, str]) -> RankInfo:
    return read_rank_info(config.run, config.train, environ)


def test_a_controller_is_alone(tmp_path: Path) -> None:
    assert rank_info_of(small_config(tmp_path), {}) == RankInfo()
    assert rank_info_of(small_config(tmp_path), {}).leads


def test_a_rank_is_what_torchrun_says(tmp_path: Path) -> None:
    rank_info = rank_info_of(small_config(tmp_path, run__mode="spmd"), TORCHRUN)
    assert rank_info == RankInfo(1, 2, 1, 2, "127.0.0.1", 29500, store_is_served=True, attempt=0)
    assert not rank_info.leads
    assert rank_info_of(small_config(tmp_path, run__mode="spmd", train__num_ranks="2"), TORCHRUN).world == 2


def test_the_resolved_configuration_has_the_ranks_that_were_started(tmp_path: Path) -> None:
    spmd = small_config(tmp_path, run__mode="spmd")
    assert resolve_ranks(spmd.run, spmd.train, rank_info_of(spmd, TORCHRUN)).num_ranks == 2
    controller = small_config(tmp_path, train__num_ranks="3")
    assert resolve_ranks(controller.run, controller.train, RankInfo()) == controller.train


@pytest.mark.parametrize(("changes", "environ", "text"), [
    ({"run__mode": "spmd"}, {}, "needs the variables that torchrun sets, and RANK, WORLD_SIZE, .* are missing; start it as torchrun"),
    ({"run__mode": "spmd"}, TORCHRUN | {"MASTER_PORT": ""}, "MASTER_PORT are missing"),
    ({"run__mode": "spmd"}, TORCHRUN | {"RANK": "one"}, "RANK must be a whole number, got 'one'"),
    ({"run__mode": "spmd"}, TORCHRUN | {"RANK": "2"}, "RANK must be 0 to WORLD_SIZE - 1 = 1, got 2"),
    ({"run__mode": "spmd", "train__num_ranks": "3"}, TORCHRUN, "train.num_ranks = 3 and torchrun's WORLD_SIZE = 2 differ"),
    ({}, TORCHRUN, "torchrun started 2 processes, but run.mode = 'controller' needs a single one"),
])
def test_a_place_that_cannot_be_is_refused(tmp_path: Path, changes: dict[str, str], environ: dict[str, str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        rank_info_of(small_config(tmp_path, **changes), environ)
