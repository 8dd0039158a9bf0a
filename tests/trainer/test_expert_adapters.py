"""A run's adapter of experts: trained, published, exported, gone on with, and proven on the engine that samples with it."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import log_softmax
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from offbeat.data.tokenizer import character_tokenizer
from offbeat.engine.loader import load_engine
from offbeat.engine.options import EngineOptions
from offbeat.model.fused_experts import split_name
from offbeat.model.peft_io import read_adapter
from offbeat.trainer.messages import Folder
from ranks import run_alone
from train_samples import build_trainer, make_batch, train

LORA = {"rank": 2, "alpha": 8.0, "targets": ("all-linear", "experts")}
TOKENS = (5, 9, 20, 3, 8, 17, 6)


def build(folder: Path) -> str:
    tokenizer = character_tokenizer()
    tokenizer.save(folder)
    config = Qwen3MoeConfig(
        vocab_size=tokenizer.vocab_size, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
        num_experts=4, num_experts_per_tok=2, moe_intermediate_size=12, max_position_embeddings=64, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(4)
        model.save_pretrained(folder)
    return str(folder)


def test_what_the_trainer_scores_is_exported_and_sampled_from_and_proven(tmp_path):
    base = build(tmp_path / "model")

    def body(groups, _):
        trainer = build_trainer(groups, base, lora=LORA)
        train(trainer, [make_batch(2, 2, seed=seed) for seed in range(2)])
        snapshot = trainer.snapshot("float32")
        snapshot.write(tmp_path / "published")
        trainer.snapshot("float32", merges=True).export(tmp_path / "export", tokenizer_folder=Path(base))
        trainer.save(Folder(str(tmp_path / "kept")))
        again = build_trainer(groups, base, lora=LORA)
        assert again.snapshot("float32").fingerprint() != snapshot.fingerprint()
        again.load(Folder(str(tmp_path / "kept")))
        assert again.snapshot("float32").fingerprint() == snapshot.fingerprint()
        return snapshot.fingerprint(), trainer.canary(TOKENS)

    fingerprint, canary = run_alone(body)
    adapter = read_adapter(tmp_path / "published")
    assert any(split_name(name) and b.any() for name, (_, b) in adapter.pairs.items()) and adapter.fingerprint() == fingerprint
    tokens = torch.tensor([TOKENS])
    with torch.no_grad():
        exported = log_softmax(AutoModelForCausalLM.from_pretrained(tmp_path / "export")(tokens).logits, -1)[0, :-1]
    assert exported.gather(1, tokens[0, 1:, None])[:, 0].tolist() == pytest.approx(list(canary), abs=1e-5)
    engine = load_engine(EngineOptions(model=base))
    engine.adapters.add("a@1", str(tmp_path / "published"), engine.adapters.read(str(tmp_path / "published")))
    _, scores = engine.score(TOKENS, adapter="a@1")
    assert scores[-len(canary) :] == pytest.approx(list(canary), abs=1e-5)
    assert not np.allclose(engine.score(TOKENS)[1][-len(canary) :], canary, atol=1e-4)
    assert engine.live_adapter("a@1")[1].fingerprint() == fingerprint
