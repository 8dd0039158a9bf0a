"""Adapters end to end in the engine: each request's numbers are those of its own adapter, whatever else runs, loads, leaves or switches."""

import contextlib

import numpy as np
import pytest
import torch

from offbeat.engine.adapters import UnknownAdapterError
from offbeat.engine.engine import EmbeddedEngine
from offbeat.engine.request import Output, Request, SamplingParams
from offbeat.engine.versions import VersionSource
from offbeat.errors import BusyError, EngineError
from offbeat.model.peft_io import Adapter, read_adapter, write_adapter

PROMPTS = [[5, 9, 20, 3, 8, 8, 41, 7, 7, 30, 12, 3], [4], [17, 6, 5, 33], [9] * 25, [7, 8]]


def load(engine: EmbeddedEngine, name: str, folder: str) -> None:
    engine.adapters.add(name, folder, engine.adapters.read(folder))


def submit(
    engine: EmbeddedEngine, name: str, adapter: str, prompt: list[int], *, n: int = 1, tokens: int = 12, seed: int | None = None,
) -> None:
    params = SamplingParams(max_new_tokens=tokens, ignore_eos=True, seed=seed)
    engine.submit(Request(id=name, prompt=prompt, params=params, n=n, adapter=adapter))


def drain(engine: EmbeddedEngine) -> dict[tuple[str, int], Output]:
    done = {}
    while engine.has_work:
        for event in engine.step():
            assert isinstance(event.result, Output), event.result
            done[event.request_id, event.result.index] = event.result
    return done


def check(reference, prompt: list[int], output: Output, *, start: int = 0) -> None:
    expected = reference.logprobs(prompt + output.token_ids)[len(prompt) - 1 :]
    assert torch.allclose(torch.tensor(output.logprobs[start:]), expected[start:], atol=1e-4)


@pytest.mark.parametrize("kind", ["qwen3", "qwen2", "llama"])
def test_one_batch_serves_many_adapters_of_different_shapes_and_the_base_model(kind, make_engine, adapter_folder, reference):
    engine = make_engine(kind, max_running=9, max_prefill_tokens=30)
    shapes = [{}, {"rank": 8}, {"rank": 1, "targets": ("q_proj", "v_proj")}, {"targets": ("down_proj",)}]
    folders = {f"t{i}@0": adapter_folder(kind, i, **shape) for i, shape in enumerate(shapes)}
    for name, folder in folders.items():
        load(engine, name, folder)
    references = {"": reference(kind)} | {name: reference(kind).merged(folder) for name, folder in folders.items()}
    wanted = [(adapter, i) for i in range(len(PROMPTS)) for adapter in references]
    for adapter, i in wanted:
        submit(engine, f"{adapter}/{i}", adapter, PROMPTS[i], n=1 + i % 2, tokens=8 + 3 * i, seed=i)
    outputs = drain(engine)
    for adapter, i in wanted:
        output = outputs[f"{adapter}/{i}", 0]
        assert output.versions == [0] * (8 + 3 * i)
        check(references[adapter], PROMPTS[i], output)
        with pytest.raises(AssertionError):
            check(references["t1@0" if adapter != "t1@0" else ""], PROMPTS[i], output)


def test_an_adapters_samples_do_not_depend_on_fifteen_others(make_engine, adapter_folder):
    def run(others: int) -> list[Output]:
        engine = make_engine(max_running=64, seed=others)
        for i in range(1 + others):
            load(engine, f"t{i}@0", adapter_folder("qwen3", i, rank=2 + i % 3))
        for i in range(1, 1 + others):
            submit(engine, f"other{i}", f"t{i}@0", PROMPTS[i % 5], n=1 + i % 4, tokens=5 + 2 * i)
            engine.step()
        submit(engine, "mine", "t0@0", PROMPTS[0], n=4, tokens=40, seed=7)
        outputs = drain(engine)
        return [outputs["mine", i] for i in range(4)]

    for alone, crowded in zip(run(0), run(15), strict=True):
        assert alone.token_ids == crowded.token_ids
        assert alone.logprobs == pytest.approx(crowded.logprobs, abs=1e-5)


