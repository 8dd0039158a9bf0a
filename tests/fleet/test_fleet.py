"""Engines in service: who is asked, and what is told of one that leaves. Whole runs are in the tests of the controller."""

import asyncio
import io
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from offbeat.config.root import Config
from offbeat.engine.options import EngineOptions
from offbeat.engine.server import EngineServer
from offbeat.errors import ConfigError
from offbeat.fleet.engine_group import EngineAddresses, EngineGroup
from offbeat.fleet.fleet import open_fleet
from offbeat.fleet.kinds import MAKERS
from offbeat.model.peft_io import Adapter, write_adapter
from offbeat.telemetry.console import Console
from offbeat.telemetry.jsonl import read_json_lines
from offbeat.telemetry.record import RunRecord
from offbeat.weights.proof import Outcome
from offbeat.weights.protocol import Manifest, Proof
from small_run import small_config


def test_a_quarantine_is_recorded_and_shown_once(tmp_path: Path) -> None:
    shown, config = io.StringIO(), small_config(tmp_path)

    async def main(record: RunRecord) -> None:
        async with AsyncExitStack() as stack:
            addresses = EngineAddresses({"engine 0": "http://127.0.0.1:9", "engine 1": "http://127.0.0.1:9"}, "")
            fleet = await open_fleet(stack, EngineGroup(config.for_engines), addresses, config.for_engines, record, model="model")
            fleet.pool.quarantine("engine 0", "its process died")
            fleet.pool.quarantine("engine 0", "cannot be reached")  # the first reason stands
            assert set(fleet.pool.healthy) == {"engine 1"}

    with RunRecord(tmp_path / "run", trace=False, console=Console("plain", stream=shown)) as record:
        asyncio.run(main(record))
    (event,) = read_json_lines(tmp_path / "run" / "events.jsonl")
    assert (event["kind"], event["engine"], event["reason"]) == ("quarantine", "engine 0", "its process died")
    assert "engine 0 is quarantined: its process died" in shown.getvalue()


def test_an_engine_by_url_that_is_not_there_is_named_with_its_url(tmp_path: Path) -> None:
    config = small_config(tmp_path, inference__urls='["http://127.0.0.1:9"]')

    async def main(record: RunRecord) -> None:
        async with AsyncExitStack() as stack:
            addresses = EngineAddresses({"engine 0": "http://127.0.0.1:9"}, "")
            await open_fleet(stack, EngineGroup(config.for_engines), addresses, config.for_engines, record, model="model")

    with RunRecord(tmp_path / "run", trace=False, console=Console("quiet")) as record:
        with pytest.raises(ConfigError, match=r"inference.urls names http://127.0.0.1:9, but engine 0 .* cannot be reached"):
            asyncio.run(main(record))


def opened(config: Config, url: str, root: Path, *, model: str) -> int:
    """The version that an engine by URL says it serves, asked by the pool's client."""

    async def main(record: RunRecord) -> int:
        async with AsyncExitStack() as stack:
            engines = EngineGroup(config.for_engines)
            addresses = await engines.serve(model=model, tokenizer=model, version=-1)
            assert addresses.urls == {"engine 0": url}
            fleet = await open_fleet(stack, engines, addresses, config.for_engines, record, model=model)
            return (await fleet.pool.client("engine 0").health(timeout_s=60))["version"]

    with RunRecord(root / "run", trace=False, console=Console("quiet")) as record:
        return asyncio.run(main(record))


