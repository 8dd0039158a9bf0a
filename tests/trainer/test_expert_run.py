"""A whole run of a mixture of experts that is dealt to two ranks: it publishes with proofs, and goes on from its checkpoint on one rank."""

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from offbeat.data.tokenizer import character_tokenizer
from small_run import SmallRun, offbeat


def build(folder):
    tokenizer = character_tokenizer()
    tokenizer.save(folder)
    config = Qwen3MoeConfig(
        vocab_size=tokenizer.vocab_size, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, bos_token_id=None,
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=16, intermediate_size=64,
        max_position_embeddings=64, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return str(folder)


@pytest.mark.whole_run
@pytest.mark.parametrize("settings", [
    {}, {"model__route_replay": "rollout", "train__gradient_checkpointing": "full", "train__router_aux_loss_coefficient": "0.01"},
    {"model__lora__rank": "4"}], ids=["plain", "replayed", "adapter"])
def test_a_run_with_experts_over_two_ranks_publishes_them_whole_and_goes_on_over_one(tmp_path, settings):
    run = SmallRun(tmp_path, build(tmp_path / "model"))
    dealt = {"train__num_ranks": "2", "train__parallel__ep": "2"}
    done = offbeat("train", *run.arguments(**dealt, **settings, checkpoint__every_steps="1"), "--json")
    assert done.returncode == 0, done.stderr
    done = offbeat("train", *run.arguments(**settings, checkpoint__every_steps="1", run__total_steps="3"), "--json")
    assert done.returncode == 0, done.stderr
    assert [row["global_step"] for row in run.metrics()] == [1, 2, 3]
    publishes = run.events("publish")
    assert [event["version"] for event in publishes] == [0, 1, 2, 2, 3]
    assert all(event["canary_gap"] < 1e-3 and not event["quarantined"] for event in publishes)