@pytest.mark.parametrize("interrupt", ["recompute", "keep", "drain"])
def test_base_weights_switch_under_running_adapters(interrupt, make_engine, adapter_folder, model_folder, reference):
    engine = make_engine(max_prefill_tokens=30)
    folders = {f"t{i}@0": adapter_folder("qwen3", i) for i in range(2)}
    for name, folder in folders.items():
        load(engine, name, folder)
    wanted = [(adapter, i) for i in (0, 2) for adapter in ("", *folders)]
    for adapter, i in wanted:
        submit(engine, f"{adapter}/{i}", adapter, PROMPTS[i], tokens=16, seed=i)
    for _ in range(6):
        engine.step()
    engine.stage(1, VersionSource(model_folder("qwen3", 1)), engine.prepare(model_folder("qwen3", 1)))
    engine.switch(1, interrupt)
    outputs = drain(engine)
    for adapter, i in wanted:
        output, prompt = outputs[f"{adapter}/{i}", 0], PROMPTS[i]
        old, new = (reference("qwen3", seed).merged(folders[adapter]) if adapter else reference("qwen3", seed) for seed in (0, 1))
        changed = output.versions.count(0)
        assert output.versions == [0] * changed + [1] * (16 - changed)
        assert changed == 16 if interrupt == "drain" else 0 < changed < 16
        expected = old.logprobs(prompt + output.token_ids)[len(prompt) - 1 :]
        assert torch.allclose(torch.tensor(output.logprobs[:changed]), expected[:changed], atol=1e-4)
        if interrupt == "recompute":
            check(new, prompt, output, start=changed)


def test_fingerprint_and_score_prove_the_adapter_that_serves(make_engine, adapter_folder, reference):
    for dtype, tolerance in (("float32", 1e-4), ("bfloat16", 0.5)):
        engine = make_engine(dtype=dtype)
        folders = {f"t{i}@0": adapter_folder("qwen3", i, rank=2 + i) for i in range(3)}
        for name, folder in folders.items():
            load(engine, name, folder)
        submit(engine, "running", "t2@0", PROMPTS[0], tokens=30)
        for name, folder in folders.items():
            engine.step()
            version, live = engine.live_adapter(name)
            assert (version, live.fingerprint()) == (0, read_adapter(folder).fingerprint())
            expected = reference("qwen3").merged(folder).logprobs(PROMPTS[3])
            assert np.abs(np.array(engine.score(PROMPTS[3], adapter=name)[1]) - expected.numpy()).mean() < tolerance
        if dtype == "float32":
            check(reference("qwen3").merged(folders["t2@0"]), PROMPTS[0], drain(engine)["running", 0])
    for ask in (lambda: engine.score([5, 6], adapter="t9@0"), lambda: engine.live_adapter("t9@0")):
        with pytest.raises(UnknownAdapterError):
            ask()


def test_waiting_and_running_requests_hold_their_adapter(make_engine, adapter_folder, reference):
    engine = make_engine(max_running=1, max_adapters=2)
    folders = {f"t{i}@0": adapter_folder("qwen3", i) for i in range(3)}
    for name in ("t0@0", "t1@0"):
        load(engine, name, folders[name])
        submit(engine, name, name, PROMPTS[0])
    engine.step()
    for name in ("t0@0", "t1@0"):
        engine.adapters.unload(name)
        with pytest.raises(UnknownAdapterError):
            submit(engine, "late", name, PROMPTS[0])
    with pytest.raises(EngineError, match="there is no room for adapter"):
        load(engine, "t2@0", folders["t2@0"])
    outputs = drain(engine)
    for name in ("t0@0", "t1@0"):
        check(reference("qwen3").merged(folders[name]), PROMPTS[0], outputs[name, 0])
        assert not engine.adapters.has(name, "/elsewhere"), "the last request is done"
    load(engine, "t2@0", folders["t2@0"])


