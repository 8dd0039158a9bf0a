"""A run that trains one adapter: as by PEFT, alike on one rank and on two, and on from a checkpoint."""

from pathlib import Path

import numpy as np
import pytest
import torch
from peft import LoraConfig as PeftConfig
from peft import PeftModel, get_peft_model
from torch.nn.functional import log_softmax
from transformers import AutoModelForCausalLM

from offbeat.algorithms.adam import learning_rate
from offbeat.algorithms.objectives import policy_loss
from offbeat.config.algorithms import AlgorithmConfig
from offbeat.config.train import OptimizerConfig
from offbeat.data.batch import Batch
from offbeat.errors import RunError
from offbeat.model.load import load_causal_lm
from offbeat.trainer.messages import Folder
from ranks import run_alone, run_ranks
from train_samples import OPTIMIZER, build_model, build_trainer, imitated, make_batch, own_share, share, take_step, train

LORA = {"rank": 4, "alpha": 8.0}
BATCHES = [make_batch(3, 2, seed=seed) for seed in range(4)]
IMITATED = [imitated(batch) for batch in BATCHES]


def adapter_of(trainer):
    return trainer.snapshot("float32").fingerprint()


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
            total = total - (logprobs[one.positions] * torch.from_numpy(one.columns["loss_weights"])).sum()
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
        trainer = build_trainer(groups, folder, lora=LORA)
        trainer.snapshot("float32").write(tmp_path / "v0")
        mine = train(trainer, IMITATED, max_tokens=40)
        theirs, adapter = peft_steps(folder, tmp_path / "v0", IMITATED)
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)
        for name, tensor in trainer.snapshot("float32").adapter.named_tensors().items():
            torch.testing.assert_close(tensor, adapter[name], rtol=1e-5, atol=1e-6)
        bare = load_causal_lm(folder).state_dict()
        assert all(torch.equal(tensor, bare[name]) for name, tensor in trainer._model.state_dict().items())

    run_alone(check)


def test_a_fresh_adapter_is_drawn_as_by_peft(tmp_path):
    folder = build_model(tmp_path / "model")
    torch.manual_seed(0)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(folder), PeftConfig(r=4, target_modules="all-linear"))
    theirs = {name.replace(".default", ""): p for name, p in model.named_parameters() if p.requires_grad}

    def check(groups, _):
        mine = build_trainer(groups, folder, lora=LORA).snapshot("float32").adapter.named_tensors()
        assert mine.keys() == theirs.keys()
        for name, tensor in mine.items():
            assert tensor.shape == theirs[name].shape
            assert tensor.std().item() == pytest.approx(theirs[name].std().item(), rel=0.2)
            assert tensor.abs().max().item() == pytest.approx(theirs[name].abs().max().item(), rel=0.1)

    run_alone(check)


def _train_adapter(groups, folder):
    """By mesh, what must not depend on the number of ranks, or on a break in between."""
    return {mesh: _train_in_mesh(groups, folder, mesh) for mesh in ("ddp", "cp2")[: groups.world]}


def _train_in_mesh(groups, folder, mesh):
    trainer = build_trainer(groups, f"{folder}/model", lora=LORA, mesh=mesh)
    results = train(trainer, BATCHES[:2])
    batch = make_batch(2, 4, seed=9)
    halves = [own_share(trainer, batch.select(half)) for half in (np.arange(4), np.arange(4, 8))]
    mine = Batch.concatenate([half for half, _ in halves])
    minibatches = [halves[0][1], [indices + len(halves[0][0]) for indices in halves[1][1]]]
    metrics = take_step(trainer, mine, minibatches)
    canary = trainer.canary([3, 4, 5, 6])
    trainer.save(at := Folder(str(Path(folder) / f"saved-{mesh}-{groups.world}")))
    on = train(trainer, BATCHES[2:])
    resumed = build_trainer(groups, f"{folder}/model", lora=LORA, mesh=mesh)
    resumed.load(at)
    return {
        "results": results, "metrics": metrics, "canary": canary, "on": on, "step": resumed.step, "resumed": train(resumed, BATCHES[2:]),
        "same": adapter_of(resumed) == adapter_of(trainer), "fingerprint": adapter_of(trainer)}


