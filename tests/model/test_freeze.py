"""Frozen routers: trained are all other weights. The parts of models that read images are frozen in tests/model/test_images.py."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, MixtralConfig

from offbeat.config.train import TrainConfig
from offbeat.errors import ModelError
from offbeat.trainer.model_trainer import ModelTrainer
from offbeat.trainer.policy import load_policy
from ranks import run_alone
from train_samples import VOCAB, build_model, configure, imitated, make_batch, take_step


def test_frozen_routers_stay_and_all_other_weights_move(tmp_path):
    config = MixtralConfig(
        vocab_size=VOCAB, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
        num_local_experts=3, num_experts_per_tok=2, intermediate_size=12, max_position_embeddings=64, sliding_window=None,
        bos_token_id=None, eos_token_id=1, pad_token_id=0)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)

    def check(groups, _):
        trainer = ModelTrainer.build(str(tmp_path), config=configure(str(tmp_path), freeze=("router",)).for_ranks, groups=groups)
        before = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
        metrics = take_step(trainer, imitated(make_batch(2, 3)), [[np.arange(6)]])
        stayed = {name for name, tensor in trainer.model.state_dict().items() if torch.equal(tensor, before[name])}
        assert stayed == {f"model.layers.{layer}.mlp.gate.weight" for layer in range(2)}
        assert 0 < metrics["router/entropy"] < np.log(3) + 1e-6 and metrics["router/load_imbalance"] >= 1

    run_alone(check)


def test_a_dense_model_has_no_routers_to_freeze(tmp_path):
    with pytest.raises(ModelError, match='train.freeze names "router", and Qwen3ForCausalLM has no routers'):
        load_policy(build_model(tmp_path), config=TrainConfig(freeze=("router",)))