def test_an_engine_by_url_has_to_serve_the_model_and_the_rank_and_gets_its_key(
    tmp_path: Path, model_dir: str, monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = EngineServer(EngineOptions(model=model_dir, api_key="secret", version=3, max_adapter_rank=4))
    url = server.start()
    try:
        settings = {"inference__urls": f'["{url}"]', "model__lora__rank": "4"}
        with pytest.raises(ConfigError, match=f"inference.urls names {url}, but engine 0 answered /health with 401"):
            opened(small_config(tmp_path, **settings), url, tmp_path, model=model_dir)
        monkeypatch.setenv("OFFBEAT_API_KEY", "secret")
        assert opened(small_config(tmp_path, **settings), url, tmp_path, model=model_dir) == 3
        with pytest.raises(ConfigError, match=f"engine 0 serves '{Path(model_dir).name}' instead of 'runs/other'"):
            opened(small_config(tmp_path, **settings), url, tmp_path, model="runs/other")
        with pytest.raises(ConfigError, match="takes adapters of rank <= 4 and model.lora.rank is 5"):
            opened(small_config(tmp_path, **settings | {"model__lora__rank": "5"}), url, tmp_path, model=model_dir)
    finally:
        server.stop()


def test_a_run_that_starts_again_unloads_what_it_has_left_in_engines_by_url_and_nothing_of_others(tmp_path: Path, model_dir: str) -> None:
    server = EngineServer(EngineOptions(model=model_dir))
    url = server.start()
    config = small_config(tmp_path, inference__urls=f'["{url}"]', model__lora__rank="4")
    weights, others = config.weights_dir.resolve(), tmp_path / "others"
    left = {"policy@60": weights / "v00000060", "policy.3fa9c1@61": weights / "v00000061-3fa9c1"}
    stays = {"policy.77aa00@3": others / "v00000003-77aa00", "alice@3": weights / "alice" / "v00000003"}
    for folder in (left | stays).values():
        pair = (torch.randn(4, 32), torch.randn(32, 4))
        write_adapter(Adapter(4, 0.1, {"model.layers.0.self_attn.o_proj": pair}), folder, base_model="base")

    async def main(record: RunRecord) -> None:
        async with AsyncExitStack() as stack:
            addresses = EngineAddresses({"engine 0": url}, "")
            fleet = await open_fleet(stack, EngineGroup(config.for_engines), addresses, config.for_engines, record, model=model_dir)
            client = fleet.pool.client("engine 0")
            for name, folder in (left | stays).items():
                await client.load_adapter(name, str(folder), timeout_s=60)
            await fleet.unload_leftovers(weights)
            assert await client.adapters(timeout_s=60) == {name: str(folder) for name, folder in stays.items()}
            assert fleet.pool.healthy

    try:
        with RunRecord(tmp_path / "run", trace=False, console=Console("quiet")) as record:
            asyncio.run(main(record))
    finally:
        server.stop()
    events = read_json_lines(tmp_path / "run" / "events.jsonl")
    assert {event["adapter"] for event in events if event["kind"] == "leftover"} == set(left)


def test_an_engine_that_is_restarted_is_judged_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, engines = small_config(tmp_path), EngineGroup(small_config(tmp_path).for_engines)

    async def restart(name: str) -> str:
        return f"another {name}"

    async def main(record: RunRecord) -> None:
        monkeypatch.setattr(engines, "restart", restart)
        async with AsyncExitStack() as stack:
            addresses = EngineAddresses({"engine 0": "http://127.0.0.1:9"}, "")
            fleet = await open_fleet(stack, engines, addresses, config.for_engines, record, model="model")
            for version, logprob in ((1, -1.0), (2, -1.0004)):
                wanted = Manifest(version, "", "", (1, 2), (logprob,))
                verdict = fleet.judge.judge("engine 0", wanted, Proof(version, None, (-1.0,)))
            assert verdict.refused
            assert await fleet._restart("engine 0") == "another engine 0"
            assert fleet.judge.judge("engine 0", wanted, Proof(2, None, (-1.0,))).outcome is Outcome.UNSURE

    with RunRecord(tmp_path / "run", trace=False, console=Console("quiet")) as record:
        asyncio.run(main(record))


@pytest.mark.parametrize(("whole_every", "keeps"), [("1", False), ("2", True)])
def test_vllm_is_asked_to_keep_weights_where_their_changes_are_published(whole_every: str, keeps: bool, tmp_path: Path) -> None:
    asked: list[Mapping[str, Any]] = []

    class Wire:
        async def call(self, method: str, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
            asked.append(body)
            return {}

    config = small_config(tmp_path, inference__engine="vllm", weights__whole_every_versions=whole_every)
    dialect = MAKERS[config.inference.engine].dialect(config.for_engines, "model")
    asyncio.run(dialect.stage(cast(Any, Wire()), Manifest(1, "v1", "", (), ())))
    assert [body.get("keep", False) for body in asked] == [keeps]
