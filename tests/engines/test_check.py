"""Servers that somebody else has started, and that cannot do what a run needs of them: one sentence each."""

import asyncio
import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from contract import WITH_VLLM, Engine, Models
from offbeat.engine import inside
from offbeat.engine.options import EngineAddress
from offbeat.errors import EngineError
from offbeat.fleet.server_worker import ServerStart
from offbeat.inference.dialects.vllm import VllmDialect
from offbeat.workers.local import LocalLauncher
from offbeat.workers.worker import WorkerSpec, ask

pytestmark = [pytest.mark.timeout(400), pytest.mark.skipif(not WITH_VLLM, reason="make test-vllm runs it")]
FLAGS = ("--dtype", "float32", "--enforce-eager", "--kv-cache-memory-bytes", "134217728")


@pytest.fixture(scope="module")
def plain(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """vLLM as anybody starts it."""
    model = models.folder()
    python = str(Path(".venv-vllm/bin/python").absolute())
    start = ServerStart((python, "-m", "vllm.entrypoints.cli.main", "serve", model, *FLAGS), {"VLLM_NO_USAGE_STATS": "1"}, "127.0.0.1", 240)
    launcher = LocalLauncher(stop_timeout_s=5)

    async def serve() -> str:
        log = tmp_path_factory.mktemp("plain") / "log"
        worker = await launcher.start(WorkerSpec("plain", "offbeat.fleet.server_worker:ServerWorker", log), timeout_s=60)
        return (await ask(worker, "start", start, EngineAddress, timeout_s=250)).url

    with asyncio.Runner() as runner, ExitStack() as stack:
        stack.callback(lambda: runner.run(launcher.__aexit__(None)))
        yield Engine("vllm", runner.run(serve()), VllmDialect(model=model, whole_weights=True, lora=True), model, model)


def check(engine: Engine, **needs: object) -> None:
    settings = {"model": engine.model, "whole_weights": False, "lora": False} | needs
    engine.dialect = VllmDialect(**settings)  # type: ignore[arg-type]
    engine.run(lambda client: client.check(timeout_s=60))


def test_a_server_of_another_model(plain: Engine, models: Models) -> None:
    with pytest.raises(EngineError, match=r"engine 0 serves '.*tied-0' instead of 'Qwen/Qwen3-8B'; start it on that model"):
        check(plain, model="Qwen/Qwen3-8B")


def test_a_server_without_our_endpoints(plain: Engine) -> None:
    with pytest.raises(EngineError, match="cannot take new weights: it runs without --middleware vllm_inside.Inside"):
        check(plain, whole_weights=True)


def test_a_server_without_adapters(plain: Engine) -> None:
    with pytest.raises(EngineError, match="cannot load adapters: it runs without --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"):
        check(plain, lora=True)


def test_a_server_whose_log_probabilities_are_of_another_distribution(plain: Engine) -> None:
    with pytest.raises(EngineError, match="runs without --logprobs-mode processed_logprobs"):
        check(plain)


def test_a_version_of_vllm_without_what_is_needed_says_so_when_it_starts() -> None:
    program = """
from vllm.engine.protocol import EngineClient
from vllm.v1.engine.async_llm import AsyncLLM
del AsyncLLM.update_weight_version, EngineClient.update_weight_version
import vllm_inside
try:
    vllm_inside.Inside(None)
except RuntimeError as exc:
    print(exc)
"""
    env = os.environ | {"PYTHONPATH": str(Path(inside.__file__ or "").parent)}
    done = subprocess.run([".venv-vllm/bin/python", "-c", program], env=env, capture_output=True, text=True, timeout=200, check=True)
    assert re.search(r"vLLM 0.*has no AsyncLLM.update_weight_version, which Offbeat needs; use vLLM 0.32 or later", done.stdout)


def test_a_switch_that_fails_to_pause_or_to_resume_is_tried_again() -> None:
    program = """
import asyncio, json
from types import SimpleNamespace
import vllm_inside

vllm_inside.check_interface = vllm_inside.check_weights = lambda *_, **__: None

class Engine:
    '''Its calls in order; the next call of the name in `fails` raises.'''
    model_config = SimpleNamespace(hf_config=None, model="m")
    live, fails = "0", ""

    async def _call(self, name):
        print(name, end=" ")
        if name == self.fails:
            self.fails = ""
            raise OSError(name + " broke")

    async def pause_generation(self, **_): await self._call("pause")
    async def resume_generation(self): await self._call("resume")
    async def collective_rpc(self, *_, **__):
        await self._call("load")
        return [({"fingerprint": "f", "num_unread": 0}, "")]

    async def reset_prefix_cache(self): pass
    async def get_weight_version(self): return self.live
    async def update_weight_version(self, version): self.live = version

async def main():
    engine, inside = Engine(), vllm_inside.Inside(None)
    for version, fails in ((1, "pause"), (1, "resume"), (1, ""), (1, ""), (2, "load"), (2, "")):
        engine.fails = fails
        if version != int(engine.live) or inside._broken:
            inside._staged[version] = vllm_inside.Staged("a", "f", None)
        try:
            await inside._switch(engine, json.dumps({"version": version}).encode())
        except OSError as exc:
            print("raised:", exc, end=" ")
        print("broken" if inside._broken else "fine")

asyncio.run(main())
"""
    env = os.environ | {"PYTHONPATH": str(Path(inside.__file__ or "").parent)}
    done = subprocess.run([".venv-vllm/bin/python", "-c", program], env=env, capture_output=True, text=True, timeout=200, check=True)
    assert done.stdout.splitlines()[-6:] == [
        "pause resume raised: pause broke fine",  # the old weights go on
        "pause load resume raised: resume broke broken",
        "pause load resume fine",  # not "already live"
        "fine",
        "pause load pause raised: load broke broken",
        "pause load resume fine",
    ]
