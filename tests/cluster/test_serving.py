"""Engines in service: who is asked, and what is told of one that leaves. Whole runs are in the tests of the controller."""

import asyncio
import io
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from offbeat.cluster.engine_group import EngineGroup
from offbeat.cluster.serving import make_dialect, open_serving
from offbeat.errors import ConfigError
from offbeat.inference.dialects.embedded import EmbeddedDialect
from offbeat.inference.dialects.sglang import SGLangDialect
from offbeat.inference.dialects.vllm import VllmDialect
from offbeat.telemetry.console import Console
from offbeat.telemetry.jsonl import read_json_lines
from offbeat.telemetry.record import RunRecord
from small_run import small_config


def test_a_quarantine_is_recorded_and_shown_once(tmp_path: Path) -> None:
    shown, config = io.StringIO(), small_config(tmp_path)

    async def main(record: RunRecord) -> None:
        async with AsyncExitStack() as stack:
            urls = {"engine 0": "http://127.0.0.1:9", "engine 1": "http://127.0.0.1:9"}
            serving = await open_serving(stack, EngineGroup(config), urls, config, record, model="model")
            serving.pool.quarantine("engine 0", "its process died")
            serving.pool.quarantine("engine 0", "cannot be reached")  # the first reason stands
            assert set(serving.pool.healthy) == {"engine 1"}

    with RunRecord(tmp_path / "run", trace=False, console=Console("plain", stream=shown)) as record:
        asyncio.run(main(record))
    (event,) = read_json_lines(tmp_path / "run" / "events.jsonl")
    assert (event["kind"], event["engine"], event["reason"]) == ("quarantine", "engine 0", "its process died")
    assert "engine 0 is quarantined: its process died" in shown.getvalue()


def test_an_engine_by_url_that_is_not_there_is_named_with_its_url(tmp_path: Path) -> None:
    config = small_config(tmp_path, inference__urls='["http://127.0.0.1:9"]')

    async def main(record: RunRecord) -> None:
        async with AsyncExitStack() as stack:
            await open_serving(stack, EngineGroup(config), {"engine 0": "http://127.0.0.1:9"}, config, record, model="model")

    with RunRecord(tmp_path / "run", trace=False, console=Console("quiet")) as record:
        with pytest.raises(ConfigError, match=r"inference.urls names http://127.0.0.1:9, but engine 0 .* cannot be reached"):
            asyncio.run(main(record))


@pytest.mark.parametrize(("engine", "dialect"), [("embedded", EmbeddedDialect), ("vllm", VllmDialect), ("sglang", SGLangDialect)])
def test_each_kind_of_engine_has_its_dialect(engine: str, dialect: type, tmp_path: Path) -> None:
    assert type(make_dialect(small_config(tmp_path, inference__engine=engine), "model")) is dialect