@pytest.mark.parametrize("end", ["abort-running", "abort-waiting", "pause"])
def test_requests_that_are_aborted_let_their_adapter_go(end, make_engine, adapter_folder):
    engine = make_engine(max_running=1)
    load(engine, "t0@0", adapter_folder("qwen3", 0))
    submit(engine, "first", "" if end == "abort-waiting" else "t0@0", PROMPTS[0])
    engine.step()
    submit(engine, "second", "t0@0" if end == "abort-waiting" else "", PROMPTS[0])
    engine.adapters.unload("t0@0")
    assert engine.adapters._held
    if end == "pause":
        engine.pause("abort")
    else:
        engine.abort("first" if end == "abort-running" else "second")
    assert not engine.adapters._held


def test_an_adapter_that_diverged_fails_its_own_requests_alone(make_engine, adapter_folder, reference, tmp_path):
    engine = make_engine(max_running=6)
    good = adapter_folder("qwen3", 0)
    pairs = {name: (a * 1e30, b * 1e30) for name, (a, b) in read_adapter(good).pairs.items()}
    write_adapter(Adapter(4, 1.5, pairs), tmp_path / "bad", base_model="m")
    load(engine, "good@0", good)
    load(engine, "bad@0", str(tmp_path / "bad"))
    with pytest.raises(EngineError, match="logits of adapter bad@0 are not finite"):
        engine.score([5, 6, 7], adapter="bad@0")
    submit(engine, "base", "", PROMPTS[0], tokens=30)
    submit(engine, "good", "good@0", PROMPTS[0], tokens=30)
    engine.step()
    submit(engine, "bad", "bad@0", PROMPTS[3], n=2)
    (failure,) = engine.step()
    assert failure.request_id == "bad" and isinstance(failure.result, EngineError) and "bad@0 are not finite" in str(failure.result)
    assert engine.num_running == 2 and engine.finished["error"] == 2
    # They get the slots of those that failed, and read nothing of theirs.
    for name in ("later", "last"):
        submit(engine, name, "good@0", PROMPTS[1], tokens=40)
    outputs = drain(engine)
    check(reference("qwen3"), PROMPTS[0], outputs["base", 0])
    check(reference("qwen3").merged(good), PROMPTS[0], outputs["good", 0])
    for name in ("later", "last"):
        check(reference("qwen3").merged(good), PROMPTS[1], outputs[name, 0])


def test_random_traffic_of_loads_unloads_and_aborts_keeps_every_sample_exact(make_engine, adapter_folder, reference):
    rng = np.random.default_rng(0)
    engine = make_engine(max_running=6, max_adapters=3, max_prefill_tokens=40)
    shapes = [{}, {"rank": 8}, {"rank": 2, "targets": ("q_proj", "v_proj")}, {"rank": 1, "targets": ("down_proj",)}, {}]
    folders = {f"t{i}@0": adapter_folder("qwen3", i, **shape) for i, shape in enumerate(shapes)}
    wanted: dict[str, tuple[str, list[int]]] = {}
    outputs: dict[tuple[str, int], Output] = {}
    for number in range(150):
        adapter = ["", *folders][rng.integers(6)]
        prompt = PROMPTS[rng.integers(len(PROMPTS))]
        action = rng.choice(["submit", "load", "unload", "abort", "score"], p=[0.4, 0.4, 0.06, 0.06, 0.08])
        with contextlib.suppress(BusyError, UnknownAdapterError):
            if action == "submit":
                submit(engine, str(number), adapter, prompt, n=int(rng.integers(1, 4)), tokens=int(rng.integers(1, 12)))
                wanted[str(number)] = (adapter, prompt)
            elif action == "load" and adapter:
                load(engine, adapter, folders[adapter])
            elif action == "unload":
                engine.adapters.unload(adapter)
            elif action == "abort" and wanted:
                engine.abort(str(rng.choice(list(wanted))))
            elif action == "score":
                engine.score(prompt * 2, adapter=adapter)
        outputs.update({(event.request_id, event.result.index): event.result for event in engine.step()})
    outputs.update(drain(engine))
    references = {"": reference("qwen3")} | {name: reference("qwen3").merged(folder) for name, folder in folders.items()}
    assert engine.adapters.num_evicted > 5 and len({wanted[name][0] for name, _ in outputs}) == 6
    for (name, _), output in outputs.items():
        adapter, prompt = wanted[name]
        check(references[adapter], prompt, output)
