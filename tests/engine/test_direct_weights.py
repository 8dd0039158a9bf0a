"""Engines whose weights are in int8: they serve the quantised form of what was published, and nothing else passes for it."""

import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

from named_bytes import named_bytes
from offbeat.engine.direct_weights import MATRICES, DirectWeights, StateReader, WatchedMatrix, matrices_of
from offbeat.engine.engine import EmbeddedEngine
from offbeat.engine.forward import QUANTISED_TOLERANCE, _decoded_logprobs, _difference, _full_logprobs, check_quantised, ordinary_tokens
from offbeat.engine.forward_direct import DirectForward
from offbeat.engine.int8 import Int8Matrix, Int8Weight
from offbeat.engine.loader import load_engine, load_forward
from offbeat.engine.matrix import ByColumns
from offbeat.engine.options import EngineOptions
from offbeat.engine.versions import VersionSource, read_version
from offbeat.errors import ModelError
from offbeat.model.changes_io import write_changes
from offbeat.model.fingerprint import fingerprint
from offbeat.model.hf_io import read_safetensors
from offbeat.sync.platform import Platform
from offbeat.sync.weight_broadcast import WeightBroadcast

from .conftest import params

KINDS = ["qwen3", "qwen3-untied", "qwen2", "llama"]
PROMPTS = [[5, 9, 20, 3, 8, 8, 41, 7, 7, 30, 12, 3], [4, 4], [17, 6, 5, 33]]


@pytest.fixture
def load(model_folder):
    """kind, seed -> forward with int8 weights."""
    def load(kind: str = "qwen3", seed: int = 0, **options) -> DirectForward:
        return load_forward(EngineOptions(model=model_folder(kind, seed), quantization="int8", **options))

    return load


@pytest.fixture
def engine(model_folder) -> EmbeddedEngine:
    return load_engine(EngineOptions(model=model_folder("qwen3"), quantization="int8"))


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_the_logits_are_those_of_the_rounded_weights(kind, load, reference):
    """Of the numbers that the ints stand for, and of inputs that are rounded to 8 bits, which moves them a little."""
    forward, tokens = load(kind), ordinary_tokens(reference(kind).model.config.vocab_size)
    rounded = DirectForward(reference(kind).model.config, forward.tensors(), dtype=torch.float32, device=forward.device)
    full, exact = _full_logprobs(forward, tokens), reference(kind).logits(tokens.tolist())[7:].log_softmax(-1)
    assert _difference(full, _full_logprobs(rounded, tokens)) < 0.3
    assert 0.001 < _difference(full, exact) < 0.4
    assert _difference(_decoded_logprobs(forward, tokens), full) < 0.02, "a number beside a half-way point may be rounded the other way"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_the_fingerprint_is_the_trainers_for_every_version(kind, dtype, load, reference, model_folder):
    forward = load(kind, dtype=dtype)
    for seed in (0, 1, 2, 1):
        forward.install(read_version(forward, model_folder(kind, seed)))
        model = reference(kind, seed).model
        wanted = fingerprint(named_bytes(model)) if dtype == "float32" else fingerprint(
            (name, p.detach().bfloat16().view(-1).view(torch.uint8).numpy()) for name, p in model.named_parameters())
        before = forward.fingerprinter()
        assert before() == wanted
        forward.install(read_version(forward, model_folder(kind, 3)))
        assert before() == wanted, "a reader of the old version keeps it"


def put(weights: DirectWeights, name: str, matrix: object) -> DirectWeights:
    """The weights with another matrix of a name, such as "1.qkv"."""
    layer, _, which = name.rpartition(".")
    if not layer:
        return replace(weights, head=matrix)
    layers = list(weights.layers)
    layers[int(layer)] = replace(layers[int(layer)], **{which: matrix})
    return replace(weights, layers=tuple(layers))


def packed_again(matrix: Int8Matrix, weight: Int8Weight) -> Int8Matrix:
    spoilt = object.__new__(Int8Matrix)
    spoilt.__dict__ = matrix.__dict__ | {"_packed": matrix._kernel.pack(weight)}
    return spoilt


def swapped_scales(new: Int8Matrix, _old: Int8Matrix) -> Int8Matrix:
    quantised = new._read()
    return packed_again(new, Int8Weight(quantised.ints, quantised.scales.roll(1)))


def half_old(new: Int8Matrix, old: Int8Matrix) -> Int8Matrix:
    (ints, scales), had = (new._read().ints.clone(), new._read().scales.clone()), old._read()
    half = len(ints) // 2
    ints[half:], scales[half:] = had.ints[half:], had.scales[half:]
    return packed_again(new, Int8Weight(ints, scales))


