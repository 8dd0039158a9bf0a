"""Engines that load the model while the ranks do."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from offbeat.data import wire
from offbeat.engine.options import EngineAddress
from offbeat.errors import ConfigError
from offbeat.runs.engine_start import start_engines
from small_run import small_config


class Launcher:
    """Starts engines that note when they are told to load."""

    def __init__(self, *, disk: object = None) -> None:
        self.loaded = asyncio.Event()
        self._disk = disk

    async def reserve(self, specs: Any, *, timeout_s: float) -> None: ...

    async def start(self, spec: Any, *, timeout_s: float) -> Any:
        async def call(method: str, _payload: Any, **_: Any) -> bytes:
            assert method == "start"
            self.loaded.set()
            return wire.encode(EngineAddress("http://127.0.0.1:1"))

        return SimpleNamespace(name=spec.name, host="127.0.0.1", disk=self._disk, call=call)


def start(launcher: Any, root: Path, may_load: asyncio.Event, *, builds: bool = False) -> Any:
    return start_engines(
        launcher, small_config(root).for_engines, log_dir=root, model="model", tokenizer="", builds=builds, may_load=may_load)


def test_engines_load_as_soon_as_they_may(tmp_path: Path) -> None:
    async def main() -> None:
        launcher, may_load = Launcher(), asyncio.Event()
        task = asyncio.create_task(start(launcher, tmp_path, may_load))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not launcher.loaded.is_set()
        may_load.set()
        engines, addresses = await task
        assert addresses.urls == {"engine 0": "http://127.0.0.1:1"} and [worker.name for worker in engines.workers] == ["engine 0"]

    asyncio.run(main())


def test_a_model_that_is_made_where_an_engine_does_not_see_it_is_refused(tmp_path: Path) -> None:
    async def main() -> None:
        with pytest.raises(ConfigError, match=r"makes a model in the run's folder .* which engine 0 cannot see"):
            await start(Launcher(disk=object()), tmp_path, asyncio.Event(), builds=True)

    asyncio.run(main())