@pytest.mark.drill
def test_two_ranks_train_an_adapter_as_one_does_and_go_on_exactly(tmp_path):
    build_model(tmp_path / "model")
    alone = run_alone(_train_adapter, argument=str(tmp_path))["ddp"]
    first, second = run_ranks(_train_adapter, world=2, argument=str(tmp_path))
    assert first == second
    for ran in (alone, *first.values()):
        assert ran["same"] and ran["step"] == 3
        assert ran["on"] == ran["resumed"]
        for name in ("results", "on", "canary"):
            np.testing.assert_allclose(ran[name], alone[name], rtol=1e-4, atol=1e-5)
        assert ran["metrics"] == pytest.approx(alone["metrics"], rel=1e-4, abs=1e-5)


@pytest.mark.drill
def test_dropout_goes_on_where_a_checkpoint_left_it_and_checkpointed_activations_drop_the_same(tmp_path):
    folder = build_model(tmp_path / "model")
    lora = LORA | {"dropout": 0.3}

    def check(groups, _):
        trainer = build_trainer(groups, folder, lora=lora)
        dry = train(build_trainer(groups, folder, lora=LORA), IMITATED)
        train(trainer, IMITATED[:2])
        trainer.save(Folder(str(tmp_path / "saved")))
        on = train(trainer, IMITATED[2:])
        resumed = build_trainer(groups, folder, lora=lora, gradient_checkpointing="full")
        resumed.load(Folder(str(tmp_path / "saved")))
        np.testing.assert_allclose(train(resumed, IMITATED[2:]), on, rtol=1e-5)
        assert np.abs(np.array(on) - np.array(dry[2:])).max() > 1e-4

    run_alone(check)


def test_dropout_is_for_supervised_training_alone(tmp_path):
    folder = build_model(tmp_path / "model")

    def check(groups, _):
        wet = build_trainer(groups, folder, lora=LORA | {"dropout": 0.5})
        assert train(wet, BATCHES) == train(build_trainer(groups, folder, lora=LORA), BATCHES)
        batch, minibatch = share(BATCHES[0], rank=0, world=1)
        on_policy = batch.with_columns(rollout_logprobs=wet.forward(batch).logprobs)
        assert take_step(wet, on_policy, [minibatch])["policy/ratio_mean"] == pytest.approx(1, abs=1e-6)

    run_alone(check)


@pytest.mark.parametrize("preset", ["grpo", "dr_grpo"])
def test_an_adapter_learns_by_every_preset_and_its_loss_may_change(preset, tmp_path):
    folder = build_model(tmp_path / "model")
    fast = OptimizerConfig(lr=2e-2)
    batch = make_batch(3, 2, seed=1, loss=policy_loss(AlgorithmConfig(preset=preset)))

    def check(groups, _):
        trainer = build_trainer(groups, folder, lora=LORA)
        losses = [loss for loss, _ in train(trainer, IMITATED[:1] * 8, optimizer=fast)]
        assert losses[-1] < 0.9 * losses[0]
        before = adapter_of(trainer)
        trainer.restart_optimizer()
        assert adapter_of(trainer) == before and trainer.step == 0
        losses = [loss for loss, _ in train(trainer, [batch] * 6, optimizer=fast)]
        assert losses[-1] < losses[0]
        assert adapter_of(trainer) != before

    run_alone(check)


def test_a_checkpoint_of_another_rank_is_refused(tmp_path):
    folder = build_model(tmp_path / "model")

    def check(groups, _):
        trainer = build_trainer(groups, folder, lora=LORA)
        train(trainer, BATCHES[:1])
        trainer.save(Folder(str(tmp_path / "saved")))
        with pytest.raises(RunError, match="could not be read"):
            build_trainer(groups, folder, lora={"rank": 2}).load(Folder(str(tmp_path / "saved")))

    run_alone(check)
