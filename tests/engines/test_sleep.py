"""Sleep of every engine: memory is given back, requests wait and go on, and only weights that were proven serve afterwards."""

import asyncio
import os
import subprocess
from pathlib import Path

import pytest

from contract import CANARY, WITH_VLLM, Engine, Models
from offbeat.engine import inside
from offbeat.errors import RefusedError
from offbeat.inference.client import EngineClient
from offbeat.inference.sampling import Sample, Sampling

pytestmark = pytest.mark.timeout(400)  # the first test of a kind starts the servers
PROMPT = (13, 14, 15, 5, 6)
TIMEOUT_S = 60.0


def generating(client: EngineClient, num_tokens: int) -> "asyncio.Task[list[Sample]]":
    return asyncio.create_task(client.generate(PROMPT, Sampling(num_tokens, ignore_eos=True), n=2, timeout_s=TIMEOUT_S))


def largest_gap(sample: Sample, expected: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(sample.logprobs, expected, strict=True))


def test_requests_in_flight_go_on_under_the_version_that_wakes_a_sleeping_engine(engine: Engine, models: Models) -> None:
    engine.serve(models.folder())
    old, folder = engine.version, models.folder(1)

    async def body(client: EngineClient) -> list[Sample]:
        (running,) = await engine.sampling(
            lambda: client.generate(PROMPT, Sampling(400, ignore_eos=True), n=2, timeout_s=TIMEOUT_S))
        for _ in range(2):
            await client.sleep(keep_weights=False, timeout_s=TIMEOUT_S)
        assert not (await client.health(timeout_s=TIMEOUT_S)).get("paused"), "nobody else has paused it"
        late = generating(client, 5)
        done, _ = await asyncio.wait([running, late], timeout=0.5)
        assert not done
        with pytest.raises(RefusedError, match="its weights are gone, because it sleeps without them; stage a version and switch to it"):
            await client.wake(timeout_s=TIMEOUT_S)
        await engine.publish(client, folder)
        proof = await client.prove(CANARY, timeout_s=TIMEOUT_S)
        assert proof.version == engine.version
        assert largest_gap_of(proof.canary_logprobs, models.reference(folder).logprobs(CANARY[:1], CANARY[1:])) < 1e-4
        return [*await running, *await late]

    first, second, *others = engine.run(body)
    before, after = models.reference(models.folder()), models.reference(folder)
    for sample in (first, second):
        assert set(sample.versions) == {old, engine.version}
        changed = sample.versions.index(engine.version)
        assert set(sample.versions[:changed]) == {old} and set(sample.versions[changed:]) == {engine.version}
        tokens = tuple(sample.token_ids)
        expected = before.logprobs(PROMPT, tokens)[:changed] + after.logprobs(PROMPT, tokens)[changed:]
        assert largest_gap(sample, expected) < 1e-4
    for sample in others:
        assert set(sample.versions) == {engine.version} and largest_gap(sample, after.logprobs(PROMPT, tuple(sample.token_ids))) < 1e-4


def largest_gap_of(found: tuple[float, ...], expected: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(found, expected, strict=True))


def test_weights_that_were_kept_serve_on_also_with_an_adapter(engine: Engine, models: Models) -> None:
    if engine.kind == "vllm":
        pytest.skip("samples beside an adapter's can be wrong then, and runs refuse it: `cluster.take_turns` in docs/scaling.md")
    engine.serve(models.folder())
    reference, adapted = models.reference(models.folder()), models.reference(models.folder(), models.adapter(1))

    async def body(client: EngineClient) -> tuple[list[Sample], list[Sample]]:
        await client.load_adapter("alice@31", models.adapter(1), timeout_s=TIMEOUT_S)
        plain, by_adapter = await engine.sampling(
            lambda: client.generate(PROMPT, Sampling(300, ignore_eos=True), n=1, timeout_s=TIMEOUT_S),
            lambda: client.generate(PROMPT, Sampling(300, ignore_eos=True), n=1, timeout_s=TIMEOUT_S, adapter="alice@31"))
        await client.sleep(keep_weights=True, timeout_s=TIMEOUT_S)
        done, _ = await asyncio.wait([plain, by_adapter], timeout=0.5)
        assert not done
        for _ in range(2):  # the second time it is awake
            await client.wake(timeout_s=TIMEOUT_S)
        answers = await plain, await by_adapter
        await client.unload_adapter("alice@31", timeout_s=TIMEOUT_S)
        return answers

    (plain,), (by_adapter,) = engine.run(body)
    assert set(plain.versions) == {engine.version}
    assert largest_gap(plain, reference.logprobs(PROMPT, tuple(plain.token_ids))) < 1e-4
    assert largest_gap(by_adapter, adapted.logprobs(PROMPT, tuple(by_adapter.token_ids))) < 1e-4


