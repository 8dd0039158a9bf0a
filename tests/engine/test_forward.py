"""Both forward paths against Hugging Face's modules, token by token; weights in and out under their names."""

import copy
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from named_bytes import named_bytes
from offbeat.engine import batch_invariant, forward_direct, forward_hf, matrix
from offbeat.engine.cache import SlotCache, attend_by_products
from offbeat.engine.forward import Forward, _decoded_logprobs, _full_logprobs, check_forward, fingerprint_tensors, ordinary_tokens
from offbeat.engine.forward_direct import DirectForward
from offbeat.engine.forward_hf import HFForward
from offbeat.engine.loader import load_forward
from offbeat.engine.options import EngineOptions
from offbeat.engine.versions import read_version
from offbeat.errors import ModelError
from offbeat.model.fingerprint import fingerprint

DIRECT = ["qwen3", "qwen3-untied", "qwen2", "llama", "mistral", "llama-scaled-rope", "llama3-rope", "yarn"]
PATHS = [("direct", kind) for kind in DIRECT] + [("hf", kind) for kind in (*DIRECT, "qwen2-sliding", "gpt2")]
PROMPTS = [[5, 9, 20, 3, 8, 8, 41, 7, 7, 30, 12, 3], [4], [17, 6, 5, 33]]
CONTINUATION = [[8, 19], [21, 7], [5, 30]]


def load(folder: str, path: str) -> Forward:
    return load_forward(EngineOptions(model=folder, forward=path))


def score(forward: Forward, *prompts: list[int]) -> torch.Tensor:
    """[N * L, V] logits after every token of some prompts, padded on the right."""
    length = max(map(len, prompts))
    return torch.cat(list(forward.score(torch.tensor([prompt + [0] * (length - len(prompt)) for prompt in prompts]))))


@pytest.mark.parametrize(("path", "kind"), PATHS)
@torch.inference_mode()
def test_prefill_decode_and_score_give_the_models_logits(path, kind, model_folder, reference):
    forward = load(model_folder(kind), path)
    lengths = np.array([len(p) for p in PROMPTS])
    padded = torch.zeros(3, lengths.max(), dtype=torch.int64)
    for row, prompt in enumerate(PROMPTS):
        padded[row, : len(prompt)] = torch.tensor(prompt)
    cache = SlotCache(forward.cache_shape, device=forward.device, max_slots=3, max_positions=100)
    answers = [forward.prefill(padded, cache.prefill(np.arange(3), starts=np.zeros(3, np.int64), lengths=lengths))]
    for i in range(2):
        tokens = torch.tensor([more[i] for more in CONTINUATION])
        answers.append(forward.decode(tokens, cache.step(lengths + i)))
    for row, (prompt, more) in enumerate(zip(PROMPTS, CONTINUATION, strict=True)):
        expected = reference(kind).logits(prompt + more)[len(prompt) - 1 :]
        assert torch.allclose(torch.stack([a[row] for a in answers]), expected, atol=1e-4)
    scored = score(forward, *PROMPTS).unflatten(0, (len(PROMPTS), -1))
    for row, prompt in zip(scored, PROMPTS, strict=True):
        assert torch.allclose(row[: len(prompt)], reference(kind).logits(prompt), atol=1e-4)


@pytest.mark.parametrize(("path", "kind"), PATHS)
def test_tensors_have_the_trainers_names_and_bytes(path, kind, model_folder, reference):
    forward = load(model_folder(kind), path)
    assert fingerprint_tensors(forward.tensors()) == fingerprint(named_bytes(reference(kind).model))


@pytest.mark.parametrize(("path", "kind"), [("direct", "qwen3"), ("direct", "llama"), ("hf", "qwen3"), ("hf", "gpt2")])
@torch.inference_mode()
def test_installed_weights_serve_and_prepared_ones_do_not(path, kind, model_folder, reference):
    forward = load(model_folder(kind), path)
    tokens = PROMPTS[0]
    prepared = read_version(forward, model_folder(kind, 1))
    assert torch.allclose(score(forward, tokens), reference(kind).logits(tokens), atol=1e-4)
    before = forward.tensors()
    fingerprint_before = fingerprint_tensors(before)
    forward.install(prepared)
    assert torch.allclose(score(forward, tokens), reference(kind, 1).logits(tokens), atol=1e-4)
    assert fingerprint_tensors(forward.tensors()) == fingerprint(named_bytes(reference(kind, 1).model))
    assert fingerprint_tensors(before) == fingerprint_before, "a reader of the old version keeps it"


def test_auto_takes_the_direct_path_where_it_is_exact(model_folder):
    assert isinstance(load(model_folder("llama"), "auto"), DirectForward)
    assert isinstance(load(model_folder("llama3-rope"), "auto"), DirectForward)
    assert isinstance(load(model_folder("qwen2-sliding"), "auto"), HFForward)
    with pytest.raises(ModelError, match=r"gpt2.*use forward = auto or hf"):
        load(model_folder("gpt2"), "direct")


@pytest.mark.parametrize("path", ["direct", "hf"])
def test_weights_of_another_model_are_refused(path, model_folder, tmp_path):
    forward = load(model_folder("qwen3"), path)
    with pytest.raises(ModelError, match="lack the tensor"):
        read_version(forward, model_folder("llama"))
    state = forward.tensors()
    state["model.norm.weight"] = torch.zeros(3)
    with pytest.raises(ModelError, match=r"'model.norm.weight' with shape \(3,\), not \(48,\)"):
        forward.prepare(state)
    with pytest.raises(ModelError, match="holds no model.safetensors"):
        read_version(forward, str(tmp_path))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("path", ["direct", "hf"])
