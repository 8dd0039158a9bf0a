"""Workers that do not see the run's folder: engines get weights by broadcast, and ranks are refused."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from offbeat.errors import ConfigError
from offbeat.runs.shared_disk import apart, without_shared_disk
from small_run import small_config


def test_those_apart_are_named_in_their_order() -> None:
    workers = [SimpleNamespace(name=f"rank {rank}", shares_disk=rank == 1) for rank in range(3)]
    assert apart(workers) == ("rank 0", "rank 2")


def test_where_all_share_a_disk_nothing_changes(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    assert without_shared_disk(config, ranks=(), engines=()) is config


def test_weights_are_broadcast_to_engines_apart_unless_a_folder_is_given_for_them(tmp_path: Path) -> None:
    assert without_shared_disk(small_config(tmp_path), ranks=(), engines=("engine 0",)).weights.channel == "collective"
    given = small_config(tmp_path, weights__dir="/mnt/weights")
    assert without_shared_disk(given, ranks=(), engines=("engine 0",)) is given


@pytest.mark.parametrize(("changes", "what"), [
    ({"model__lora__rank": "4"}, "adapters, which engines read from folders"),
    ({"inference__engine": "sglang"}, "weights, which SGLang reads from folders"),
])
def test_what_travels_in_folders_alone_is_refused(changes: dict[str, str], what: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"engine 0 and engine 1 do not see the run's folder {tmp_path}/small, .*publishes {what}"):
        without_shared_disk(small_config(tmp_path, **changes), ranks=(), engines=("engine 0", "engine 1"))


def test_ranks_apart_are_refused_for_their_checkpoints(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"rank 1 does not see the run's folder {tmp_path}/small, into which all train ranks write ch"):
        without_shared_disk(small_config(tmp_path), ranks=("rank 1",), engines=())
