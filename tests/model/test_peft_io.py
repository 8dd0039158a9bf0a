"""Adapters as PEFT's folders: what we write PEFT reads, what PEFT writes we read, and nothing else gets in."""

import gc
import json
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from offbeat.errors import ModelError, StorageError
from offbeat.model.load import load_causal_lm
from offbeat.model.peft_io import Adapter, read_adapter, write_adapter
from offbeat.model.tiny import build_tiny
from small_run import TINY

TOKENS = torch.tensor([[5, 9, 3, 8, 8, 1, 7, 2]])
TARGETS = ["q_proj", "v_proj", "down_proj"]


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("base")
    build_tiny(folder, tiny=TINY, vocab_size=20, eos_token_id=0, pad_token_id=1, seed=3)
    return str(folder)


def make_adapter(base: str, *, rank: int = 3, scaling: float = 1.5, targets: list[str] = TARGETS) -> Adapter:
    torch.manual_seed(0)
    linears = {n: m for n, m in load_causal_lm(base).named_modules() if isinstance(m, nn.Linear) and n.rpartition(".")[2] in targets}
    return Adapter(rank, scaling, {n: (torch.randn(rank, m.in_features), torch.randn(m.out_features, rank)) for n, m in linears.items()})


@torch.no_grad()
def logits(model: nn.Module) -> Tensor:
    return model(input_ids=TOKENS, use_cache=False).logits


def merged_logits(base: str, adapter: Adapter) -> Tensor:
    model = load_causal_lm(base, attention="sdpa")
    for name, (a, b) in adapter.pairs.items():
        model.get_submodule(name).weight.data += adapter.scaling * (b @ a)
    return logits(model)


def by_peft(base: str, **config) -> PeftModel:
    """A model of PEFT's with an adapter that does something."""
    config = {"target_modules": TARGETS, "task_type": "CAUSAL_LM", **config}
    model = get_peft_model(load_causal_lm(base, attention="sdpa"), LoraConfig(**config))
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data.normal_(0, 0.3)
    return model


@pytest.mark.parametrize(("rank", "scaling"), [(3, 1.5), (7, 1 / 3), (1, 32.0)])
def test_what_is_written_is_read_back_to_the_bit(rank, scaling, base, tmp_path):
    adapter = make_adapter(base, rank=rank, scaling=scaling)
    write_adapter(adapter, tmp_path / "a", base_model="tiny")
    back = read_adapter(str(tmp_path / "a"))
    assert (back.rank, back.fingerprint(), back.num_bytes) == (rank, adapter.fingerprint(), adapter.num_bytes)
    assert back.scaling == pytest.approx(scaling) and back.pairs.keys() == adapter.pairs.keys()
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_the_fingerprint_is_of_names_and_float32_numbers(base):
    adapter = make_adapter(base)
    halves = Adapter(3, 1.5, {name: (a.half(), b.half()) for name, (a, b) in adapter.pairs.items()})
    assert halves.fingerprint() == Adapter(3, 1.5, {n: (a.float(), b.float()) for n, (a, b) in halves.pairs.items()}).fingerprint()
    assert adapter.fingerprint() != halves.fingerprint()
    assert adapter.fingerprint() != Adapter(3, 1.5, {f"{name}x": pair for name, pair in adapter.pairs.items()}).fingerprint()


@pytest.mark.parametrize("targets", [TARGETS, ["o_proj"], ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]])
def test_peft_computes_the_same_with_what_we_write(targets, base, tmp_path):
    adapter = make_adapter(base, targets=targets)
    write_adapter(adapter, tmp_path / "a", base_model=base, dropout=0.1)
    theirs = logits(PeftModel.from_pretrained(load_causal_lm(base, attention="sdpa"), tmp_path / "a").eval())
    assert torch.allclose(theirs, merged_logits(base, adapter), atol=1e-5)
    assert not torch.allclose(theirs, logits(load_causal_lm(base)), atol=1e-2)


@pytest.mark.parametrize("config", [
    {"r": 4, "lora_alpha": 6}, {"r": 4, "lora_alpha": 6, "use_rslora": True}, {"r": 2, "target_modules": "all-linear"},
    {"r": 2, "lora_dropout": 0.2, "init_lora_weights": "gaussian"}])
