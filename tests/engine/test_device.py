"""The engine on another device than the CPU, without having one: all its tensors are there, and the host waits for it once per step."""

import itertools
from collections.abc import Callable

import pytest
import torch

from accelerator import DEVICE, Accelerator, Held
from offbeat.chat.shaping import Shaping
from offbeat.engine.engine import EmbeddedEngine
from offbeat.engine.loader import load_engine
from offbeat.engine.options import EngineOptions
from offbeat.engine.request import Output, Request, SamplingParams, Scored, ScoreJob
from offbeat.engine.versions import VersionSource
from offbeat.model.peft_io import read_adapter
from offbeat.sync.platform import Platform

PROMPTS = [[5, 9, 20, 3, 8, 8, 41, 7, 7, 30, 12, 3], [4], [17, 6, 5, 33], [9] * 25]
HOW = [{"temperature": 0.7}, {"temperature": 0}, {"top_p": 0.6, "stop_token_ids": (5, 6, 7, 8, 9)}, {"top_k": 5}]


@pytest.fixture
def accelerator(monkeypatch):
    monkeypatch.setattr(Platform, "device", DEVICE)
    with torch.inference_mode(), Accelerator() as accelerator:
        yield accelerator


def load(folder: str, path: str) -> EmbeddedEngine:
    return load_engine(EngineOptions(model=folder, forward=path, max_running=6, max_prefill_tokens=20, max_cache_bytes=1 << 24))


def play(
    engine: EmbeddedEngine, other: str, *, adapters: tuple[str, ...] = (), before_step: Callable[[], None] = lambda: None
) -> dict[tuple[str, int], Output]:
    """Serve more requests than fit at once, with all kinds of sampling and a switch of weights in flight; outputs by request and sample."""
    done: dict[tuple[str, int], Output] = {}
    for folder in adapters:
        engine.adapters.add(folder, folder, engine.adapters.read(folder))
    names = ("", *adapters)
    engine.stage(1, VersionSource(other), engine.prepare(other))
    for i, (prompt, how) in enumerate(zip(PROMPTS * 2, HOW * 2, strict=True)):
        params = SamplingParams(max_new_tokens=6 + i, seed=i, **how)
        engine.submit(Request(id=str(i), prompt=prompt, params=params, n=2, adapter=names[i % len(names)]))
    for number in range(1000):
        if not engine.has_work:
            break
        if number == 4:
            engine.switch(1, "recompute")
        before_step()
        done.update({(event.request_id, event.result.index): event.result for event in engine.step()})
    return done


@pytest.mark.parametrize(("path", "kind"), [("direct", "qwen3"), ("direct", "qwen2"), ("hf", "qwen2-sliding"), ("hf", "gpt2-untied")])
def test_every_tensor_is_on_the_device_the_samples_are_those_of_the_cpu_and_a_step_waits_once(path, kind, model_folder, monkeypatch):
    folder, other = model_folder(kind), model_folder(kind, 1)
    on_cpu = load(folder, path)
    expected, expected_scores = play(on_cpu, other), on_cpu.score(PROMPTS[0])
    monkeypatch.setattr(Platform, "device", DEVICE)
    waits = []
    with torch.inference_mode(), Accelerator() as accelerator:
        engine = load(folder, path)
        got, scores = play(engine, other, before_step=lambda: waits.append(accelerator.num_waits)), engine.score(PROMPTS[0])
        version, fingerprinter = engine.fingerprinter()
        assert all(isinstance(tensor, Held) for tensor in engine._forward.tensors().values())
        fingerprint = fingerprinter()
    assert version == 1
    assert len(waits) > 10 and {after - before for before, after in itertools.pairwise(waits)} == {1}, "the host waits once per step"
    assert got.keys() == expected.keys() and len(got) == 16
    for key, output in got.items():
        assert (output.token_ids, output.versions) == (expected[key].token_ids, expected[key].versions)
        assert output.logprobs == pytest.approx(expected[key].logprobs, abs=1e-4)
    assert scores[1] == pytest.approx(expected_scores[1], abs=1e-4)
    assert fingerprint == on_cpu.fingerprinter()[1]()