def columns_old(new: Int8Matrix, old: Int8Matrix) -> Int8Matrix:
    ints, had = new._read().ints.clone(), old._read().ints
    ints[:, ::2] = had[:, ::2]
    return packed_again(new, Int8Weight(ints, new._read().scales))


def float_instead(new: Int8Matrix, _old: Int8Matrix) -> ByColumns:
    return ByColumns(new.plain)


FAULTS = {"stale": lambda new, old: old, "scales": swapped_scales, "half": half_old, "columns": columns_old, "float": float_instead}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("kind", ["qwen3", "llama"])
@torch.inference_mode()
def test_a_matrix_that_was_not_made_of_the_published_weights_changes_the_fingerprint(kind, fault, load, model_folder, caplog):
    """The version is one step of Adam at a learning rate of 1e-5 from the last: most ints are the same."""
    forward = load(kind)
    state = {name: tensor.float() for name, tensor in read_safetensors(model_folder(kind))}
    random = torch.Generator().manual_seed(5)
    new = {name: tensor + 1e-5 * torch.randn(tensor.shape, generator=random).sign() for name, tensor in state.items()}
    wanted = fingerprint((name, tensor.contiguous().view(-1).view(torch.uint8).numpy()) for name, tensor in new.items())
    old, right = forward.prepare(state), forward.prepare(new)
    had = dict(matrices_of(old))
    for name, matrix in matrices_of(right):
        forward.install(put(right, name, FAULTS[fault](matrix, had[name])))
        assert forward.fingerprinter()() != wanted, name
        assert f"the int8 matrix {name} is not the one that was made of" in caplog.text
        caplog.clear()
        forward.install(right)
        assert forward.fingerprinter()() == wanted and not caplog.text


