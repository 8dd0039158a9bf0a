"""The load-balancing loss of routers: that of transformers over a whole minibatch, however it is split, and one that balances experts."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from offbeat.algorithms.reward_model import reward_batch
from offbeat.config.critic import CriticConfig
from offbeat.data.packing import plan_microbatches
from offbeat.data.pairs import EncodedPair
from offbeat.errors import ConfigError, ModelError
from offbeat.trainer.bank_trainer import BankTrainer
from offbeat.trainer.model_trainer import ModelTrainer
from offbeat.trainer.reward_trainer import RewardTrainer
from offbeat.trainer.value_trainer import ValueTrainer
from ranks import run_alone, run_ranks
from train_samples import OPTIMIZER, TINY, VOCAB, arranged, build_model, configure, imitated, make_batch, own_share, take_step

SIZES = {
    "vocab_size": VOCAB, "hidden_size": TINY.hidden_size, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "intermediate_size": 48, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
LINEAR = {
    "shared_expert_intermediate_size": 12, "linear_conv_kernel_dim": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "layer_types": ["linear_attention", "full_attention"]}
FAMILIES = {
    "mixtral": LOCAL | {"sliding_window": None}, "qwen2_moe": MOE | {"shared_expert_intermediate_size": 12}, "qwen3_moe": MOE,
    "olmoe": MOE, "phimoe": LOCAL, "granitemoe": LOCAL,
    "gpt_oss": LOCAL | {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]},
    "qwen3_next": MOE | LINEAR}  # whose sequences run one by one, padded
NOT_BALANCED = {
    "llama": {}, "llama4_text": {"num_local_experts": 2, "attention_chunk_size": 6, "intermediate_size_mlp": 48, "no_rope_layers": [1, 0]},
    "glm4_moe": {
        "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "n_group": 1, "topk_group": 1,
        "first_k_dense_replace": 1}}
COEFFICIENT = 0.5
UNCLIPPED = OPTIMIZER.model_copy(update={"clip_norm": 0.0})
WHOLE, IN_FOUR = 400, 20
"""Most tokens of a micro-batch: all in one, or groups torn apart."""


def build(folder, family, *, change=lambda model: None):
    """A random model whose routers are far from even."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**SIZES | (FAMILIES | NOT_BALANCED)[family]))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(3)
            change(model)
        model.save_pretrained(folder)
    return str(folder)


