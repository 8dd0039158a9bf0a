"""An engine's sleep: its memory is free, its requests wait, and they go on where they were under the weights that it wakes with."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from named_bytes import named_bytes
from offbeat.engine.cache import CacheShape, SlotCache
from offbeat.engine.engine import EmbeddedEngine
from offbeat.engine.loader import load_engine
from offbeat.engine.options import EngineOptions
from offbeat.engine.request import Output, Request, SamplingParams, Scored, ScoreJob
from offbeat.engine.sleep import EngineSleep
from offbeat.engine.versions import VersionSource, VersionStore
from offbeat.errors import EngineError, RefusedError
from offbeat.model.fingerprint import fingerprint
from offbeat.workers.worker import library_environment

PROMPTS = [[5, 9, 20, 3, 8, 8, 41, 7], [4], [17, 6, 5, 33]]

# In a process that keeps what it frees, as an engine's does: 100 MiB of weights, and 10 MiB of keys and values.
PROGRAM = """
import sys, psutil, torch
from transformers import AutoModelForCausalLM, Qwen3Config
from offbeat.data.tokenizer import character_tokenizer
from offbeat.engine.loader import load_engine
from offbeat.engine.options import EngineOptions
from offbeat.engine.request import Request, SamplingParams

folder, *forwards = sys.argv[1:]
tokenizer = character_tokenizer()
tokenizer.save(folder)
config = Qwen3Config(
    vocab_size=tokenizer.vocab_size, hidden_size=512, num_hidden_layers=6, num_attention_heads=8, num_key_value_heads=8, head_dim=64,
    intermediate_size=2048, max_position_embeddings=512, tie_word_embeddings=True)
AutoModelForCausalLM.from_config(config).save_pretrained(folder)
process = psutil.Process()
for forward in forwards:
    engine = load_engine(EngineOptions(model=folder, forward=forward))
    engine.submit(Request(id="a", prompt=[5] * 400, params=SamplingParams(max_new_tokens=20, ignore_eos=True)))
    for _ in range(3):
        engine.step()
    weights, cache = sum(tensor.nbytes for tensor in engine._forward.tensors().values()), engine.cache_bytes
    engine.sleep(keep_weights=True)
    kept = process.memory_info().rss
    engine.wake()
    awake = process.memory_info().rss
    engine.sleep(keep_weights=False)
    print(weights, cache, awake - kept, awake - process.memory_info().rss)