@pytest.mark.parametrize(("path", "kind"), [("direct", "qwen3"), ("hf", "qwen3-untied")])
def test_adapters_are_on_the_device_and_cost_no_further_wait(path, kind, model_folder, adapter_folder, monkeypatch):
    folder, other = model_folder(kind), model_folder(kind, 1)
    adapters = tuple(adapter_folder(kind, seed, rank=2 + seed) for seed in range(2))
    expected = play(load(folder, path), other, adapters=adapters)
    monkeypatch.setattr(Platform, "device", DEVICE)
    waits = []
    with torch.inference_mode(), Accelerator() as accelerator:
        engine = load(folder, path)
        got = play(engine, other, adapters=adapters, before_step=lambda: waits.append(accelerator.num_waits))
        _, live = engine.live_adapter(adapters[0])
        fingerprint = live.fingerprint()
    for key, output in got.items():
        assert output.token_ids == expected[key].token_ids
        assert output.logprobs == pytest.approx(expected[key].logprobs, abs=1e-4)
    assert fingerprint == read_adapter(adapters[0]).fingerprint()
    assert len(waits) > 10 and {after - before for before, after in itertools.pairwise(waits)} == {1}


def test_shaped_samples_and_their_likeliest_tokens_cost_no_further_wait(model_folder, monkeypatch):
    shapings = [
        Shaping(min_p=0.1, presence_penalty=0.5, repetition_penalty=1.3), Shaping(logit_bias=((5, 2.0), (7, -100.0))),
        Shaping(allowed_token_ids=(3, 8, 9, 20)), Shaping(min_tokens=3)]

    def play(engine: EmbeddedEngine, before_step: Callable[[], None]) -> dict[str, Output]:
        done = {}
        for i, shaping in enumerate(shapings):
            params = SamplingParams(max_new_tokens=8, seed=i, shaping=shaping, top_logprobs=i)
            engine.submit(Request(id=str(i), prompt=PROMPTS[i], params=params))
        while engine.has_work:
            before_step()
            done |= {event.request_id: event.result for event in engine.step()}
        return done

    expected = play(load(model_folder("qwen3"), "direct"), lambda: None)
    monkeypatch.setattr(Platform, "device", DEVICE)
    waits = []
    with torch.inference_mode(), Accelerator() as accelerator:
        got = play(load(model_folder("qwen3"), "direct"), lambda: waits.append(accelerator.num_waits))
    for name, output in got.items():
        assert output.token_ids == expected[name].token_ids
        assert [[token for token, _ in row] for row in output.top_logprobs or ()] == [
            [token for token, _ in row] for row in expected[name].top_logprobs or ()]
    assert len(waits) > 7 and {after - before for before, after in itertools.pairwise(waits)} == {1}


@pytest.mark.parametrize("path", ["direct", "hf"])
def test_scores_and_the_likeliest_tokens_are_those_of_the_cpu(path, model_folder, monkeypatch):
    def play(engine: EmbeddedEngine) -> dict[str, Output | Scored]:
        params = SamplingParams(max_new_tokens=5, temperature=0.7, top_k=4, scaled_logprobs=True, top_logprobs=3, seed=1)
        engine.submit(Request(id="sample", prompt=[5, 6], params=params))
        engine.submit(Request(id="other", prompt=[5, 6], params=SamplingParams(max_new_tokens=5, seed=2)))
        for i, prompt in enumerate([PROMPTS[0], PROMPTS[2]]):
            engine.submit(ScoreJob(id=str(i), tokens=prompt, top_k=2 * i, targets=[[7, 8]] * len(prompt)))
        done = {}
        while engine.has_work:
            done |= {event.request_id: event.result for event in engine.step()}
        return done

    expected = play(load(model_folder("qwen3"), path))
    monkeypatch.setattr(Platform, "device", DEVICE)
    with torch.inference_mode(), Accelerator():
        got = play(load(model_folder("qwen3"), path))
    for name in ("sample", "other"):
        assert got[name].token_ids == expected[name].token_ids
        assert got[name].logprobs == pytest.approx(expected[name].logprobs, abs=1e-4)
    for mine, theirs in [(got["sample"].top_logprobs, expected["sample"].top_logprobs), (got["1"].top, expected["1"].top)]:
        assert [[token for token, _ in row] for row in mine] == [[token for token, _ in row] for row in theirs]
    for name in "01":
        assert got[name].logprobs == pytest.approx(expected[name].logprobs, abs=1e-4)
        targets = [torch.tensor(results[name].target_logprobs) for results in (got, expected)]
        assert torch.allclose(*targets, atol=1e-4)


def test_the_pretended_accelerator_refuses_what_a_real_one_does(accelerator):
    there, here = torch.arange(4, device=DEVICE), torch.arange(4)
    assert (there + there.to(DEVICE)).cpu().tolist() == [0, 2, 4, 6] and accelerator.num_waits == 1
    for mixed in (lambda: there + here, lambda: there[here], lambda: here[there], lambda: torch.cat([here, there])):
        with pytest.raises(AssertionError, match="mixes tensors"):
            mixed()
    assert int(there.sum()) == 6 and there[there > 2].cpu().tolist() == [3] and accelerator.num_waits == 4
