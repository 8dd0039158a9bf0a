"""Many adapters in one process: each as if it were alone, on one rank and on two."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from offbeat.algorithms.adam import AdamParams
from offbeat.config.algorithms import AlgorithmConfig
from offbeat.config.model import LoraConfig
from offbeat.config.root import Config
from offbeat.data.batch import TokenBatch
from offbeat.errors import ConfigError, DataError, ModelError, StorageError
from offbeat.model.peft_io import read_adapter
from offbeat.telemetry.tracker import combine
from offbeat.trainer.adapters import AdapterEngine
from ranks import run_alone, run_ranks
from train_samples import OPTIMIZER, build_engine, build_model, make_batch, share, train

PPO = AlgorithmConfig()
ADAM = AdamParams(lr=3e-3, weight_decay=0.01, clip_norm=0.5)
NAMES = ["alice", "bob", "carol"]
RANKS = {"alice": 4, "bob": 2, "carol": 3}


def configure(*, rank=4, max_tokens=1000, dropout=0.0, temperature=1.0, **train):
    return Config.model_validate({
        "model": {"lora": {"rank": rank, "dropout": dropout}}, "rollout": {"temperature": temperature},
        "train": {"max_tokens_per_microbatch": max_tokens, **train}})


def build(groups, folder, *, names=NAMES, **options):
    engine = AdapterEngine.build(folder, config=configure(**options), groups=groups)
    for name in names:
        engine.add(name, rank=RANKS[name], alpha=8.0, seed=NAMES.index(name))
    return engine


def mixed(step, names=NAMES):
    """A batch in which each adapter has a group of samples, with loss weights of its own."""
    parts = {name: make_batch(1, 3, seed=10 * step + NAMES.index(name)) for name in names}
    return TokenBatch.concatenate(list(parts.values())), [name for name in names for _ in range(3)]


def step(engine, number, names=NAMES, *, objective_name="ppo", params=ADAM):
    batch, adapters = mixed(number, names)
    engine.forward_backward(batch, adapters, objective_name=objective_name, algorithm=PPO)
    return engine.optim_step(dict.fromkeys(names, params))


def state_of(engine, name):
    """Every bit of an adapter."""
    slot = engine._slots[name]
    return torch.cat([engine._bank.weights.detach()[slot], engine._adam.exp_avg[slot], engine._adam.exp_avg_sq[slot],
                      engine._adam.steps[slot, None]])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return build_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("objective_name", ["ppo", "sft"])
def test_a_single_adapter_trains_as_in_a_train_engine(objective_name, folder):
    batches = [make_batch(3, 2, seed=seed) for seed in range(3)]
    constant = OPTIMIZER.model_copy(update={"warmup_steps": 0, "schedule": "constant"})

    def check(groups, _):
        theirs = build_engine(groups, folder, lora=LoraConfig(rank=4, alpha=8.0), optimizer=constant, objective_name=objective_name)
        expected = train(theirs, batches)
        mine = build(groups, folder, names=["alice"], max_tokens=40)
        results = []
        for batch in batches:
            part = mine.forward_backward(batch, ["alice"] * 6, objective_name=objective_name, algorithm=PPO).stats["alice"]
            norm = mine.optim_step({"alice": ADAM})["alice"]
            results.append([part.sums["train/loss"], norm])
        np.testing.assert_allclose(results, expected, rtol=1e-6, atol=1e-6)
        for name, tensor in theirs.copy().adapter.named_tensors().items():
            torch.testing.assert_close(mine._bank.adapter(0).named_tensors()[name], tensor, rtol=1e-5, atol=1e-6)

    run_alone(check)


def test_metrics_are_those_of_a_train_engine(folder):
    batch = make_batch(3, 2)

    def check(groups, _):
        theirs = build_engine(groups, folder, lora=LoraConfig(rank=4, alpha=8.0))
        part, micros = share(batch, rank=0, world=1)
        expected = theirs.train_step(part, [micros]).metrics
        mine = build(groups, folder, names=["alice"])
        answer = mine.forward_backward(batch, ["alice"] * 6, objective_name="ppo", algorithm=PPO)
        values = answer.stats["alice"].values()
        assert values.pop("train/logprob") == pytest.approx(answer.logprobs[batch.loss_mask].mean(), rel=1e-5)
        assert values == pytest.approx({name: expected[name] for name in values}, rel=1e-5, abs=1e-6)
        assert set(expected) - set(values) == {"train/lr", "train/grad_norm", "train/skipped_steps"}

    run_alone(check)


def test_an_adapter_is_the_same_with_and_without_others_in_the_batch(folder):
    def check(groups, _):
        together = build(groups, folder, max_tokens=40)
        alone = {name: build(groups, folder, names=[name]) for name in NAMES}
        for number in range(3):
            batch, adapters = mixed(number)
            everyones = together.forward_backward(batch, adapters, objective_name="ppo", algorithm=PPO)
            norms = together.optim_step(dict.fromkeys(NAMES, ADAM))
            for i, name in enumerate(NAMES):
                own = alone[name].forward_backward(batch.select(range(3 * i, 3 * i + 3)), [name] * 3, objective_name="ppo", algorithm=PPO)
                mine = everyones.logprobs[batch.offsets[3 * i]:batch.offsets[3 * i + 3]]
                np.testing.assert_allclose(mine, own.logprobs, atol=1e-6)
                assert everyones.stats[name].values() == pytest.approx(own.stats[name].values(), rel=1e-4, abs=1e-5)
                assert alone[name].optim_step({name: ADAM})[name] == pytest.approx(norms[name], rel=1e-4)
        for name in NAMES:
            torch.testing.assert_close(
                together._bank.weights[together._slots[name]], alone[name]._bank.weights[0], rtol=1e-4, atol=1e-5)

    run_alone(check)


def test_one_prompt_under_two_adapters_is_never_shared(folder):
    batch = make_batch(1, 4)

    def check(groups, _):
        engine = build(groups, folder)
        step(engine, 0)
        adapters = ["alice", "bob", "alice", "carol"]
        got = engine.forward(batch, adapters)
        for i, name in enumerate(adapters):
            expected = engine.forward(batch.select([i]), [name])
            np.testing.assert_allclose(got[batch.offsets[i]:batch.offsets[i + 1]], expected, atol=1e-5)

    run_alone(check)


def test_what_is_not_named_keeps_every_bit_with_weight_decay_on(folder):
    def check(groups, _):
        engine = build(groups, folder)
        step(engine, 0)
        batch, adapters = mixed(1)
        engine.forward_backward(batch, adapters, objective_name="ppo", algorithm=PPO)
        before = {name: state_of(engine, name) for name in NAMES}
        engine.optim_step({"alice": replace(ADAM, weight_decay=0.5)})
        assert not torch.equal(state_of(engine, "alice"), before["alice"])
        for name in ("bob", "carol"):
            assert torch.equal(state_of(engine, name), before[name])
        # Their gradients wait for them.
        norms = engine.optim_step({"bob": ADAM, "carol": ADAM, "alice": ADAM})
        assert norms["bob"] > 0 < norms["carol"]
        assert norms["alice"] == 0.0
        engine.forward(batch, adapters)
        engine.canary("bob", [3, 4, 5])
        after = {name: state_of(engine, name) for name in NAMES}
        engine.remove("carol")
        engine.add("carol", rank=2, alpha=1.0, seed=0)
        assert all(torch.equal(state_of(engine, name), after[name]) for name in ("alice", "bob"))
        assert not engine._adam.steps[engine._slots["carol"]] and not engine._bank.gradients[engine._slots["carol"]].any()

    run_alone(check)


def test_settings_differ_between_adapters(folder):
    def check(groups, _):
        engine, same = build(groups, folder), build(groups, folder)
        params = {"alice": ADAM, "bob": AdamParams(lr=1e-9), "carol": AdamParams(lr=0.1, weight_decay=0.9)}
        batch, adapters = mixed(0)
        for one in (engine, same):
            one.forward_backward(batch, adapters, objective_name="sft", algorithm=PPO)
        engine.optim_step(params)
        for name in NAMES:
            same.optim_step({name: params[name]})
            assert torch.equal(state_of(engine, name), state_of(same, name))

    run_alone(check)


def test_a_gradient_that_is_not_finite_leaves_out_its_adapter_alone(folder):
    def check(groups, _):
        engine, sound = build(groups, folder), build(groups, folder)
        batch, adapters = mixed(0)
        sound.forward_backward(batch, adapters, objective_name="ppo", algorithm=PPO)
        sound.optim_step(dict.fromkeys(NAMES, ADAM))
        before = state_of(engine, "bob")
        weights = batch.loss_weights.copy()
        weights[batch.offsets[3]:batch.offsets[6]] *= np.nan
        engine.forward_backward(replace(batch, loss_weights=weights), adapters, objective_name="ppo", algorithm=PPO)
        norms = engine.optim_step(dict.fromkeys(NAMES, ADAM))
        assert np.isnan(norms["bob"])
        assert torch.equal(state_of(engine, "bob"), before)
        for name in ("alice", "carol"):
            assert torch.equal(state_of(engine, name), state_of(sound, name))
        assert step(engine, 1)["bob"] > 0
        assert not torch.equal(state_of(engine, "bob"), before)

    run_alone(check)


def test_several_passes_add_up_and_can_be_discarded(folder):
    batch, adapters = mixed(0)

    def check(groups, _):
        once, thrice = build(groups, folder), build(groups, folder)
        once.forward_backward(batch, adapters, objective_name="sft", algorithm=PPO)
        thrice.forward_backward(batch, adapters, objective_name="ppo", algorithm=PPO)
        thrice.discard(NAMES)
        for indices in ([0, 4, 8], [7, 3, 2, 1], [5, 6]):
            thrice.forward_backward(batch.select(indices), [adapters[i] for i in indices], objective_name="sft", algorithm=PPO)
        assert once.optim_step(dict.fromkeys(NAMES, ADAM)) == pytest.approx(thrice.optim_step(dict.fromkeys(NAMES, ADAM)), rel=1e-4)
        assert once.optim_step({}) == {}

    run_alone(check)


def test_a_step_without_tokens_is_a_step_of_momentum_and_decay(folder):
    def check(groups, _):
        engine = build(groups, folder)
        step(engine, 0)
        before, others = state_of(engine, "alice"), state_of(engine, "bob")
        bank, adam, slot = engine._bank, engine._adam, engine._slots["alice"]
        expected = torch.nn.Parameter(bank.weights.detach()[slot].clone())
        optimizer = torch.optim.AdamW([expected], lr=ADAM.lr, betas=(ADAM.beta1, ADAM.beta2), eps=ADAM.eps, weight_decay=ADAM.weight_decay)
        optimizer.state[expected] = {
            "step": adam.steps[slot].clone(), "exp_avg": adam.exp_avg[slot].clone(), "exp_avg_sq": adam.exp_avg_sq[slot].clone()}
        expected.grad = torch.zeros_like(expected)
        optimizer.step()
        empty = engine.forward_backward(make_batch(1, 1).select([]), [], objective_name="ppo", algorithm=PPO)
        assert empty.stats == {} and len(empty.logprobs) == 0
        batch = make_batch(1, 2)
        silent = replace(batch, loss_mask=np.zeros_like(batch.loss_mask))
        stats = engine.forward_backward(silent, ["alice"] * 2, objective_name="ppo", algorithm=PPO).stats
        assert stats["alice"].sums == {"train/tokens": 0.0, "train/loss": 0.0}
        assert engine.optim_step({"alice": ADAM}) == {"alice": 0.0}
        assert engine.step_of("alice") == 2 and not torch.equal(state_of(engine, "alice"), before)
        torch.testing.assert_close(bank.weights.detach()[slot], expected.detach(), rtol=1e-6, atol=1e-8)
        assert torch.equal(state_of(engine, "bob"), others)

    run_alone(check)


def test_an_adapter_goes_on_exactly_from_what_was_saved_also_among_others_and_in_a_larger_bank(folder, tmp_path):
    def check(groups, _):
        engine = build(groups, folder)
        step(engine, 0)
        engine.save("bob", tmp_path / "bob")
        saved = engine.write("bob", tmp_path / "bob@1")
        other = build(groups, folder, names=[], rank=7)
        other.add("alice", rank=1, alpha=1.0, seed=3)
        other.restore("bob", tmp_path / "bob")
        assert other.names == ("alice", "bob")
        batch = make_batch(1, 3, seed=5)
        for _ in range(2):
            for one in (engine, other):
                one.forward_backward(batch, ["bob"] * 3, objective_name="ppo", algorithm=PPO)
            assert engine.optim_step({"bob": ADAM}) == pytest.approx(other.optim_step({"bob": ADAM}), rel=1e-5)
        on = engine._bank.adapter(engine._slots["bob"]).named_tensors()
        for name, tensor in other._bank.adapter(other._slots["bob"]).named_tensors().items():
            torch.testing.assert_close(on[name], tensor, rtol=1e-5, atol=1e-6)
        moved = state_of(engine, "bob")
        engine.restore("bob", tmp_path / "bob")
        assert engine.write("bob", tmp_path / "again").fingerprint == saved.fingerprint
        engine.forward_backward(batch, ["bob"] * 3, objective_name="ppo", algorithm=PPO)
        engine.optim_step({"bob": ADAM})
        engine.forward_backward(batch, ["bob"] * 3, objective_name="ppo", algorithm=PPO)
        engine.optim_step({"bob": ADAM})
        assert torch.equal(state_of(engine, "bob"), moved)

    run_alone(check)


def test_weights_alone_are_restored_for_a_fresh_optimizer(folder, tmp_path):
    def check(groups, _):
        engine = build(groups, folder)
        step(engine, 0)
        engine.save("bob", tmp_path / "bob")
        saved = engine.write("bob", tmp_path / "bob@1")
        step(engine, 1)
        engine.restore("bob", tmp_path / "bob", optimizer=False)
        engine.load("same", tmp_path / "bob@1")
        assert engine.write("bob", tmp_path / "again").fingerprint == saved.fingerprint
        assert engine.step_of("bob") == 0 and torch.equal(state_of(engine, "bob"), state_of(engine, "same"))

    run_alone(check)


@pytest.mark.parametrize("modules", [("attn",), ("mlp",)])
def test_layers_that_an_adapter_does_not_train_are_in_none_of_its_files_and_stay_as_in_the_model(modules, folder, tmp_path):
    def check(groups, _):
        engine = build(groups, folder, names=["alice"])
        engine.add("bob", rank=2, alpha=8.0, seed=1, modules=modules)
        for number in range(2):
            assert step(engine, number, ["alice", "bob"])["bob"] > 0
        engine.write("bob", tmp_path / "bob@1")
        config = json.loads((tmp_path / "bob@1" / "adapter_config.json").read_text())
        layers = {"attn": {"q_proj", "k_proj", "v_proj", "o_proj"}, "mlp": {"gate_proj", "up_proj", "down_proj"}}[modules[0]]
        assert set(config["target_modules"]) == layers
        model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), tmp_path / "bob@1")
        tokens = [3, 4, 5, 6, 7]
        with torch.no_grad():
            rows = model(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
        assert engine.canary("bob", tokens) == pytest.approx(rows.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].tolist(), abs=1e-5)
        engine.save("bob", tmp_path / "bob")
        before = state_of(engine, "bob")
        engine.restore("bob", tmp_path / "bob")
        assert torch.equal(state_of(engine, "bob"), before)
        step(engine, 2, ["alice", "bob"])
        assert {name.rpartition(".")[2] for name in engine._bank.adapter(engine._slots["bob"]).pairs} == layers
        assert np.count_nonzero(state_of(engine, "alice")) > np.count_nonzero(state_of(engine, "bob"))
        with pytest.raises(ModelError, match="the adapter would train no layer; model.lora.targets names layers of attn, mlp"):
            engine.add("carol", rank=2, alpha=8.0, seed=1, modules=())

    run_alone(check)


def test_adapters_are_written_and_loaded_in_the_format_of_peft(folder, tmp_path):
    def check(groups, _):
        engine = build(groups, folder)
        step(engine, 0)
        written = engine.write("carol", tmp_path / "carol@1")
        adapter = read_adapter(written.folder)
        assert (adapter.fingerprint(), adapter.num_bytes, adapter.rank) == (written.fingerprint, written.num_bytes, 3)
        engine.load("dave", tmp_path / "carol@1")
        assert engine.canary("dave", [3, 4, 5, 6]) == engine.canary("carol", [3, 4, 5, 6]) != engine.canary("bob", [3, 4, 5, 6])
        assert engine.write("dave", tmp_path / "dave@0").fingerprint == written.fingerprint
        with pytest.raises(StorageError, match="a version is written once"):
            engine.write("carol", tmp_path / "carol@1")

    run_alone(check)


def test_requests_that_cannot_be_served_say_why_and_change_nothing(folder, tmp_path):
    batch = make_batch(1, 2, prompt_len=9)

    def check(groups, _):
        engine = build(groups, folder, max_tokens=8)
        engine.write("alice", tmp_path / "alice@0")
        before = {name: state_of(engine, name) for name in NAMES}

        def run(adapters, **changes):
            arguments = {"objective_name": "ppo", "algorithm": PPO} | changes
            engine.forward_backward(batch, adapters, **arguments)

        for error, sentence, action in (
            (ConfigError, "there is an adapter 'bob' already", lambda: engine.add("bob", rank=1, alpha=1.0, seed=0)),
            (ConfigError, "there is an adapter 'bob' already", lambda: engine.load("bob", tmp_path / "alice@0")),
            (ConfigError, "a tenant's name is", lambda: engine.add("../bob", rank=1, alpha=1.0, seed=0)),
            (ConfigError, "a tenant's name is", lambda: engine.restore("../bob", tmp_path)),
            (ModelError, r"rank must be in 1\.\.4, got 5", lambda: engine.add("dave", rank=5, alpha=1.0, seed=0)),
            (ModelError, r"rank must be in 1\.\.4, got 0", lambda: engine.add("dave", rank=0, alpha=1.0, seed=0)),
            (ModelError, "is no adapter", lambda: engine.load("dave", tmp_path)),
            (StorageError, "is no checkpoint of an adapter", lambda: engine.restore("bob", tmp_path)),
            (ConfigError, "there is no adapter 'dave' here, only alice, bob, carol", lambda: engine.remove("dave")),
            (ConfigError, "there is no adapter 'dave' here", lambda: engine.optim_step({"alice": ADAM, "dave": ADAM})),
            (ConfigError, "there is no adapter 'dave' here", lambda: run(["alice", "dave"])),
            (ConfigError, "must be one of ppo, sft", lambda: run(["alice", "bob"], objective_name="dpo")),
            (ConfigError, "model.lora.rank must be at least 1 to train adapters", lambda: build(groups, folder, rank=0)),
            (ConfigError, "model.lora.dropout must be 0 to train many adapters, got 0.1", lambda: build(groups, folder, dropout=0.1)),
            (DataError, "got 1 names for 2 sequences", lambda: run(["alice"])),
            (DataError, "exceeds train.max_tokens_per_microbatch = 8", lambda: run(["alice", "bob"])),
        ):
            with pytest.raises(error, match=sentence):
                action()
        assert engine.names == tuple(NAMES)
        assert not engine._bank.gradients.any()
        assert all(torch.equal(state_of(engine, name), before[name]) for name in NAMES)

    run_alone(check)


def test_options_of_training_change_nothing_or_little(folder):
    def check(groups, _):
        expected = step(build(groups, folder), 0)
        assert step(build(groups, folder, gradient_checkpointing=True, share_prefix=False), 0) == pytest.approx(expected, rel=1e-4)
        assert step(build(groups, folder, autocast=True), 0) == pytest.approx(expected, rel=0.05)

    run_alone(check)


def _train_on_ranks(groups, folder):
    engine = build(groups, f"{folder}/model")
    results = []
    for number in range(3):
        batch, adapters = mixed(number)
        # Bob has all his sequences on the last rank, and nobody's share is as large as another's.
        mine = [i for i in range(9) if (i % 4 == 0 and i not in (3, 4, 5)) == (groups.rank == 0)] if groups.world > 1 else range(9)
        answer = engine.forward_backward(batch.select(mine), [adapters[i] for i in mine], objective_name="ppo", algorithm=PPO)
        losses = groups.sync.sum_scalars("losses", {
            name: combine([answer.stats[name]] if name in answer.stats else []).sums.get("train/loss", 0.0) for name in NAMES})
        results.append([losses, engine.optim_step(dict.fromkeys(NAMES, ADAM))])
    written = engine.write("bob", Path(folder) / f"bob@{groups.world}")
    engine.save("bob", Path(folder) / f"saved{groups.world}")
    groups.sync.barrier("written")
    engine.restore("bob", Path(folder) / f"saved{groups.world}")
    engine.load("dave", Path(written.folder))
    errors = []
    own = Path(folder) / ("saved2" if groups.rank == 0 else "nothing")
    try:
        engine.restore("bob", own)
    except StorageError as exc:
        errors.append(str(exc))
    return {
        "results": results, "fingerprint": written.fingerprint, "errors": errors, "canary": engine.canary("dave", [3, 4, 5]),
        "restored": engine.canary("bob", [3, 4, 5])}


def test_two_ranks_train_all_adapters_as_one_does(tmp_path):
    build_model(tmp_path / "model")
    alone = run_alone(_train_on_ranks, argument=str(tmp_path))
    first, second = run_ranks(_train_on_ranks, world=2, argument=str(tmp_path))
    for mine, expected in zip(first["results"], alone["results"], strict=True):
        for got, wanted in zip(mine, expected, strict=True):
            assert got == pytest.approx(wanted, rel=1e-4, abs=1e-6)
    for name in ("results", "fingerprint", "canary", "restored"):
        assert first[name] == second[name]
    assert first["canary"] == first["restored"] == pytest.approx(alone["canary"], abs=1e-5)
    assert "1 of 2 ranks could not read" in first["errors"][0]
    assert "nothing is no checkpoint" in second["errors"][0]


def test_many_more_adapters_than_slots_at_first(folder):
    def check(groups, _):
        engine = build(groups, folder, names=[])
        for i in range(9):
            engine.add(f"tenant-{i}", rank=1 + i % 4, alpha=4.0, seed=i)
        batch = TokenBatch.concatenate([make_batch(1, 1, seed=i) for i in range(9)])
        fast = AdamParams(lr=2e-2)
        losses = []
        for _ in range(5):
            answer = engine.forward_backward(batch, engine.names, objective_name="sft", algorithm=PPO)
            engine.optim_step(dict.fromkeys(engine.names, fast))
            losses.append([answer.stats[name].sums["train/loss"] for name in engine.names])
        assert (np.array(losses[-1]) < 0.95 * np.array(losses[0])).all()

    run_alone(check)