"""


@pytest.fixture(params=["direct", "hf"])
def engine(request, model_folder) -> EmbeddedEngine:
    return load_engine(EngineOptions(model=model_folder("qwen3"), forward=request.param, max_running=5))


def begin(engine: EmbeddedEngine, num_steps: int) -> None:
    for i, prompt in enumerate(PROMPTS):
        engine.submit(Request(id=str(i), prompt=prompt, params=SamplingParams(max_new_tokens=20, temperature=0, ignore_eos=True)))
    for _ in range(num_steps):
        assert engine.step() == []


def finish(engine: EmbeddedEngine) -> dict[str, Output]:
    done = {}
    while engine.has_work:
        done.update({event.request_id: event.result for event in engine.step()})
    return done


@pytest.mark.drill
def test_the_memory_of_cache_and_weights_is_free_while_it_sleeps(tmp_path) -> None:
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path), "direct", "hf"], env=os.environ | library_environment(1), capture_output=True,
        text=True, check=True, timeout=250)
    measured = [[int(number) for number in line.split()] for line in found.stdout.splitlines()]
    assert len(measured) == 2
    for weights, cache, of_cache, of_both in measured:
        assert weights > 90 << 20 and cache > 9 << 20
        assert of_cache > 0.9 * cache, "weights that are kept stay where they are on a CPU"
        assert of_both > 0.9 * (weights + cache)


@pytest.mark.parametrize("interrupt", ["recompute", "keep", "drain"])
def test_samples_in_flight_go_on_under_the_weights_that_it_wakes_with(interrupt, engine, model_folder, reference) -> None:
    old, new, folder = reference("qwen3"), reference("qwen3", 1), model_folder("qwen3", 1)
    begin(engine, 8)
    engine.sleep(keep_weights=False)
    assert engine.asleep and engine.cache_bytes == 0 and not engine.has_work and engine.step() == []
    engine.submit(Request(id="late", prompt=[7, 8], params=SamplingParams(max_new_tokens=3, temperature=0, ignore_eos=True)))
    assert not engine.has_work, "requests wait"
    engine.stage(1, VersionSource(folder), engine.prepare(folder))
    assert engine.switch(1, interrupt).done() and not engine.asleep
    outputs = finish(engine)
    assert outputs["late"].versions == [1] * 3
    for name, prompt in enumerate(PROMPTS):
        output = outputs[str(name)]
        assert output.versions == [0] * 8 + [1] * 12
        before = old.logprobs(prompt + output.token_ids)[len(prompt) - 1 :][:8]
        after = new.logprobs(prompt + output.token_ids)[len(prompt) - 1 :][8:]
        assert torch.allclose(torch.tensor(output.logprobs), torch.cat([before, after]), atol=1e-4)
    assert engine.fingerprinter()[1]() == fingerprint(named_bytes(new.model))


def test_kept_weights_come_back_and_samples_go_on(engine, reference) -> None:
    begin(engine, 8)
    for _ in range(2):
        engine.sleep(keep_weights=True)
        assert engine.asleep and engine.cache_bytes == 0 and not engine.has_work
        for _ in range(2):  # the second time it is awake
            engine.wake()
        engine.step()
    for name, output in finish(engine).items():
        prompt = PROMPTS[int(name)]
        expected = reference("qwen3").logprobs(prompt + output.token_ids)[len(prompt) - 1 :]
        assert output.versions == [0] * 20 and torch.allclose(torch.tensor(output.logprobs), expected, atol=1e-4)


def test_nothing_is_computed_with_weights_that_are_gone(engine, model_folder) -> None:
    folder = model_folder("qwen3")
    assert engine.is_staged(0, VersionSource(folder)) and engine.base_for("elsewhere") == folder
    for _ in range(2):
        engine.sleep(keep_weights=False)
    assert not engine.is_staged(0, VersionSource(folder)) and engine.base_for("elsewhere") == ""
    with pytest.raises(RefusedError, match="its weights are gone, because it sleeps without them; stage a version and switch to it"):
        engine.wake()
    with pytest.raises(EngineError, match="it sleeps, and its memory is free for others; wake it, or switch to a version"):
        engine.fingerprinter()
    with pytest.raises(RefusedError, match=r"version 0 is not staged; staged are \[\]"):
        engine.switch(0, "recompute")
    engine.submit(ScoreJob(id="score", tokens=PROMPTS[0]))
    assert not engine.has_work
    engine.stage(0, VersionSource(folder), engine.prepare(folder))
    engine.switch(0, "recompute").result(0)
    (event,) = engine.step()
    assert isinstance(event.result, Scored) and event.result.version == 0


def test_a_switch_to_the_version_that_it_keeps_wakes_it(engine) -> None:
    engine.sleep(keep_weights=True)
    assert engine.switch(0, "recompute").result(0) == 0.0 and not engine.asleep


def test_requests_may_end_while_it_sleeps(engine) -> None:
    begin(engine, 3)
    engine.sleep(keep_weights=True)
    engine.abort("1")
    assert engine.num_running == 2
    engine.wake()
    assert sorted(finish(engine)) == ["0", "2"]
    begin(engine, 3)
    engine.sleep(keep_weights=True)
    assert len(engine.pause("abort")) == 3


def test_it_is_not_put_to_sleep_while_a_switch_drains(engine, model_folder) -> None:
    folder = model_folder("qwen3", 1)
    begin(engine, 3)
    engine.stage(1, VersionSource(folder), engine.prepare(folder))
    engine.switch(1, "drain")
    with pytest.raises(EngineError, match="a switch to version 1 is draining; wait for it before it is put to sleep"):
        engine.sleep(keep_weights=False)


def test_weights_to_keep_leave_a_device_for_host_memory() -> None:
    calls: list[str] = []
    weights = {"w": torch.arange(3.0)}

    def install(prepared: dict[str, torch.Tensor]) -> None:
        calls.append("install")
        assert torch.equal(prepared["w"], weights["w"])

    forward = SimpleNamespace(
        device=torch.device("meta"), tensors=lambda: weights, release=lambda: calls.append("release"), prepare=lambda kept: kept,
        install=install)
    cache = SlotCache(CacheShape(1, 1, 4, torch.float32), device=torch.device("cpu"), max_slots=2, max_positions=8)
    rest = EngineSleep(forward, (cache,), VersionStore(live=0, folder="f"))  # type: ignore[arg-type]
    for _ in range(2):
        rest.free_memory(keep_weights=True)
    assert calls == ["release"]
    rest.restore()
    assert calls == ["release", "install"] and not rest.asleep
    rest.free_memory(keep_weights=True)
    rest.free_memory(keep_weights=False)
    assert calls == ["release", "install", "release"], "what has left the device is not released again"
    with pytest.raises(RefusedError, match="its weights are gone"):
        rest.restore()