@torch.inference_mode()
def test_a_forward_that_decodes_wrongly_is_caught(path, dtype, model_folder):
    forward = load_forward(EngineOptions(model=model_folder("qwen3"), forward=path, dtype=dtype))
    check_forward(forward)
    right = forward.decode
    forward.decode = lambda *step, **options: right(*step, **options) * 1.5
    with pytest.raises(ModelError, match=rf"differs from a full forward by \S+ .* rounding to {dtype} explains .* model\.dtype"):
        check_forward(forward)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@torch.inference_mode()
def test_a_model_with_state_beside_its_cache_is_caught_in_any_number_format(dtype, model_folder):
    forward = load_forward(EngineOptions(model=model_folder("qwen3"), forward="hf", dtype=dtype))

    def add_the_token_before(_module, _inputs, output):
        return output + 0.2 * F.pad(output, (0, 0, 1, -1))  # nothing, where a step brings one token alone

    forward._model.model.layers[0].mlp.register_forward_hook(add_the_token_before)
    with pytest.raises(ModelError, match="keeps state that the embedded engine does not"):
        check_forward(forward)


def round_scores(monkeypatch) -> None:
    """Let forward paths loaded from now on round scores before they mask them, as a full forward does not."""
    monkeypatch.setattr(forward_direct, "fast_attention", lambda _device: batch_invariant.FastAttention())
    for module in (batch_invariant, forward_hf):
        monkeypatch.setattr(module, "attend", attend_by_products)


@pytest.mark.parametrize("path", ["direct", "hf"])
@torch.inference_mode()
def test_a_right_model_is_not_refused_for_how_sensitive_it_is_to_rounding(path, model_folder, reference, tmp_path, monkeypatch):
    round_scores(monkeypatch)
    model = copy.deepcopy(reference("llama", 1).model)
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            parameter.data *= 4.0  # sharp attention and logits, as pretrained models have them
    folder = shutil.copytree(model_folder("llama", 1), tmp_path / "sharp")
    model.save_pretrained(folder)
    forward = load_forward(EngineOptions(model=str(folder), forward=path, dtype="bfloat16"))
    tokens = ordinary_tokens(forward.vocab_size)
    full, decoded = _full_logprobs(forward, tokens), _decoded_logprobs(forward, tokens)
    assert (decoded - full).abs().max() > 0.25, "the worst of all tokens is far off, and yet all is right"
    before = fingerprint_tensors(forward.tensors())
    check_forward(forward)
    assert fingerprint_tensors(forward.tensors()) == before, "the check leaves the weights as they were"


@pytest.mark.parametrize("path", ["direct", "hf"])
@torch.inference_mode()
def test_in_bfloat16_decoding_stays_nearer_to_a_full_forward_than_rounded_scores_would(path, model_folder, monkeypatch):
    forward = load_forward(EngineOptions(model=model_folder("llama"), forward=path, dtype="bfloat16"))
    tokens = ordinary_tokens(forward.vocab_size)
    full = _full_logprobs(forward, tokens)
    error = (_decoded_logprobs(forward, tokens) - full).square().mean().sqrt()
    round_scores(monkeypatch)
    forward = load_forward(EngineOptions(model=model_folder("llama"), forward=path, dtype="bfloat16"))
    rounded = (_decoded_logprobs(forward, tokens) - full).square().mean().sqrt()
    share = 0.8 if path == "direct" else 0.5  # a full forward rounds attention's weights, which bags do not
    assert 0 < error < rounded * share


@pytest.mark.parametrize("path", ["direct", "hf"])
@torch.inference_mode()
def test_bfloat16_stays_near_float32(path, model_folder, reference):
    forward = load_forward(EngineOptions(model=model_folder("qwen3"), forward=path, dtype="bfloat16"))
    assert forward.cache_shape.dtype == torch.bfloat16
    got = score(forward, PROMPTS[0]).float().log_softmax(-1)
    assert (got - reference("qwen3").logits(PROMPTS[0]).log_softmax(-1)).abs().mean() < 0.1


@torch.inference_mode()
def test_a_model_with_packed_weights_gives_the_same_logits_and_the_same_bytes(model_folder, reference, monkeypatch):
    monkeypatch.setattr(matrix, "PACK_FROM", 1)
    forward = load(model_folder("qwen3-untied"), "direct")
    assert torch.allclose(score(forward, PROMPTS[0]), reference("qwen3-untied").logits(PROMPTS[0]), atol=1e-4)
    assert fingerprint_tensors(forward.tensors()) == fingerprint(named_bytes(reference("qwen3-untied").model))


def test_a_tied_head_that_was_packed_and_stayed_old_shows_in_the_fingerprint(model_folder, reference, monkeypatch):
    monkeypatch.setattr(matrix, "PACK_FROM", 1)
    forward = load(model_folder("qwen3"), "direct")
    old = forward._weights.head
    right = forward.prepare(dict(reference("qwen3", 1).model.state_dict()))
    forward.install(right)
    assert fingerprint_tensors(forward.tensors()) == fingerprint(named_bytes(reference("qwen3", 1).model))
    forward.install(replace(right, head=old))
    assert fingerprint_tensors(forward.tensors()) != fingerprint(named_bytes(reference("qwen3", 1).model))