@pytest.mark.skipif(not WITH_VLLM, reason="make test-vllm runs it")
def test_what_is_asked_of_vllm_with_an_accelerator_and_what_becomes_of_a_load_that_fails() -> None:
    program = """
import asyncio, json
from types import SimpleNamespace
import vllm_inside

vllm_inside.check_interface = vllm_inside.check_weights = lambda *_, **__: None
vllm_inside.current_platform = SimpleNamespace(is_cpu=lambda: False)

class Engine:
    '''Its calls in order; the next call of the name in `fails` raises.'''
    model_config = SimpleNamespace(hf_config=None, model="m", enable_sleep_mode=True)
    vllm_config = SimpleNamespace(model_config=model_config)
    live, fails = "0", ""

    async def _call(self, name):
        print(name, end=" ")
        if name == self.fails:
            self.fails = ""
            raise OSError(name + " broke")

    async def sleep(self, level, mode): await self._call(f"sleep-{level}-{mode}")
    async def wake_up(self, tags=None): await self._call("wake-" + "+".join(tags or ["all"]))
    async def pause_generation(self, **_): await self._call("pause")
    async def resume_generation(self): await self._call("resume")
    async def collective_rpc(self, name, **_):
        await self._call(name.removeprefix("offbeat_"))
        return [({"fingerprint": "f", "num_unread": 0}, "")]

    async def reset_prefix_cache(self): pass
    async def get_weight_version(self): return self.live
    async def update_weight_version(self, version): self.live = version

async def main():
    engine, inside = Engine(), vllm_inside.Inside(None)
    for act, fails in (("sleep", ""), ("1", ""), ("sleep", ""), ("2", "load"), ("2", ""), ("sleep", ""), ("3", "wake-weights"), ("3", ""),
                       ("keep", ""), ("wake", ""), ("wake", ""), ("keep", ""), ("3", "")):
        engine.fails = fails
        try:
            if act in ("sleep", "keep"):
                await inside._sleep(engine, json.dumps({"keep_weights": act == "keep"}).encode())
            elif act == "wake":
                await inside._wake(engine, b"")
            else:
                if act != engine.live or inside._broken:
                    inside._staged[int(act)] = vllm_inside.Staged("a", "f", None)
                await inside._switch(engine, json.dumps({"version": int(act)}).encode())
        except OSError as exc:
            print("raised:", exc, end=" ")
        print("broken" if inside._broken else "fine")

asyncio.run(main())
"""
    env = os.environ | {"PYTHONPATH": str(Path(inside.__file__ or "").parent)}
    done = subprocess.run([".venv-vllm/bin/python", "-c", program], env=env, capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.splitlines()[-13:] == [
        "read_back sleep-2-keep fine",
        "wake-weights load wake-kv_cache fine",
        "read_back sleep-2-keep fine",
        "wake-weights load pause raised: load broke broken",
        "wake-weights load wake-kv_cache fine",  # the weights have their memory already, which vLLM knows
        "read_back sleep-2-keep fine",
        "wake-weights pause raised: wake-weights broke broken",
        "wake-weights load wake-kv_cache fine",
        "read_back sleep-1-keep fine",
        "wake-all fine",
        "fine",
        "read_back sleep-1-keep fine",
        "wake-all fine",  # version 3 serves already
    ]
