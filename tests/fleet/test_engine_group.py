"""Engines as processes: started, watched, and told apart when they die."""

import asyncio
import os
import signal
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from far import far_disk
from offbeat.data import wire
from offbeat.engine.options import EngineStart
from offbeat.errors import ConfigError, DeathError, EngineError, RefusedError, WorkerError
from offbeat.fleet.engine_group import EngineAddresses, EngineGroup, engine_options, raise_death, serve_one
from offbeat.fleet.server_worker import ServerStart
from offbeat.inference.client import EngineClient, EngineSession
from offbeat.inference.sampling import Sampling
from offbeat.process.child import Child
from offbeat.workers.local import LocalLauncher
from small_run import small_config
from waiting import until


def pid_of(worker: object) -> int:
    assert isinstance(worker, Child)
    return worker.pid


@pytest.mark.drill
def test_engines_serve_and_one_that_dies_is_told_once_and_restarted(tmp_path: Path, model_dir: str) -> None:
    config = small_config(tmp_path, model_dir, inference__num_engines="2", run__seed="3")
    deaths: list[tuple[str, str]] = []

    async def main() -> None:
        async with LocalLauncher(stop_timeout_s=5) as launcher, EngineSession() as http:
            group = await EngineGroup.start(launcher, config.for_engines, log_dir=tmp_path)
            urls = (await group.serve(model=model_dir, tokenizer=model_dir, version=-1)).urls
            assert list(urls) == ["engine 0", "engine 1"]

            async def check(url: str) -> None:
                with pytest.raises(RefusedError, match="answered /health with 401: this engine wants its key"):
                    await EngineClient("engine", url, http.session).health(timeout_s=60)
                client = EngineClient("engine", url, http.session, api_key=group.key)
                assert (await client.health(timeout_s=60))["version"] == -1
                assert len(await client.generate((5, 6), Sampling(3), n=2, timeout_s=60)) == 2

            for url in urls.values():
                await check(url)
            watching = asyncio.create_task(group.watch(lambda *death: deaths.append(death)))
            for restarts in (True, False):
                deaths.clear()
                os.kill(pid_of(group.workers[1]), signal.SIGKILL)
                await until(lambda: deaths)
                await asyncio.sleep(0.6)
                assert deaths == [("engine 1", "its process died")]
                if restarts:
                    await check(await group.restart("engine 1"))
            await check(urls["engine 0"])
            os.kill(pid_of(group.workers[0]), signal.SIGSTOP)
            await check(await group.restart("engine 0"))
            assert not watching.done()
            watching.cancel()

    asyncio.run(main())
    assert (tmp_path / "engine-0.log").exists()


def test_each_run_has_a_key_of_its_own_which_nothing_shows(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    keys = [EngineGroup(config.for_engines).key for _ in range(2)]
    assert keys[0] != keys[1] and all(len(key) == 43 for key in keys)
    options = engine_options(config.for_engines, "model", "tokenizer", -1, 0, api_key=keys[0])
    assert options.api_key == keys[0]
    server = ServerStart((), {"VLLM_API_KEY": keys[0]}, "", 1.0, keys[0])
    for shown in (options, server, EngineAddresses({}, keys[0]), EngineStart(keys[0])):
        assert keys[0] not in repr(shown)


def test_engines_by_url_are_named_and_nothing_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = small_config(tmp_path, inference__urls='["http://a:1", "http://b:2"]')
    monkeypatch.setenv("OFFBEAT_API_KEY", "theirs")

    async def main() -> None:
        group = await EngineGroup.start(LocalLauncher(stop_timeout_s=1), config.for_engines, log_dir=tmp_path)
        addresses = await group.serve(model="", tokenizer="", version=-1)
        assert addresses == EngineAddresses({"engine 0": "http://a:1", "engine 1": "http://b:2"}, "theirs", addresses.owner)
        assert addresses.owner.startswith("small-") and addresses.owner.endswith(" 1 exclusive")
        assert not group.workers

    asyncio.run(main())


def test_engines_of_another_make_need_their_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="run `make vllm`"):
        config = small_config(tmp_path, inference__engine="vllm").for_engines
        asyncio.run(EngineGroup.start(LocalLauncher(stop_timeout_s=1), config, log_dir=tmp_path))


def test_options_come_from_the_configuration_and_seeds_differ(tmp_path: Path) -> None:
    config = small_config(
        tmp_path, inference__max_running="7", inference__forward="hf", inference__max_prefill_per_round="99", run__seed="3")
    options = [engine_options(config.for_engines, "model", "tokenizer", -1, index) for index in range(2)]
    assert (options[0].model, options[0].tokenizer, options[0].version) == ("model", "tokenizer", -1)
    assert (options[0].max_running, options[0].forward, options[0].max_prefill_per_round) == (7, "hf", 99)
    assert options[0].seed != options[1].seed
    assert [engine_options(small_config(tmp_path, inference__quantization=form).for_engines, "model", "", -1, 0).quantization
            for form in ("none", "int8")] == ["none", "int8"]


def test_one_engine_outside_of_any_run_ends_with_its_context(tmp_path: Path, model_dir: str) -> None:
    options = engine_options(small_config(tmp_path).for_engines, model_dir, "", 0, 0)

    async def main() -> int:
        async with serve_one(options, host="127.0.0.1", port=0, threads=1, device=None) as (url, worker):
            async with EngineSession() as http:
                assert (await EngineClient("engine", url, http.session).health(timeout_s=60))["status"] == "ok"
            os.kill(pid_of(worker), signal.SIGKILL)
            await until(lambda: not worker.alive)
            with pytest.raises(WorkerError, match="was killed by SIGKILL"):
                await raise_death(worker)
            return pid_of(worker)

    assert not psutil.pid_exists(asyncio.run(main()))


def test_the_message_comes_back_equal():
    message = EngineAddresses({"engine 0": "http://127.0.0.1:1"}, "the-key")
    assert wire.decode(EngineAddresses, wire.encode(message)) == message


def test_a_folder_is_sent_to_an_engine_on_another_machine_unless_it_is_shared(tmp_path: Path) -> None:
    def die(method: str, _payload: bytes) -> None:
        if method == "begin_arrival" and not (tmp_path / "far").exists():
            raise DeathError("engine 1 died with its Ray actor")

    for folder in (tmp_path / "run" / "v1", tmp_path / "shared" / "v1"):
        folder.mkdir(parents=True)
        (folder / "adapter").write_bytes(b"weights")
    group = EngineGroup(small_config(tmp_path, weights__dir=str(tmp_path / "shared")).for_engines)
    near, far = SimpleNamespace(name="engine 0", disk=None), SimpleNamespace(name="engine 1", disk=far_disk(tmp_path / "far", meddle=die))
    group.workers = [near, far]  # pyright: ignore[reportAttributeAccessIssue]

    async def main() -> None:
        given = str(tmp_path / "run" / "v1")
        with pytest.raises(EngineError, match=r"engine 1 could not be sent .*run/v1: engine 1 died with its Ray actor"):
            await group.deliver("engine 1", given, 60)
        (tmp_path / "far").mkdir()
        assert await group.deliver("engine 0", given, 60) == given
        there = await group.deliver("engine 1", given, 60)
        assert there != given and (Path(there) / "adapter").read_bytes() == b"weights"
        assert await group.deliver("engine 1", str(tmp_path / "shared" / "v1"), 60) == str(tmp_path / "shared" / "v1")

    asyncio.run(main())