@torch.inference_mode()
def test_a_tensor_that_is_loaded_by_half_changes_the_fingerprint(load, reference, model_folder):
    forward = load("qwen3")
    state = dict(read_safetensors(model_folder("qwen3", 1)))
    for name, tensor in state.items():
        half = tensor.clone()
        half[len(half) // 2 :] = 0
        forward.install(forward.prepare(state | {name: half}))
        assert forward.fingerprinter()() != fingerprint(named_bytes(reference("qwen3", 1).model)), name


@torch.inference_mode()
def test_norms_and_the_embedding_are_proven_as_they_serve(load):
    forward = load("qwen3")
    right = forward.fingerprinter()()
    weights = forward._weights
    for spoilt in (replace(weights, norm=weights.norm + 1e-6), replace(weights, embed=weights.embed + 1e-6)):
        forward.install(spoilt)
        assert forward.fingerprinter()() != right


def test_a_switch_is_whole_and_samples_carry_its_version(engine, model_folder):
    other = load_engine(EngineOptions(model=model_folder("qwen3", 1), quantization="int8"))
    before = engine.generate(PROMPTS, params(8, temperature=0))
    engine.stage(1, VersionSource("x"), engine.prepare(model_folder("qwen3", 1)))
    assert [out[0].token_ids for out in engine.generate(PROMPTS, params(8, temperature=0))] == [out[0].token_ids for out in before]
    engine.switch(1, "recompute")
    after = engine.generate(PROMPTS, params(8, temperature=0))
    assert {version for out in after for version in out[0].versions} == {1}
    assert engine.fingerprinter()[1]() == other.fingerprinter()[1]()
    for out, prompt in zip(after, PROMPTS, strict=True):  # each engine has factors of its own, by the model with which it was started
        told, scored = out[0].logprobs, other.score(prompt + out[0].token_ids)[1][len(prompt) - 1 :]
        assert np.abs(np.array(told) - scored).mean() < 0.3


def test_samples_have_the_log_probabilities_that_the_engine_scores(engine):
    for out, prompt in zip(engine.generate(PROMPTS, params(12, seed=3)), PROMPTS, strict=True):
        scored = engine.score(prompt + out[0].token_ids)[1][len(prompt) - 1 :]
        assert out[0].logprobs == pytest.approx(scored, abs=0.05), "decoding beside others, and at once alone"


def test_changes_are_read_from_the_last_whole_version_on_and_a_broadcast_is_taken_whole(load, model_folder, tmp_path):
    forward, base = load("qwen3"), shutil.copytree(model_folder("qwen3"), tmp_path / "v0")
    old = dict(read_safetensors(base))
    new = old | {name: tensor.clone() for name, tensor in old.items() if tensor.ndim == 1}
    new["model.norm.weight"][3] += 1
    assert write_changes(new, tmp_path / "v1", since=old, base=base)
    wanted = fingerprint((name, tensor.contiguous().view(-1).view(torch.uint8).numpy()) for name, tensor in new.items())
    forward.install(read_version(forward, str(tmp_path / "v1"), live=str(base)))
    assert forward.fingerprinter()() == wanted
    with pytest.MonkeyPatch.context() as patch:
        offer = WeightBroadcast(old, host="127.0.0.1", num_receivers=1, timeout_s=60, write_folder=lambda _state: None)
        patch.setattr(forward, "tensors", lambda: pytest.fail("what was rounded is no base of changes"))
        try:
            forward.install(read_version(forward, str(tmp_path / "nowhere"), offer.address, live=str(tmp_path / "v1")))
        finally:
            offer.close()
    assert forward.fingerprinter()() != wanted


def test_an_adapter_stays_float_beside_int8_weights(engine, model_folder, adapter_folder, reference):
    folder = adapter_folder("qwen3", 1)
    engine.adapters.add("a", folder, adapter := engine.adapters.read(folder))
    tokens = PROMPTS[0] * 3
    exact, plain = (reference("qwen3").merged(folder).logprobs(tokens), reference("qwen3").logprobs(tokens))
    with_it, without = (torch.tensor(engine.score(tokens, adapter=name)[1]) for name in ("a", ""))
    assert (with_it - exact).abs().mean() < 0.3 * (exact - plain).abs().mean()
    assert (without - plain).abs().mean() < 0.3 * (exact - plain).abs().mean()
    assert engine.live_adapter("a")[1].fingerprint() == adapter.fingerprint()


@pytest.mark.parametrize(("kind", "options", "reason"), [
    ("gpt2", {}, "it has no fast path for"), ("qwen3", {"forward": "hf"}, "it does not compute with them by forward = hf")])
def test_engines_that_do_not_compute_with_int8_weights_say_so(kind, options, reason, load):
    with pytest.raises(ModelError, match=f"cannot have int8 weights here, because {reason}"):
        load(kind, **options)


def test_an_accelerator_has_no_int8_weights(load, monkeypatch):
    monkeypatch.setattr(Platform, "device", torch.device("meta"))
    with pytest.raises(ModelError, match="because it has no kernel for them on meta"):
        load()


@torch.inference_mode()
def test_a_model_that_int8_spoils_does_not_serve(load, reference):
    forward, tokens = load(), ordinary_tokens(reference("qwen3").model.config.vocab_size)
    logits = reference("qwen3").logits(tokens.tolist())
    check_quantised(forward, logits)
    with pytest.raises(ModelError, match=rf"differs from the model by \S+ in log-probability, more than {QUANTISED_TOLERANCE:g}: it is"):
        check_quantised(forward, logits.roll(1, -1))
    decode = forward.decode
    forward.decode = lambda *step, **options: decode(*step, **options) * torch.nan
    with pytest.raises(ModelError, match="differs from the model by nan"):
        check_quantised(forward, logits)


def test_a_reader_notes_digests_only_where_it_is_told_to():
    state = {"a": torch.arange(6.0).view(2, 3)}
    readers = [StateReader(state, dtype=torch.float32, device=torch.device("cpu"), notes=notes) for notes in (True, False)]
    assert all(torch.equal(reader("a", 2, 3), state["a"]) for reader in readers)
    assert [set(reader.digests) for reader in readers] == [{"a"}, set()]
    with pytest.raises(ModelError, match="lack the tensor 'b'"):
        readers[0]("b", 1)


def test_a_watched_matrix_notes_the_largest_inputs_and_changes_no_product():
    matrix = ByColumns(torch.randn(3, 2))
    watched = WatchedMatrix(matrix)
    x = torch.tensor([[1.0, -5.0], [2.0, 3.0]])
    assert torch.equal(watched(x), matrix(x)) and torch.equal(watched.add(torch.ones(2, 3), -2 * x), matrix.add(torch.ones(2, 3), -2 * x))
    assert watched.largest.tolist() == [4, 10] and torch.equal(watched.plain, matrix.plain)


@torch.inference_mode()
def test_every_matrix_has_the_ranges_of_its_inputs(load):
    forward = DirectForward.__new__(DirectForward)
    forward.__dict__ |= load().__dict__
    before = forward._weights
    ranges = forward.input_ranges()
    assert forward._weights is before
    assert set(ranges) == {*(f"{i}.{name}" for i in range(2) for name in MATRICES), "head"}
    assert all((part > 0).all() for part in ranges.values())
    assert [len(ranges[name]) for name in ("0.qkv", "0.out", "0.gate_up", "0.down", "head")] == [48, 64, 48, 80, 48]
