"""Workers that do not see the run's folder: whole weights are broadcast, and everything else travels."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from offbeat.errors import ConfigError
from offbeat.runs.shared_disk import apart, note_apart, without_shared_disk
from small_run import small_config


def test_those_apart_are_named_in_their_order_and_noted() -> None:
    workers = [SimpleNamespace(name=f"rank {rank}", disk=None if rank == 1 else "a disk") for rank in range(3)]
    assert apart(workers) == ("rank 0", "rank 2")
    notes: list[tuple[str, str]] = []
    record = SimpleNamespace(note=lambda *note: notes.append(note))
    assert note_apart(record, ()) == () and note_apart(record, ("rank 0",)) == ("rank 0",)
    note_apart(record, ("rank 0", "rank 2"))
    rest = "not see the run's folder, so files travel to and from their machines (cluster.scratch_dir)"
    assert notes == [("travels", f"rank 0 does {rest}"), ("travels", f"rank 0 and rank 2 do {rest}")]


def test_where_all_share_a_disk_nothing_changes(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    assert without_shared_disk(config.for_engines, apart=(), builds=True) is config.weights


@pytest.mark.parametrize("apart", [("engine 0",), ("rank 0",)])
def test_whole_weights_are_broadcast_where_they_would_have_to_travel(apart: tuple[str, ...], tmp_path: Path) -> None:
    assert without_shared_disk(small_config(tmp_path).for_engines, apart=apart).channel == "collective"


@pytest.mark.parametrize("changes", [
    {"model__lora__rank": "4"}, {"inference__engine": "sglang"}, {"weights__dir": "/mnt/weights"}, {"inference__urls": "['http://a:1']"},
])
def test_what_engines_read_from_folders_stays_in_folders(changes: dict[str, str], tmp_path: Path) -> None:
    given = small_config(tmp_path, **changes)
    assert without_shared_disk(given.for_engines, apart=("engine 0", "rank 1")) is given.weights


def test_a_model_that_is_made_in_the_runs_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\[model\.tiny\] makes a model in .*small, which rank 0 and rank 1 cannot see; give"):
        without_shared_disk(small_config(tmp_path).for_engines, apart=("rank 0", "rank 1"), builds=True)
