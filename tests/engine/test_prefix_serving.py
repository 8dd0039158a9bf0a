"""Samples that go on from what earlier ones have computed are those that a whole prefill gives, whatever happens in between."""

import random
from dataclasses import replace

import pytest
import torch

from offbeat.engine.engine import EmbeddedEngine
from offbeat.engine.loader import load_engine
from offbeat.engine.options import EngineOptions
from offbeat.engine.request import Output, Request
from offbeat.engine.versions import VersionSource

from .conftest import is_right, params

SYSTEM = [7, 3, 11, 5, 5, 9, 30, 2, 14, 40, 41, 6, 8, 21, 22, 13, 4, 4, 17, 33, 19, 28, 2, 2, 35, 16, 10, 12, 9, 9, 27, 31, 18, 23]


def ask(engine: EmbeddedEngine, prompt: list[int], count: int = 9, **settings) -> Output:
    engine.submit(Request(id="ask", prompt=prompt, params=params(count, seed=len(prompt)), **settings))
    events = []
    while engine.has_work:
        events += engine.step()
    return events[-1].result  # type: ignore[return-value]


def test_turns_of_a_conversation_compute_what_is_new_and_sample_as_without_it(make_engine, reference):
    engine, plain = make_engine(), make_engine(prefix_caching=False)
    talk, known = list(SYSTEM), 0
    for turn in range(5):
        output = ask(engine, talk)
        assert is_right(output, talk, reference("qwen3"))
        alone = ask(plain, talk)
        assert alone.token_ids == output.token_ids and alone.logprobs == pytest.approx(output.logprobs, abs=1e-5)
        assert engine.num_cached_tokens - known == (0 if turn == 0 else (len(talk) - 3) // 16 * 16), "all whole blocks that ran before"
        known = engine.num_cached_tokens
        talk += [*output.token_ids, 4 + turn, 9]
    assert plain.num_cached_tokens == 0


def test_prompts_that_come_together_compute_what_they_share_once(make_engine, reference):
    engine = make_engine()
    prompts = [[*SYSTEM, i, i + 1] for i in range(5)] + [SYSTEM[:20] + [50, 51] * 8 + [i] for i in range(3)] + [[1, 2, 3], SYSTEM[:16]]
    outputs = [samples[0] for samples in engine.generate(prompts, params(6, seed=3), n=2)]
    assert all(is_right(output, prompt, reference("qwen3")) for output, prompt in zip(outputs, prompts, strict=True))
    assert engine.num_cached_tokens == 4 * 32 + 16 + 2 * 32


@pytest.mark.parametrize("kind", ["llama", "yarn", "gpt2", "qwen2-sliding"])
def test_every_kind_of_position_and_window_goes_on_from_a_prefix(kind, model_folder, reference):
    engine = load_engine(EngineOptions(model=model_folder(kind)))
    for length in (34, 20, 33):
        prompt = [*SYSTEM[:length], length, 3, 3, 8]
        assert is_right(ask(engine, prompt), prompt, reference(kind))
    assert engine.num_cached_tokens == 16 + 32


@pytest.mark.parametrize("interrupt", ["recompute", "keep", "drain"])
def test_no_sample_begins_with_what_other_weights_have_computed(interrupt, make_engine, model_folder, reference):
    engine = make_engine()
    before = ask(engine, SYSTEM).token_ids
    engine.submit(Request(id="between", prompt=SYSTEM + before, params=params(20, seed=1)))
    for _ in range(5):
        engine.step()
    known = engine.num_cached_tokens
    assert known > 0
    folder = model_folder("qwen3", 1)
    engine.stage(1, VersionSource(folder), engine.prepare(folder))
    done = engine.switch(1, interrupt)
    events = []
    while engine.has_work:
        events += engine.step()
    assert done.result(0) >= 0
    between = SYSTEM + before + events[-1].result.token_ids  # type: ignore[union-attr]
    assert is_right(ask(engine, between), between, reference("qwen3", 1))
    assert (engine.num_cached_tokens > known) == (interrupt == "recompute"), "what was computed by both is not kept"
    assert is_right(ask(engine, between), between, reference("qwen3", 1)) and engine.num_cached_tokens > known + 32


def test_a_sleep_forgets_it_and_frees_its_memory(make_engine, reference):
    engine = make_engine()
    ask(engine, SYSTEM)
    assert engine._prefixes.size_bytes > 0
    engine.sleep(keep_weights=True)
    assert engine.cache_bytes == 0
    engine.wake()
    assert is_right(ask(engine, SYSTEM), SYSTEM, reference("qwen3")) and engine.num_cached_tokens == 0


def test_each_adapter_and_the_base_model_go_on_from_their_own(make_engine, adapter_folder, reference):
    engine = make_engine()
    for seed in (0, 1):
        engine.adapters.add(f"a{seed}", f"/{seed}", engine.adapters.read(adapter_folder("qwen3", seed)))
    alone = {}
    for name in ("", "a0", "a1", "", "a0", "a1"):
        output = ask(engine, SYSTEM, adapter=name)
        assert output.logprobs == pytest.approx(alone.setdefault(name, output.logprobs), abs=1e-5)
    assert alone["a0"] != pytest.approx(alone["a1"], abs=1e-3) and engine.num_cached_tokens == 3 * 32
    assert is_right(ask(engine, SYSTEM), SYSTEM, reference("qwen3"))
    engine.adapters.unload("a0")
    engine.adapters.add("a0", "/2", engine.adapters.read(adapter_folder("qwen3", 1)))
    known = engine.num_cached_tokens
    assert ask(engine, SYSTEM, adapter="a0").logprobs == pytest.approx(alone["a1"], abs=1e-5) and engine.num_cached_tokens == known


def test_random_conversations_under_little_memory_stay_right(make_engine, reference, model_folder):
    rng = random.Random(2)
    token_bytes = 2 * 2 * 2 * 16 * 4
    engine = make_engine(max_running=4, max_prefill_tokens=48, max_cache_bytes=160 * 5 * token_bytes)
    talks, version = [list(SYSTEM[: rng.randrange(1, 34)]) for _ in range(6)], 0
    for round_ in range(25):
        chosen = rng.sample(range(6), 4)
        for i in chosen:
            if len(talks[i]) > 120:
                talks[i] = SYSTEM[: rng.randrange(1, 34)]
            talks[i] = talks[i] + [rng.randrange(50) for _ in range(rng.randrange(1, 20))]
            n = rng.choice((1, 1, 2))
            engine.submit(Request(id=str(i), prompt=talks[i], params=params(rng.randrange(1, 12), seed=round_), n=n))
        said = {}
        while engine.has_work:
            for event in engine.step():
                said.setdefault(int(event.request_id), []).append(event.result)
            assert engine.cache_bytes <= 160 * 5 * token_bytes
        for i, outputs in said.items():
            assert all(is_right(output, talks[i], reference("qwen3", version)) for output in outputs)
            talks[i] = talks[i] + outputs[0].token_ids
        if round_ % 9 == 8:
            version = 1 - version
            folder = model_folder("qwen3", version)
            engine.stage(version, VersionSource(folder), engine.prepare(folder))
            engine.switch(version, rng.choice(("keep", "recompute")))
    assert engine.num_cached_tokens > 500


def test_a_shared_prefix_is_computed_once_when_the_cache_is_recomputed(make_engine, model_folder, reference):
    engine = make_engine()
    engine.submit(Request(id="group", prompt=SYSTEM, params=params(12, seed=4), n=6))
    for _ in range(4):
        engine.step()
    lengths = []
    compute = engine._runner._compute
    engine._runner._compute = lambda chunk, *args, **named: lengths.append(len(chunk)) or compute(chunk, *args, **named)  # type: ignore[method-assign]
    folder = model_folder("qwen3", 1)
    engine.stage(1, VersionSource(folder), engine.prepare(folder))
    engine.switch(1, "recompute")
    assert lengths == [1, 5]
    outputs = [event.result for _ in range(20) if engine.has_work for event in engine.step()]
    assert len(outputs) == 6
    for output in outputs:
        model = reference("qwen3", 1)
        expected = model.logprobs(SYSTEM + output.token_ids)[len(SYSTEM) - 1 + 4 :]
        assert torch.allclose(torch.tensor(output.logprobs[4:]), expected, atol=1e-4)


def test_what_runs_is_not_changed_by_what_is_kept(make_engine):
    """A slot that is filled from a prefix, moved and filled again gives the tokens of an engine that keeps nothing."""
    requests = [
        Request(id=str(i), prompt=[*SYSTEM[: 18 + i % 5], i], params=params(3 + 4 * (i % 4), seed=i), n=1 + i % 3) for i in range(20)]
    answers = []
    for caching in (True, False):
        engine = make_engine(prefix_caching=caching, max_running=7)
        for request in requests:
            engine.submit(replace(request))
        done = {}
        while engine.has_work:
            done.update({(event.request_id, event.result.index): event.result.token_ids for event in engine.step()})
        answers.append(done)
    assert answers[0] == answers[1]
