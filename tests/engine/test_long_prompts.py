"""A long prompt is computed in parts beside the samples that decode, and changes none of them."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import Qwen3Config

from offbeat.engine.engine import EmbeddedEngine
from offbeat.engine.loader import load_engine
from offbeat.engine.options import EngineOptions
from offbeat.engine.request import Output, Request
from offbeat.engine.versions import VersionSource

from .conftest import KINDS, SIZES, is_right, params

LONG = [3 + i * i % 47 for i in range(100)]


def prefilled(engine: EmbeddedEngine) -> list[int]:
    """Numbers of prompt tokens that the engine has computed, padding included; grows with each batch."""
    counts: list[int] = []
    prefill = engine._forward.prefill
    engine._forward.prefill = lambda tokens, *args, **named: counts.append(tokens.numel()) or prefill(tokens, *args, **named)  # type: ignore[method-assign]
    return counts


def drain(engine: EmbeddedEngine) -> dict[tuple[str, int], Output]:
    outputs = {}
    while engine.has_work:
        outputs |= {(event.request_id, event.result.index): event.result for event in engine.step()}  # type: ignore[union-attr]
    return outputs


def test_eight_rows_decode_in_every_round_while_a_prompt_of_2000_tokens_arrives(model_folder, monkeypatch):
    monkeypatch.setitem(KINDS, "qwen3-long", (Qwen3Config, {**SIZES, "max_position_embeddings": 2200}))
    folder = model_folder("qwen3-long")
    engine = load_engine(EngineOptions(model=folder))
    for i in range(8):
        engine.submit(Request(id=str(i), prompt=[5, 9, i], params=params(40, seed=i), stream=True))
    engine.step()
    counts = prefilled(engine)
    engine.submit(Request(id="long", prompt=[3 + i * i % 47 for i in range(2000)], params=params(3, seed=9), stream=True))
    first = None
    for round_ in range(6):
        before = sum(counts)
        events = engine.step()
        assert {event.request_id for event in events} >= set("01234567"), "no decoding sample misses a round"
        assert sum(counts) - before <= 512
        if first is None and any(event.request_id == "long" for event in events):
            first = round_
    assert first == 3, "2000 tokens take four rounds of 512"


@pytest.mark.parametrize("caching", [True, False])
def test_samples_and_log_probabilities_are_those_without_parts(make_engine, caching, reference):
    answers = []
    for bound in (7, 64, 8192):
        engine = make_engine(prefix_caching=caching, max_prefill_per_round=bound, max_running=12)
        for i in range(6):
            engine.submit(Request(id=str(i), prompt=LONG[i : i + 3 + 2 * i], params=params(6 + 5 * i, seed=i), n=1 + i % 2))
        engine.step()
        engine.submit(Request(id="long", prompt=LONG, params=params(8, seed=77), n=3))
        engine.submit(Request(id="again", prompt=LONG[:90], params=params(8, seed=78)))
        answers.append(drain(engine))
    for other in answers[:2]:
        assert other.keys() == answers[2].keys()
        for key, output in other.items():
            assert output.token_ids == answers[2][key].token_ids
            assert output.logprobs == pytest.approx(answers[2][key].logprobs, abs=2e-5)
    assert all(is_right(answers[0]["long", i], LONG, reference("qwen3")) for i in range(3))


def test_log_probabilities_of_a_usual_model_differ_by_less_than_a_millionth(model_folder):
    """The models of the other tests have weights that blow up rounding; this one is initialised like a model that is trained."""
    folder = model_folder("qwen3")
    outputs = []
    for bound in (16, 8192):
        engine = load_engine(EngineOptions(model=folder, max_prefill_per_round=bound))
        with torch.inference_mode():
            engine._forward.install(engine._forward.prepare(
                {name: tensor if tensor.ndim == 1 else tensor * 0.08 for name, tensor in engine._forward.tensors().items()}))
        engine.submit(Request(id="short", prompt=[4], params=params(30, seed=1)))
        engine.step()
        engine.submit(Request(id="long", prompt=LONG, params=params(20, seed=2)))
        outputs.append(drain(engine))
    for key in outputs[0]:
        assert outputs[0][key].token_ids == outputs[1][key].token_ids
        assert np.abs(np.subtract(outputs[0][key].logprobs, outputs[1][key].logprobs)).max() < 1e-6


@pytest.mark.parametrize("interrupt", ["recompute", "keep", "drain"])
def test_a_switch_restarts_the_prompt_so_that_its_sample_is_of_the_new_weights_alone(interrupt, make_engine, model_folder, reference):
    engine = make_engine(max_prefill_per_round=16)
    engine.submit(Request(id="short", prompt=[4, 8], params=params(30, seed=1)))
    engine.step()
    engine.submit(Request(id="long", prompt=LONG, params=params(8, seed=2)))
    for _ in range(3):
        assert [event for event in engine.step() if event.request_id == "long"] == []
    folder = model_folder("qwen3", 1)
    engine.stage(1, VersionSource(folder), engine.prepare(folder))
    engine.switch(1, interrupt)
    outputs = drain(engine)
    assert outputs["long", 0].versions == [1] * 8 and is_right(outputs["long", 0], LONG, reference("qwen3", 1))
    assert outputs["short", 0].versions == ([0] * 30 if interrupt == "drain" else [0] * 4 + [1] * 26)


def test_each_adapter_computes_its_long_prompts_itself(make_engine, adapter_folder, reference):
    engine = make_engine(max_prefill_per_round=16)
    for seed in (0, 1):
        engine.adapters.add(f"a{seed}", f"/{seed}", engine.adapters.read(adapter_folder("qwen3", seed)))
    for name in ("", "a0", "a1"):
        engine.submit(Request(id=f"short{name}", prompt=[4], params=params(40, seed=1), adapter=name))
    engine.step()
    for name in ("a1", "", "a0", "a1"):
        engine.submit(Request(id=f"long{name}", prompt=LONG, params=params(5, seed=1), adapter=name))
    engine.adapters.unload("a1")
    outputs = drain(engine)
    models = {"": reference("qwen3"), **{f"a{seed}": reference("qwen3").merged(adapter_folder("qwen3", seed)) for seed in (0, 1)}}
    for (request, _), output in outputs.items():
        prompt, name = (LONG, request[4:]) if request.startswith("long") else ([4], request[5:])
        assert is_right(output, prompt, models[name])
    assert "a1" not in engine.adapters.names


def test_a_long_prompt_can_be_aborted_paused_and_put_to_sleep_half_way(make_engine, reference):
    engine = make_engine(max_prefill_per_round=16, max_prefill_tokens=16)
    engine.submit(Request(id="short", prompt=[4], params=params(50, seed=1)))
    engine.step()
    for name in ("gone", "kept"):
        engine.submit(Request(id=name, prompt=LONG, params=params(5, seed=3)))
    engine.step()
    engine.abort("gone")
    engine.step()
    assert engine.num_waiting == 1 and engine.pause("keep") == [] and engine.step() == []
    engine.resume()
    engine.sleep(keep_weights=True)
    assert engine.cache_bytes == 0
    engine.wake()
    outputs = drain(engine)
    assert set(outputs) == {("short", 0), ("kept", 0)}
    assert is_right(outputs["kept", 0], LONG, reference("qwen3")) and is_right(outputs["short", 0], [4], reference("qwen3"))
    engine.submit(Request(id="last", prompt=LONG, params=params(5), n=2))
    engine.step()
    assert [(e.request_id, e.result.finish_reason) for e in engine.pause("abort")] == [("last", "abort")] * 2  # type: ignore[union-attr]
    assert engine.num_waiting == engine.num_running == 0
    engine.resume()
    engine.submit(Request(id="after", prompt=LONG[::-1], params=params(5)))
    assert is_right(drain(engine)["after", 0], LONG[::-1], reference("qwen3"))


def test_random_traffic_of_long_and_short_prompts_under_little_memory_stays_right_and_bounded(make_engine, reference):
    rng = random.Random(4)
    room = 160 * 6 * 2 * 2 * 2 * 16 * 4
    engine = make_engine(max_running=5, max_prefill_per_round=24, max_prefill_tokens=50, max_cache_bytes=room)
    counts = prefilled(engine)
    sent: dict[str, Request] = {}
    gone: set[str] = set()
    done: dict[tuple[str, int], Output] = {}
    for round_ in range(150):
        if rng.random() < 0.3:
            start = rng.choice((0, 0, 1, 7))
            prompt = LONG[start : start + rng.randrange(1, 90)]
            name = str(round_)
            sent[name] = Request(id=name, prompt=prompt, params=params(rng.randrange(1, 25), seed=round_), n=rng.choice((1, 1, 3)))
            engine.submit(replace(sent[name]))
        if rng.random() < 0.05 and (open_ := [name for name in sent if (name, 0) not in done and name not in gone]):
            gone.add(name := rng.choice(open_))
            engine.abort(name)
        decoding, before = engine.num_running, sum(counts)
        done |= {(event.request_id, event.result.index): event.result for event in engine.step()}  # type: ignore[union-attr]
        assert engine.cache_bytes <= room and sum(counts) - before <= (24 if decoding else 50) + 32, "padding included"
    done |= drain(engine)
    for (name, _), output in done.items():
        assert name in gone or is_right(output, sent[name].prompt, reference("qwen3"))
    assert {name for name, _ in done} | gone == set(sent)


def test_a_beginning_that_was_dropped_for_the_slots_of_a_long_prompt_is_not_counted_as_cached(make_engine, reference):
    token = 2 * 2 * 2 * 16 * 4
    engine = make_engine(max_running=8, max_prefill_per_round=16, max_cache_bytes=8 * 64 * token)
    engine.submit(Request(id="first", prompt=LONG[:33], params=params(2, seed=1)))
    drain(engine)
    engine.submit(Request(id="short", prompt=[4], params=params(60, seed=2), n=7))
    engine.step()
    engine.submit(Request(id="long", prompt=LONG[:60], params=params(4, seed=3)))
    counts = prefilled(engine)
    output = drain(engine)["long", 0]
    assert sum(counts) == 60 and is_right(output, LONG[:60], reference("qwen3"))
    assert output.num_cached == engine.num_cached_tokens == 0
