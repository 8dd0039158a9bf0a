"""Which strategy is chosen, that FSDP2 shards every decoder layer, and that an adapter trains alike however it is run.

That those which train the whole model compute the same is tested with the engine.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import LoraConfig as PeftConfig
from peft import PeftModel, get_peft_model
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.functional import log_softmax
from transformers import AutoModelForCausalLM

from offbeat.config.algorithms import AlgorithmConfig
from offbeat.config.model import LoraConfig
from offbeat.config.train import OptimizerConfig
from offbeat.errors import ModelError, RunError
from offbeat.model.load import load_causal_lm
from offbeat.trainer.optim import learning_rate
from offbeat.trainer.strategies import Alone, Sharded, choose, whole
from ranks import run_alone, run_ranks
from train_samples import OPTIMIZER, TINY, build_engine, build_model, make_batch, share, train

LORA = LoraConfig(rank=4, alpha=8.0)
BATCHES = [make_batch(3, 2, seed=seed) for seed in range(4)]


@pytest.mark.parametrize("name, kind", [("ddp", Alone), ("fsdp", Sharded)])
def test_one_rank_holds_the_model_bare_or_sharded(name, kind, tmp_path):
    model = load_causal_lm(build_model(tmp_path))
    strategy = run_alone(lambda groups, _: choose(name, model, groups=groups))
    assert type(strategy) is kind
    assert strategy.model is model


def test_a_model_whose_sequences_run_one_by_one_is_not_sharded(tmp_path):
    model = load_causal_lm(build_model(tmp_path), attention=None)
    with pytest.raises(ModelError, match=r'cannot pack its rows, which train.strategy = "fsdp" needs; use "ddp"'):
        run_alone(lambda groups, _: choose("fsdp", model, groups=groups))


def test_every_decoder_layer_is_a_unit_of_its_own(tmp_path):
    model = load_causal_lm(build_model(tmp_path))
    weight = model.get_input_embeddings().weight.detach().clone()

    def check(groups, _):
        strategy = choose("fsdp", model, groups=groups)
        units = [module for module in strategy.model.modules() if isinstance(module, FSDPModule)]
        assert len(units) == TINY.num_layers + 1
        sharded = strategy.model.get_input_embeddings().weight
        assert isinstance(sharded, DTensor)
        assert torch.equal(whole(sharded.detach()), weight)

    run_alone(check)


def adapter_of(engine):
    return engine.copy().adapter.fingerprint()


def peft_steps(folder, start, batches):
    """[loss, gradient norm] of supervised steps by PEFT and torch, one sequence at a time, and the adapter they end with."""
    base = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    model = PeftModel.from_pretrained(base, start, is_trainable=True)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, betas=(OPTIMIZER.beta1, OPTIMIZER.beta2), weight_decay=OPTIMIZER.weight_decay, foreach=False)
    results = []
    for step, batch in enumerate(batches):
        total = 0.0
        for i in range(len(batch)):
            one = batch.select([i])
            tokens = torch.from_numpy(one.tokens.astype(np.int64))
            logprobs = log_softmax(model(tokens[None], use_cache=False).logits[0, :-1], -1).gather(1, tokens[1:, None])[:, 0]
            total = total - (logprobs * torch.from_numpy(one.loss_weights[1:])).sum()
        optimizer.zero_grad()
        total.backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters, OPTIMIZER.clip_norm)
        optimizer.param_groups[0]["lr"] = learning_rate(step, config=OPTIMIZER, total_steps=10)
        optimizer.step()
        results.append([total.item(), norm.item()])
    return results, {name.replace(".default", ""): p.detach() for name, p in model.named_parameters() if p.requires_grad}


def test_an_adapter_is_trained_as_by_peft_and_the_model_stays(tmp_path):
    folder = build_model(tmp_path / "model")

    def check(groups, _):
        engine = build_engine(groups, folder, lora=LORA, objective_name="sft")
        engine.publish(tmp_path / "v0", dtype="float32")
        mine = train(engine, BATCHES, max_tokens=40)
        theirs, adapter = peft_steps(folder, tmp_path / "v0", BATCHES)
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)
        for name, tensor in engine.copy().adapter.named_tensors().items():
            torch.testing.assert_close(tensor, adapter[name], rtol=1e-5, atol=1e-6)
        bare = load_causal_lm(folder).state_dict()
        assert all(torch.equal(tensor, bare[name]) for name, tensor in engine._strategy.forward.state_dict().items())

    run_alone(check)


def test_a_fresh_adapter_is_drawn_as_by_peft(tmp_path):
    folder = build_model(tmp_path / "model")
    torch.manual_seed(0)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(folder), PeftConfig(r=4, target_modules="all-linear"))
    theirs = {name.replace(".default", ""): p for name, p in model.named_parameters() if p.requires_grad}

    def check(groups, _):
        mine = build_engine(groups, folder, lora=LORA).copy().adapter.named_tensors()
        assert mine.keys() == theirs.keys()
        for name, tensor in mine.items():
            assert tensor.shape == theirs[name].shape
            assert tensor.std().item() == pytest.approx(theirs[name].std().item(), rel=0.2)
            assert tensor.abs().max().item() == pytest.approx(theirs[name].abs().max().item(), rel=0.1)

    run_alone(check)


def _train_adapter(groups, folder):
    """What must not depend on the number of ranks, or on a break in between."""
    lora = LORA.model_copy(update={"dropout": 0.0})
    engine = build_engine(groups, f"{folder}/model", lora=lora)
    results = train(engine, BATCHES[:2])
    batch = make_batch(2, 4, seed=9)
    halves = [share(batch.select(half), rank=groups.rank, world=groups.world) for half in (np.arange(4), np.arange(4, 8))]
    mine = halves[0][0].concatenate([half for half, _ in halves])
    minibatches = [halves[0][1], [indices + len(halves[0][0]) for indices in halves[1][1]]]
    metrics = engine.train_step(mine, minibatches).metrics
    canary = engine.canary([3, 4, 5, 6])
    engine.save(Path(folder) / f"saved{groups.world}")
    on = train(engine, BATCHES[2:])
    resumed = build_engine(groups, f"{folder}/model", lora=lora)
    resumed.load(Path(folder) / f"saved{groups.world}")
    return {
        "results": results, "metrics": metrics, "canary": canary, "on": on, "step": resumed.step, "resumed": train(resumed, BATCHES[2:]),
        "same": adapter_of(resumed) == adapter_of(engine), "fingerprint": adapter_of(engine)}


def test_two_ranks_train_an_adapter_as_one_does_and_go_on_exactly(tmp_path):
    build_model(tmp_path / "model")
    alone = run_alone(_train_adapter, argument=str(tmp_path))
    first, second = run_ranks(_train_adapter, world=2, argument=str(tmp_path))
    assert first == second
    for ran in (alone, first):
        assert ran["same"] and ran["step"] == 3
        assert ran["on"] == ran["resumed"]
    for name in ("results", "on", "canary"):
        np.testing.assert_allclose(first[name], alone[name], rtol=1e-4, atol=1e-5)
    assert first["metrics"] == pytest.approx(alone["metrics"], rel=1e-4, abs=1e-5)


def test_dropout_goes_on_where_a_checkpoint_left_it_and_checkpointed_activations_drop_the_same(tmp_path):
    folder = build_model(tmp_path / "model")
    lora = LORA.model_copy(update={"dropout": 0.3})

    def check(groups, _):
        engine = build_engine(groups, folder, lora=lora, objective_name="sft")
        dry = train(build_engine(groups, folder, lora=LORA, objective_name="sft"), BATCHES)
        train(engine, BATCHES[:2])
        engine.save(tmp_path / "saved")
        on = train(engine, BATCHES[2:])
        resumed = build_engine(groups, folder, lora=lora, objective_name="sft", gradient_checkpointing=True)
        resumed.load(tmp_path / "saved")
        np.testing.assert_allclose(train(resumed, BATCHES[2:]), on, rtol=1e-5)
        assert np.abs(np.array(on) - np.array(dry[2:])).max() > 1e-4

    run_alone(check)


def test_dropout_is_for_supervised_training_alone(tmp_path):
    folder = build_model(tmp_path / "model")

    def check(groups, _):
        wet = build_engine(groups, folder, lora=LORA.model_copy(update={"dropout": 0.5}))
        assert train(wet, BATCHES) == train(build_engine(groups, folder, lora=LORA), BATCHES)
        batch, minibatch = share(BATCHES[0], rank=0, world=1)
        on_policy = replace(batch, rollout_logprobs=wet.logprobs(batch, minibatch))
        assert wet.train_step(on_policy, [minibatch]).metrics["policy/ratio_mean"] == pytest.approx(1, abs=1e-6)

    run_alone(check)


@pytest.mark.parametrize("preset", ["grpo", "dr_grpo"])
def test_an_adapter_learns_by_every_preset_and_its_objective_may_change(preset, tmp_path):
    folder = build_model(tmp_path / "model")
    fast = OptimizerConfig(lr=2e-2)

    def check(groups, _):
        engine = build_engine(groups, folder, lora=LORA, algorithm=AlgorithmConfig(preset=preset), optimizer=fast, objective_name="sft")
        losses = [loss for loss, _ in train(engine, BATCHES[:1] * 8)]
        assert losses[-1] < 0.9 * losses[0]
        before = adapter_of(engine)
        engine.set_objective("ppo", algorithm=AlgorithmConfig(preset=preset), optimizer=fast, total_steps=5)
        assert engine.fingerprint("float32") == before
        losses = [loss for loss, _ in train(engine, BATCHES[1:2] * 6)]
        assert losses[-1] < losses[0]
        assert adapter_of(engine) != before

    run_alone(check)


def test_a_checkpoint_of_another_rank_is_refused(tmp_path):
    folder = build_model(tmp_path / "model")

    def check(groups, _):
        engine = build_engine(groups, folder, lora=LORA)
        train(engine, BATCHES[:1])
        engine.save(tmp_path / "saved")
        with pytest.raises(RunError, match="could not be read"):
            build_engine(groups, folder, lora=LoraConfig(rank=2)).load(tmp_path / "saved")

    run_alone(check)