def test_we_compute_the_same_with_what_peft_writes(config, base, tmp_path):
    model = by_peft(base, **config).eval()
    model.save_pretrained(tmp_path / "a")
    adapter = read_adapter(tmp_path / "a")
    assert torch.allclose(logits(model), merged_logits(base, adapter), atol=1e-5)


@pytest.mark.parametrize("config", [
    {"use_dora": True}, {"rank_pattern": {"q_proj": 2}}, {"alpha_pattern": {"q_proj": 2}}, {"modules_to_save": ["norm"]},
    {"lora_bias": True}, {"bias": "lora_only"}, {"init_lora_weights": "pissa"}, {"alora_invocation_tokens": [3, 4]},
    {"trainable_token_indices": [1, 2]}, {"target_modules": ["q_proj", "embed_tokens"]}])
def test_adapters_of_peft_that_are_more_than_a_and_b_are_refused(config, base, tmp_path):
    by_peft(base, **config).save_pretrained(tmp_path / "a")
    with pytest.raises(ModelError, match="only plain LoRA"):
        read_adapter(tmp_path / "a")


def edit_config(folder: Path, **changes) -> None:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def edit_tensors(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def first(tensors: dict[str, Tensor]) -> str:
    return min(tensors)


@pytest.mark.parametrize(("damage", "message"), [
    (lambda f: (f / "adapter_config.json").unlink(), "is no adapter"),
    (lambda f: (f / "adapter_config.json").write_bytes(b"\xff{"), "is no adapter"),
    (lambda f: (f / "adapter_config.json").write_text("[]"), "peft_type is not LORA"),
    (lambda f: edit_config(f, peft_type="IA3"), "peft_type is not LORA"),
    (lambda f: edit_config(f, r="3"), "is damaged: .* r = '3'"),
    (lambda f: edit_config(f, r=0), "is damaged: .* r = 0"),
    (lambda f: edit_config(f, lora_alpha=None), "lora_alpha = None"),
    (lambda f: edit_config(f, lora_alpha=float("inf")), "lora_alpha = inf"),
    (lambda f: edit_config(f, r=4), "do not both have rank 4"),
    (lambda f: (f / "adapter_model.safetensors").unlink(), "cannot be read as safetensors"),
    (lambda f: (f / "adapter_model.safetensors").write_bytes(b"nonsense"), "cannot be read as safetensors"),
    (lambda f: os.truncate(f / "adapter_model.safetensors", 4000), "cannot be read as safetensors"),
    (lambda f: edit_tensors(f, lambda t: t.pop(first(t))), "do not both have rank"),
    (lambda f: edit_tensors(f, lambda t: t.update({first(t): torch.zeros(3)})), "do not both have rank"),
    (lambda f: edit_tensors(f, lambda t: t.update({"model.norm.weight": torch.zeros(3)})), "only plain LoRA"),
    (lambda f: edit_tensors(f, lambda t: t[first(t)].fill_(torch.nan)), "not finite"),
    (lambda f: edit_tensors(f, dict.clear), "no adapted layer"),
])
def test_a_damaged_or_foreign_folder_is_refused_in_one_sentence(damage, message, base, tmp_path):
    write_adapter(make_adapter(base), tmp_path / "a", base_model="tiny")
    damage(tmp_path / "a")
    with pytest.raises(ModelError, match=message) as refusal:
        read_adapter(tmp_path / "a")
    assert "\n" not in str(refusal.value)


def test_reading_an_adapter_again_and_again_takes_no_memory(base, tmp_path):
    write_adapter(make_adapter(base), tmp_path / "a", base_model="tiny")
    for _ in range(3):
        read_adapter(tmp_path / "a")
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(200):
            read_adapter(tmp_path / "a")
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] - before < 20_000
    finally:
        tracemalloc.stop()


def test_a_folder_is_written_once_and_whole(base, tmp_path):
    adapter = make_adapter(base)
    write_adapter(adapter, tmp_path / "a", base_model="tiny")
    before = (tmp_path / "a" / "adapter_model.safetensors").read_bytes()
    with pytest.raises(StorageError, match="exists; a version is written once"):
        write_adapter(make_adapter(base, scaling=9.0), tmp_path / "a", base_model="tiny")
    assert (tmp_path / "a" / "adapter_model.safetensors").read_bytes() == before
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="could not be written"):
        write_adapter(adapter, tmp_path / "file" / "a", base_model="tiny")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "file"]
