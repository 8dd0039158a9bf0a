"""In the batch-invariant mode an answer has the same bits whatever else the engine computes meanwhile."""

import random

import numpy as np
import pytest
import torch
from transformers import Qwen3Config

from offbeat.engine.batch_invariant import InvariantAttention
from offbeat.engine.cache import attend
from offbeat.engine.engine import EmbeddedEngine
from offbeat.engine.loader import load_engine
from offbeat.engine.lora import BASE, segment
from offbeat.engine.options import EngineOptions
from offbeat.engine.request import Output, Request
from offbeat.errors import ModelError
from offbeat.model.peft_io import read_adapter

from .conftest import KINDS, SIZES, params

LONG_TEXT = [3 + i * i % 47 for i in range(600)]
NAMES = [f"adapter {seed}" for seed in range(3)]


def requests_of(draw: random.Random, *, adapters: list[str], count: int = 8) -> list[Request]:
    """Requests with prompts that share beginnings, of very different lengths."""
    requests = []
    for i in range(count):
        first, length = draw.choice([0, 0, 7]), draw.choice([1, 2, 3, 5, 16, 17, 33, 64, 130, 250])
        requests.append(Request(
            id=str(i), prompt=LONG_TEXT[first : first + length], params=params(draw.choice([1, 2, 5, 12, 40]), seed=i),
            n=draw.choice([1, 1, 2, 5]), adapter=draw.choice(["", *adapters])))
    return requests


def play(engine: EmbeddedEngine, requests: list[Request], draw: random.Random) -> dict[tuple[str, int], Output]:
    """Submit the requests in the order given at random moments; returns their samples."""
    waiting, outputs = list(requests), {}
    while waiting or engine.has_work:
        while waiting and (not engine.has_work or draw.random() < 0.3):
            engine.submit(waiting.pop(0))
        outputs |= {(event.request_id, event.result.index): event.result for event in engine.step() if event.result is not None}
    return outputs


@pytest.mark.parametrize(("kind", "threads"), [("long", 1), ("long", 2), ("llama", 1), ("qwen2", 1)])
def test_answers_have_the_same_bits_in_every_batch(kind, threads, model_folder, adapter_folder, monkeypatch):
    monkeypatch.setitem(KINDS, "long", (Qwen3Config, {**SIZES, "max_position_embeddings": 700}))
    monkeypatch.setitem(KINDS, kind, (KINDS[kind][0], {**KINDS[kind][1], "max_position_embeddings": 700}))
    folder = model_folder(kind)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        draw = random.Random(f"{kind} {threads}")
        adapters = NAMES if kind == "long" else []
        requests = requests_of(draw, adapters=adapters)
        answers = []
        for settings in ({}, {"prefix_caching": False, "max_prefill_per_round": 7}, {"max_running": 6}, {"max_prefill_tokens": 64}):
            engine = load_engine(EngineOptions(model=folder, batch_invariant=True, **settings))
            for seed, name in enumerate(adapters):
                engine.adapters.add(name, path := adapter_folder("long", seed, rank=seed + 1), read_adapter(path))
            answers.append(play(engine, draw.sample(requests, len(requests)), draw))
        for other in answers[1:]:
            assert other.keys() == answers[0].keys()
            for key, output in other.items():
                assert (output.token_ids, output.logprobs) == (answers[0][key].token_ids, answers[0][key].logprobs), key
    finally:
        torch.set_num_threads(before)


@pytest.mark.drill
def test_in_1000_random_batches_no_bit_differs_from_answers_computed_alone(model_folder, adapter_folder, monkeypatch):
    monkeypatch.setitem(KINDS, "long", (Qwen3Config, {**SIZES, "max_position_embeddings": 700}))
    draw = random.Random(0)
    requests = requests_of(draw, adapters=NAMES, count=40)
    alone, together = (
        load_engine(EngineOptions(model=model_folder("long"), batch_invariant=True, **settings))
        for settings in ({"prefix_caching": False}, {"max_running": 24, "max_prefill_per_round": 100}))
    for engine in (alone, together):
        for seed, name in enumerate(NAMES):
            engine.adapters.add(name, path := adapter_folder("long", seed, rank=seed + 1), read_adapter(path))
    expected = {key: output for request in requests for key, output in play(alone, [request], draw).items()}
    num_batches = num_compared = num_different = 0
    step = together.step

    def counted():
        nonlocal num_batches
        num_batches += 1
        return step()

    monkeypatch.setattr(together, "step", counted)
    while num_batches < 1000:
        for key, output in play(together, draw.sample(requests, draw.randint(1, len(requests))), draw).items():
            assert output.token_ids == expected[key].token_ids
            num_compared += len(output.logprobs)
            num_different += sum(one != other for one, other in zip(output.logprobs, expected[key].logprobs, strict=True))
    assert num_different == 0 and num_compared > 5000


def test_an_engine_that_cannot_be_batch_invariant_says_so(model_folder):
    for options, reason in (({"dtype": "bfloat16"}, "in float32"), ({"forward": "hf"}, "with the direct forward alone")):
        with pytest.raises(ModelError, match=f"must be false or auto .* got true.*{reason}"):
            load_engine(EngineOptions(model=model_folder("qwen3"), batch_invariant=True, **options))
        engine = load_engine(EngineOptions(model=model_folder("qwen3"), batch_invariant="auto", **options))
        assert engine._forward.row_multiple == 1


def test_a_processor_on_which_bits_differ_is_noticed(model_folder, monkeypatch, caplog):
    """Here one whose products with fewer rows than a tile are rounded otherwise."""
    def rounded(self, queries, keys, values, *, mask, scale):
        rows = attend(queries, keys, values, mask=mask[:, : queries.shape[1]], scale=scale)
        return rows if queries.shape[1] > 8 else rows * (1 + 2**-20)

    monkeypatch.setattr(InvariantAttention, "attend_decoding", rounded)
    with pytest.raises(ModelError, match="a token's bits differ here"):
        load_engine(EngineOptions(model=model_folder("qwen3"), batch_invariant=True))
    engine = load_engine(EngineOptions(model=model_folder("qwen3"), batch_invariant="auto"))
    assert engine._forward.row_multiple == 1 and "not batch-invariant" in caplog.text


def test_rows_of_adapters_are_gathered_in_segments_of_one_length():
    segments = segment(np.array([2, 3, BASE, *[2] * 40]), fixed=True)
    assert [(piece.slots.start, piece.rows.start, piece.length) for piece in segments.pieces] == [(2, 0, 32), (2, 32, 32), (3, 64, 32)]
    assert segments.index[:41].tolist() == [0, *range(3, 43)]
    assert segments.index[41:].tolist() == [34] * 23 + [1] * 32
    assert segments.padding.sum() == 23 + 31
    assert segments.slot.tolist() == [2] * 64 + [3] * 32
