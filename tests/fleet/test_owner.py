"""Runs on engines by URL: each has them for itself, a later start takes them over, and an evaluation only asks."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from offbeat.engine.inside.owners import read
from offbeat.engine.options import EngineOptions
from offbeat.engine.server import EngineServer
from offbeat.errors import ConfigError, EngineError, StorageError
from offbeat.fleet.engine_group import EngineGroup
from offbeat.fleet.fleet import Fleet, open_fleet
from offbeat.fleet.owner import begin_start, leaving
from offbeat.telemetry.console import Console
from offbeat.telemetry.record import RunRecord
from offbeat.workers.local import LocalLauncher
from small_run import small_config


@pytest.fixture
def url(model_dir: str) -> Iterator[str]:
    server = EngineServer(EngineOptions(model=model_dir))
    try:
        yield server.start()
    finally:
        server.stop()


def test_each_start_of_a_run_has_the_next_number_and_a_run_that_begins_anew_is_another(tmp_path: Path) -> None:
    starts = [read(begin_start(tmp_path / "small", exclusive=True)) for _ in range(2)]
    assert [start for _, start, _ in starts] == [1, 2] and {run for run, _, _ in starts} == {starts[0][0]}
    assert starts[0][0].startswith("small-")
    other = begin_start(tmp_path / "other" / "small", exclusive=False)
    assert read(other)[0] != starts[0][0] and read(other)[1:] == (1, "shared")
    assert read(leaving(other)) == (read(other)[0], 1, "leaves")


def test_a_file_of_starts_that_is_not_as_it_was_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "owner.json").write_text("[1]")
    with pytest.raises(StorageError, match="owner.json, which counts the starts of the run, cannot be read and written"):
        begin_start(tmp_path, exclusive=True)


def test_an_engine_by_url_belongs_to_one_run_until_that_ends_and_a_later_start_takes_it_over(
    url: str, tmp_path: Path, model_dir: str,
) -> None:
    async def begin(stack: AsyncExitStack, name: str, record: RunRecord) -> Fleet:
        config = small_config(tmp_path, model_dir, run__name=name, inference__urls=json.dumps([url]))
        group = await EngineGroup.start(LocalLauncher(stop_timeout_s=1), config.for_engines, log_dir=tmp_path)
        return await open_fleet(
            stack, group, await group.serve(model=model_dir, tokenizer="", version=-1), config.for_engines, record, model=model_dir)

    async def body(record: RunRecord) -> None:
        async with AsyncExitStack() as first, AsyncExitStack() as second, AsyncExitStack() as other:
            old = (await begin(first, "mine", record)).pool.client("engine 0")
            with pytest.raises(ConfigError, match=r"urls names http.*used by start 1 of the run mine-.*shared with the run theirs-"):
                await begin(other, "theirs", record)
            new = (await begin(second, "mine", record)).pool.client("engine 0")
            with pytest.raises(EngineError, match="409: this engine is used by start 2 of the run mine-[0-9a-f]+, and start 1 is an"):
                await old.health(timeout_s=20)
            assert (await new.health(timeout_s=20))["status"] == "ok"
            await first.aclose()  # an earlier start that ends takes nothing away
            with pytest.raises(ConfigError):
                await begin(other, "theirs", record)
            await second.aclose()
            await begin(other, "theirs", record)

    with RunRecord(tmp_path / "record", trace=False, console=Console("quiet")) as record:
        asyncio.run(body(record))