def wanted(folder, batch):
    """The loss of the routers by transformers, in float64 on padded sequences without their last tokens, and the gradients of it times the
    coefficient plus the batch's cross-entropy."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager")
    tokens, mask = (np.zeros((len(batch), max(batch.lengths) - 1), np.int64) for _ in range(2))
    for index, (low, high) in enumerate(zip(batch.offsets[:-1], batch.offsets[1:], strict=True)):
        tokens[index, : high - low - 1], mask[index, : high - low - 1] = batch.tokens[low : high - 1], 1
    outputs = model(
        input_ids=torch.from_numpy(tokens), attention_mask=torch.from_numpy(mask), output_router_logits=True, use_cache=False)
    total = COEFFICIENT * outputs.aux_loss.double()
    for target, (sequence, position) in enumerate(zip(batch.target_sequences, batch.positions, strict=True)):
        logprobs = outputs.logits[sequence, position - batch.offsets[sequence]].log_softmax(-1)
        total = total - logprobs[batch.targets[target]] * float(batch.columns["loss_weights"][target])
    total.backward()
    return outputs.aux_loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def gradients_of(trainer, batch, micros):
    """Metrics of a step, and the gradients with which it updated."""
    found = {}
    clear = trainer._clear

    def keep(names):
        found.update({name: p.grad.clone() for name, p in trainer.model.named_parameters() if p.grad is not None})
        clear(names)

    trainer._clear = keep
    return take_step(trainer, batch, [micros], optimizer=UNCLIPPED), found


def config_of(folder, coefficient=COEFFICIENT, **settings):
    return configure(folder, router_aux_loss_coefficient=coefficient, **settings)


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_are_those_of_transformers_over_all_sequences_in_one_micro_batch_or_in_four(tmp_path, family):
    folder, batch = build(tmp_path, family), imitated(make_batch(3, 4))
    loss, expected = wanted(folder, batch)

    def check(groups, max_tokens):
        config = config_of(folder, max_tokens_per_microbatch=max_tokens, share_prefix=family != "qwen3_next")
        trainer = ModelTrainer.build(folder, config=config.for_ranks, groups=groups)
        part, micros = own_share(trainer, batch, max_tokens=max_tokens)
        metrics, found = gradients_of(trainer, part, micros)
        assert len(micros) == (1 if max_tokens == WHOLE else 4)
        assert metrics["router/aux_loss"] == pytest.approx(loss, rel=1e-5) and 1 < metrics["router/load_imbalance"] < 2
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name].double(), gradient, rtol=1e-3, atol=2e-4, msg=lambda text, name=name: f"{name}: {text}")

    for max_tokens in (WHOLE, IN_FOUR):
        run_alone(check, argument=max_tokens)


def _gradients(groups, kind, folder, batch, coefficient, *, micros, **settings):
    trainer = kind.build(folder, config=config_of(folder, coefficient, **settings), groups=groups)
    return gradients_of(trainer, batch, micros)


def test_the_gradient_is_added_to_that_of_any_loss_of_a_policy_or_of_a_reward_model(tmp_path):
    folder = build(tmp_path, "mixtral")
    answers = tuple((np.array(text, np.int32), np.arange(len(text)) == len(text) - 1) for text in ([5, 9, 4, 1], [5, 9, 7, 3, 1]))
    pairs = [EncodedPair(answers, (True, False), 0.0, 2)]

    def check(groups, _):
        added, body = {}, {}
        for what, kind, batch in (
            ("ppo", ModelTrainer, make_batch(2, 3)), ("sft", ModelTrainer, imitated(make_batch(2, 3))),
            ("reward", RewardTrainer, rewarded := reward_batch(pairs, centring=0.01)),
            ("same", ModelTrainer, replace(rewarded, losses=imitated(make_batch(1, 1)).losses)),
        ):
            micros = plan_microbatches(batch, num_ranks=1, max_tokens=64, share_prefix=True).microbatches[0]
            (plain, without), (metrics, with_it) = (
                _gradients(groups, kind, folder, batch, coefficient, micros=micros) for coefficient in (0, COEFFICIENT))
            assert "router/aux_loss" not in plain and metrics["train/loss"] == pytest.approx(plain["train/loss"])
            body[what] = {name for name in with_it if "gate" in name or "self_attn" in name}
            added[what] = {name: with_it[name] - without[name] for name in body[what]}
        for one, other in (("ppo", "sft"), ("reward", "same")):
            assert max(gradient.abs().max() for gradient in added[one].values()) > 0.01
            for name in body[one]:
                torch.testing.assert_close(added[one][name], added[other][name], rtol=1e-3, atol=1e-4)

    run_alone(check)


@pytest.mark.parametrize("settings", [
    {"gradient_checkpointing": "full"}, {"gradient_checkpointing": "selective"}, {"share_prefix": False}])
def test_nothing_depends_on_how_a_row_runs(tmp_path, settings):
    folder, batch = build(tmp_path, "mixtral"), make_batch(3, 4)

    def check(groups, _):
        metrics, expected = _gradients(groups, ModelTrainer, folder, batch, COEFFICIENT, micros=[np.arange(12)])
        micros = [np.arange(0, 5), np.arange(5, 12)]
        found, gradients = _gradients(groups, ModelTrainer, folder, batch, COEFFICIENT, micros=micros, **settings)
        assert found["router/aux_loss"] == pytest.approx(metrics["router/aux_loss"], rel=1e-5)
        for name, gradient in expected.items():
            torch.testing.assert_close(gradients[name], gradient, rtol=1e-3, atol=1e-4)

    run_alone(check)


def test_each_minibatch_has_the_loss_of_its_own_tokens_and_the_step_reports_their_mean(tmp_path):
    folder, batch = build(tmp_path, "qwen3_moe"), make_batch(2, 3)

    def check(groups, _):
        def step(minibatches, coefficient):
            trainer = ModelTrainer.build(folder, config=config_of(folder, coefficient), groups=groups)
            return take_step(trainer, batch, minibatches, optimizer=OPTIMIZER.model_copy(update={"lr": 1e-12}))

        halves = [[np.arange(0, 3)], [np.arange(3, 6)]]
        first, second = (step([half], COEFFICIENT)["router/aux_loss"] for half in halves)
        both = step(halves, COEFFICIENT)
        assert both["router/aux_loss"] == pytest.approx((first + second) / 2, rel=1e-4)
        assert first != pytest.approx(second, rel=1e-3)

    run_alone(check)


def _in_meshes(groups, folder):
    meshes = ("ddp",) if groups.world == 1 else ("ddp", "fsdp", "cp2", "tp2 ep2", "ep2")
    cases = product((("mixtral", ModelTrainer), ("qwen3_moe", BankTrainer)), meshes, (WHOLE, IN_FOUR))
    return {f"{family}/{mesh}/{max_tokens}": _step(
        groups, f"{folder}/{family}", mesh=mesh, kind=kind, max_tokens=max_tokens) for (family, kind), mesh, max_tokens in cases}


def _step(groups, folder, *, mesh, kind, max_tokens):
    there = arranged(groups, mesh)
    config = config_of(folder, lora={"rank": 4} if kind is BankTrainer else None, max_tokens_per_microbatch=max_tokens)
    trainer = kind.build(folder, config=config.for_ranks, groups=there)
    part, micros = own_share(trainer, imitated(make_batch(3, 4)), max_tokens=max_tokens)
    found = [take_step(trainer, part, [micros]) for _ in range(2)]
    return [step[name] for step in found for name in ("router/aux_loss", "router/load_imbalance", "train/grad_norm", "train/loss")]


@pytest.mark.drill
def test_two_ranks_in_any_mesh_train_as_one_does(tmp_path):
    for family in ("mixtral", "qwen3_moe"):
        build(tmp_path / family, family)
    alone = run_alone(_in_meshes, argument=str(tmp_path))
    for found in run_ranks(_in_meshes, world=2, argument=str(tmp_path)):
        assert len(found) == 20
        for name, numbers in found.items():
            family, _, max_tokens = name.split("/")
            np.testing.assert_allclose(numbers, alone[f"{family}/ddp/{max_tokens}"], rtol=1e-4, err_msg=name)


def test_routers_that_send_all_tokens_to_the_same_experts_become_more_even_with_the_loss_alone(tmp_path):
    def collapse(model):
        for layer in model.model.layers:
            layer.mlp.router.bias.copy_(torch.tensor([6.0, 5.0, 0.0, 0.0]))

    folder, batch = build(tmp_path, "gpt_oss", change=collapse), imitated(make_batch(3, 4))

    def check(groups, _):
        last = {}
        for coefficient in (0.0, 1e-9, 1.0):
            trainer = ModelTrainer.build(folder, config=config_of(folder, coefficient), groups=groups)
            steps = [take_step(
                trainer, batch, [[np.arange(12)]], optimizer=UNCLIPPED.model_copy(update={"lr": 3e-2, "warmup_steps": 0}), total_steps=1000)
                for _ in range(40)]
            assert ("router/aux_loss" in steps[0]) == (coefficient > 0)
            if coefficient:
                uneven = [step["router/load_imbalance"] for step in steps]
                last[coefficient] = uneven[0], np.mean(uneven[-20:])
        assert last[1.0][0] > 1.8
        assert last[1e-9][1] > last[1.0][1] + 0.2

    run_alone(check)


@pytest.mark.parametrize(("family", "sentence"), [
    ("llama", "must be 0 for LlamaForCausalLM, for whose layers transformers has no load-balancing loss; leave it out"),
    ("llama4_text", "must be 0 for Llama4ForCausalLM, for whose"), ("glm4_moe", "must be 0 for Glm4MoeForCausalLM, for whose")])
def test_a_model_without_routers_or_without_such_a_loss_is_refused(tmp_path, family, sentence):
    folder = build(tmp_path, family)
    with pytest.raises(ModelError, match=f"train.router_aux_loss_coefficient {sentence}"):
        run_alone(lambda groups, _: ModelTrainer.build(folder, config=config_of(folder, share_prefix=False), groups=groups))


def test_a_critic_is_trained_without_it_and_many_adapters_are_refused(tmp_path):
    folder = build_model(tmp_path)
    config = config_of(folder, lora={"rank": 2}).model_copy(update={"critic": CriticConfig()})
    run_alone(lambda groups, _: ValueTrainer.build_critic(folder, config=config.for_ranks, groups=groups, policy=None))
    with pytest.raises(ConfigError, match="train.router_aux_loss_coefficient must be 0 to train many adapters, got 0.5; the loss of one"):
        run_alone(lambda groups, _: BankTrainer.build_empty(folder, config=config.for_ranks, groups=groups))
