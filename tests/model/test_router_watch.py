"""What is counted of routers in training: the figures of a slow version, once for each token, and of replayed experts how many agree."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from offbeat.config.model import ModelConfig
from offbeat.config.train import TrainConfig
from offbeat.data.batch import Batch
from offbeat.data.packing import pack_row
from offbeat.model.logprobs import token_logprobs
from offbeat.model.router_watch import RouterWatch
from offbeat.trainer.policy import let_replay, load_policy

LENGTHS = [5, 3]
TOKENS = np.array([5, 9, 20, 3, 8, 17, 6, 5], np.int32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    config = Qwen3MoeConfig(
        vocab_size=24, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=8, num_experts=6,
        num_experts_per_tok=2, moe_intermediate_size=8, max_position_embeddings=32, bos_token_id=None, eos_token_id=1, pad_token_id=0)
    path = tmp_path_factory.mktemp("experts")
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(8)
        model.save_pretrained(path)
    return str(path)


def row_of(routes=None):
    trained = np.array([False, True, True, True, True, False, True, True])
    batch = Batch.of_next_tokens(TOKENS, trained, lengths=LENGTHS, columns={}, losses=())
    return pack_row(replace(batch, routes=routes), share_prefix=True)


def choices_of(folder):
    """Logits [L, T, E] of all routers for all tokens, and the experts that they choose [L, T, k], each sequence by itself."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    parts = [model(torch.from_numpy(part.astype(np.int64))[None], output_router_logits=True).router_logits
             for part in np.split(TOKENS, np.cumsum(LENGTHS)[:-1])]
    logits_LTE = torch.stack([torch.cat([part[layer] for part in parts]) for layer in range(2)])
    return logits_LTE, logits_LTE.topk(2, dim=-1).indices


@pytest.mark.parametrize("recompute", ["off", "full"])
def test_figures_are_those_of_a_slow_version_and_count_each_token_once(folder, recompute):
    model = load_policy(folder, config=TrainConfig(gradient_checkpointing=recompute))
    watch, [logits_LTE, experts_LTK] = RouterWatch(model, replays=False), choices_of(folder)
    token_logprobs(model, row_of())  # outside, where nothing counts
    with watch.watching():
        logprobs = token_logprobs(model, row_of())
    logprobs.sum().backward()
    found = watch.metrics_of(watch.take())
    # The last token of a sequence predicts nothing and does not run.
    ran = [0, 1, 2, 3, 5, 6]
    logits_LTE, experts_LTK = logits_LTE[:, ran], experts_LTK[:, ran]
    counts_LE = torch.stack([torch.bincount(experts.flatten(), minlength=6) for experts in experts_LTK]).double()
    probs = logits_LTE.detach().softmax(-1)
    assert found == pytest.approx({
        "router/load_imbalance": (counts_LE.max(1).values / counts_LE.mean(1)).mean().item(),
        "router/unused_fraction": (counts_LE == 0).double().mean().item(), "router/entropy": -(probs * probs.log()).sum(-1).mean().item()})
    assert found["router/load_imbalance"] > 1
    assert not watch.take().any() and not any(watch.metrics_of(watch.take())[name] for name in ("router/entropy", "router/load_imbalance"))


def test_the_agreement_is_the_share_of_known_replayed_experts_that_the_router_would_choose_too(folder):
    model = let_replay(load_policy(folder, config=TrainConfig()), ModelConfig(route_replay="rollout"))
    watch, [_, experts_LTK] = RouterWatch(model, replays=True), choices_of(folder)
    # In the first layer, the router's own experts in another order; in the second, of each token one of its own and another one.
    first, second = experts_LTK[0].flip(-1), experts_LTK[1].clone()
    second[:, 1] = torch.tensor([next(other for other in range(6) if other not in own) for own in second.tolist()])
    routes = torch.cat([first, second], dim=1).numpy().astype(np.uint8)
    for num_unknown in (0, 3):
        routes[:num_unknown] = 255
        with watch.watching():
            token_logprobs(model, row_of(routes))
        # Other experts in the first layer would change what the second chooses by itself; its own in another order do not.
        assert watch.metrics_of(watch.take())["router/replay_agreement"] == pytest.approx(0.75)
    with watch.watching():
        token_logprobs(model, row_of())
    assert watch.metrics_of(watch.take())["router/replay_agreement"] == 0


def test_a_dense_model_has_nothing_to_watch(folder, tmp_path):
    model = load_policy(folder, config=TrainConfig())
    for layer in model.model.layers:
        layer.mlp = torch.nn.Identity()
    assert RouterWatch(model, replays=False).num_layers == 0
