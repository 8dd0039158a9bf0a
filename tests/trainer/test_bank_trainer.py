"""Many adapters in one process: each as if it were alone, on one rank and on two."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from datum_samples import of_adapters
from offbeat.algorithms.adam import AdamParams
from offbeat.data.batch import Batch
from offbeat.errors import ConfigError, DataError, ModelError, StorageError
from offbeat.model.peft_io import read_adapter
from offbeat.trainer.bank_trainer import BankTrainer
from offbeat.trainer.messages import AdapterNames, CanaryTokens, Folder, NewAdapter, OptimStep, WriteRequest
from ranks import run_alone, run_ranks
from train_samples import OPTIMIZER, arranged, build_model, build_trainer, configure, imitated, make_batch, train

MODULES = ("attn", "mlp")
ADAM = AdamParams(lr=3e-3, weight_decay=0.01, clip_norm=0.5)
NAMES = ["alice", "bob", "carol"]
RANKS = {"alice": 4, "bob": 2, "carol": 3}


def build(groups, folder, *, names=NAMES, rank=4, dropout=0.0, max_tokens=1000, **train):
    config = configure(folder, lora={"rank": rank, "dropout": dropout}, max_tokens_per_microbatch=max_tokens, **train)
    trainer = BankTrainer.build_empty(str(folder), config=config.for_ranks, groups=groups)
    for name in names:
        add(trainer, name, rank=RANKS[name], alpha=8.0, seed=NAMES.index(name))
    return trainer


def add(trainer, name, *, rank, alpha, seed, modules=MODULES, folder=""):
    trainer.add(NewAdapter(name, rank, alpha, seed, modules, str(folder)))


def write(trainer, name, folder):
    return trainer.write_weights(WriteRequest(str(folder), "float32", (3, 4), name))


def updated(trainer, params):
    """Norms of the gradients of a step."""
    return trainer.optim_step(OptimStep(params)).grad_norms


def mixed(step, names=NAMES, *, imitates=False):
    """A batch in which each adapter has a group of samples, with loss weights of its own."""
    batch = of_adapters(Batch.concatenate([make_batch(1, 3, seed=10 * step + NAMES.index(name)) for name in names]), named(names))
    return imitated(batch) if imitates else batch


def named(names, each=3):
    return [name for name in names for _ in range(each)]


def step(trainer, number, names=NAMES):
    trainer.forward_backward(mixed(number, names))
    return updated(trainer, dict.fromkeys(names, ADAM))


def state_of(trainer, name):
    """Every bit of an adapter."""
    slot = trainer._slots[name]
    return torch.cat([trainer._bank.weights.detach()[slot], trainer._adam.exp_avg[slot], trainer._adam.exp_avg_sq[slot],
                      trainer._adam.steps[slot, None]])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return build_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("imitates", [False, True])
def test_one_adapter_among_many_trains_as_in_a_run_of_its_own(imitates, folder):
    batches = [make_batch(3, 2, seed=seed) for seed in range(3)]
    batches = [imitated(batch) for batch in batches] if imitates else batches
    constant = OPTIMIZER.model_copy(update={"warmup_steps": 0, "schedule": "constant"})

    def check(groups, _):
        theirs = build_trainer(groups, folder, lora={"rank": 4, "alpha": 8.0})
        expected = train(theirs, batches, optimizer=constant)
        mine = build(groups, folder, names=["alice"], max_tokens=40)
        results = []
        for batch in batches:
            losses = mine.forward_backward(of_adapters(batch, ["alice"] * 6)).losses
            results.append([losses.sum(), updated(mine, {"alice": ADAM})["alice"]])
        np.testing.assert_allclose(results, expected, rtol=1e-6, atol=1e-6)
        for name, tensor in theirs.snapshot("float32").adapter.named_tensors().items():
            torch.testing.assert_close(mine._bank.adapter(0).named_tensors()[name], tensor, rtol=1e-5, atol=1e-6)

    run_alone(check)


def test_an_adapter_is_the_same_with_and_without_others_in_the_batch(folder):
    def check(groups, _):
        together = build(groups, folder, max_tokens=40)
        alone = {name: build(groups, folder, names=[name]) for name in NAMES}
        for number in range(3):
            batch = mixed(number)
            everyones = together.forward_backward(batch)
            norms = updated(together, dict.fromkeys(NAMES, ADAM))
            for i, name in enumerate(NAMES):
                mine = of_adapters(batch.select(range(3 * i, 3 * i + 3)), [name] * 3)
                own = alone[name].forward_backward(mine)
                np.testing.assert_allclose(
                    everyones.logprobs[batch.target_offsets[3 * i] : batch.target_offsets[3 * i + 3]], own.logprobs, atol=1e-6)
                np.testing.assert_allclose(everyones.losses[3 * i : 3 * i + 3], own.losses, rtol=1e-4, atol=1e-5)
                assert updated(alone[name], {name: ADAM})[name] == pytest.approx(norms[name], rel=1e-4)
        for name in NAMES:
            torch.testing.assert_close(
                together._bank.weights[together._slots[name]], alone[name]._bank.weights[0], rtol=1e-4, atol=1e-5)

    run_alone(check)


def test_one_prompt_under_two_adapters_is_never_shared(folder):
    batch = make_batch(1, 4)

    def check(groups, _):
        trainer = build(groups, folder)
        step(trainer, 0)
        names = ["alice", "bob", "alice", "carol"]
        got = trainer.forward(of_adapters(batch, names)).logprobs
        for i, name in enumerate(names):
            expected = trainer.forward(of_adapters(batch.select([i]), [name])).logprobs
            np.testing.assert_allclose(got[batch.target_offsets[i] : batch.target_offsets[i + 1]], expected, atol=1e-5)

    run_alone(check)


def test_what_is_not_named_keeps_every_bit_with_weight_decay_on(folder):
    def check(groups, _):
        trainer = build(groups, folder)
        step(trainer, 0)
        batch = mixed(1)
        trainer.forward_backward(batch)
        before = {name: state_of(trainer, name) for name in NAMES}
        updated(trainer, {"alice": replace(ADAM, weight_decay=0.5)})
        assert not torch.equal(state_of(trainer, "alice"), before["alice"])
        for name in ("bob", "carol"):
            assert torch.equal(state_of(trainer, name), before[name])
        # Their gradients wait for them.
        norms = updated(trainer, {"bob": ADAM, "carol": ADAM, "alice": ADAM})
        assert norms["bob"] > 0 < norms["carol"]
        assert norms["alice"] == 0.0
        trainer.forward(batch)
        trainer.canary([3, 4, 5], name="bob")
        after = {name: state_of(trainer, name) for name in NAMES}
        trainer.remove(AdapterNames(("carol",)))
        add(trainer, "carol", rank=2, alpha=1.0, seed=0)
        assert all(torch.equal(state_of(trainer, name), after[name]) for name in ("alice", "bob"))
        assert not trainer._adam.steps[trainer._slots["carol"]] and not trainer._bank.gradients[trainer._slots["carol"]].any()

    run_alone(check)


def test_settings_differ_between_adapters(folder):
    def check(groups, _):
        trainer, same = build(groups, folder), build(groups, folder)
        params = {"alice": ADAM, "bob": AdamParams(lr=1e-9), "carol": AdamParams(lr=0.1, weight_decay=0.9)}
        batch = mixed(0)
        for one in (trainer, same):
            one.forward_backward(imitated(batch))
        updated(trainer, params)
        for name in NAMES:
            updated(same, {name: params[name]})
            assert torch.equal(state_of(trainer, name), state_of(same, name))

    run_alone(check)


def test_a_gradient_that_is_not_finite_leaves_out_its_adapter_alone(folder):
    def check(groups, _):
        trainer, sound = build(groups, folder), build(groups, folder)
        batch = mixed(0)
        sound.forward_backward(batch)
        updated(sound, dict.fromkeys(NAMES, ADAM))
        before = state_of(trainer, "bob")
        weights = batch.columns["loss_weights"].copy()
        weights[batch.target_offsets[3] : batch.target_offsets[6]] *= np.nan
        trainer.forward_backward(batch.with_columns(loss_weights=weights))
        norms = updated(trainer, dict.fromkeys(NAMES, ADAM))
        assert np.isnan(norms["bob"])
        assert torch.equal(state_of(trainer, "bob"), before)
        for name in ("alice", "carol"):
            assert torch.equal(state_of(trainer, name), state_of(sound, name))
        assert step(trainer, 1)["bob"] > 0
        assert not torch.equal(state_of(trainer, "bob"), before)

    run_alone(check)


def test_a_step_that_would_make_weights_infinite_leaves_out_its_adapter_alone(folder):
    def check(groups, _):
        trainer, sound = build(groups, folder), build(groups, folder)
        for each in (trainer, sound):
            step(each, 0)
            each.forward_backward(mixed(1))
        before = state_of(trainer, "bob")
        updated(sound, dict.fromkeys(NAMES, ADAM))
        norms = updated(trainer, dict.fromkeys(NAMES, ADAM) | {"bob": replace(ADAM, weight_decay=1e200)})
        assert np.isnan(norms["bob"]) and torch.equal(state_of(trainer, "bob"), before)
        for name in ("alice", "carol"):
            assert norms[name] > 0 and torch.equal(state_of(trainer, name), state_of(sound, name))
        assert step(trainer, 2)["bob"] > 0 and state_of(trainer, "bob").isfinite().all()

    run_alone(check)


def test_several_passes_add_up_and_can_be_discarded(folder):
    batch = mixed(0)

    def check(groups, _):
        once, thrice = build(groups, folder), build(groups, folder)
        once.forward_backward(imitated(batch))
        thrice.forward_backward(batch)
        thrice.discard(AdapterNames(tuple(NAMES)))
        for indices in ([0, 4, 8], [7, 3, 2, 1], [5, 6]):
            thrice.forward_backward(imitated(batch.select(indices)))
        assert updated(once, dict.fromkeys(NAMES, ADAM)) == pytest.approx(updated(thrice, dict.fromkeys(NAMES, ADAM)), rel=1e-4)
        assert updated(once, {}) == {}

    run_alone(check)


def test_a_step_without_tokens_is_a_step_of_momentum_and_decay(folder):
    def check(groups, _):
        trainer = build(groups, folder)
        step(trainer, 0)
        before, others = state_of(trainer, "alice"), state_of(trainer, "bob")
        bank, adam, slot = trainer._bank, trainer._adam, trainer._slots["alice"]
        expected = torch.nn.Parameter(bank.weights.detach()[slot].clone())
        optimizer = torch.optim.AdamW([expected], lr=ADAM.lr, betas=(ADAM.beta1, ADAM.beta2), eps=ADAM.eps, weight_decay=ADAM.weight_decay)
        optimizer.state[expected] = {
            "step": adam.steps[slot].clone(), "exp_avg": adam.exp_avg[slot].clone(), "exp_avg_sq": adam.exp_avg_sq[slot].clone()}
        expected.grad = torch.zeros_like(expected)
        optimizer.step()
        batch = of_adapters(make_batch(1, 2), ["alice"] * 2)
        empty = trainer.forward_backward(batch.select([]))
        assert len(empty.losses) == len(empty.logprobs) == 0
        silent = replace(
            batch, positions=[], targets=[], columns={name: np.zeros(0) for name in batch.columns})
        assert trainer.forward_backward(silent).losses.tolist() == [0.0, 0.0]
        assert updated(trainer, {"alice": ADAM}) == {"alice": 0.0}
        assert trainer._steps("alice") == 2 and not torch.equal(state_of(trainer, "alice"), before)
        torch.testing.assert_close(bank.weights.detach()[slot], expected.detach(), rtol=1e-6, atol=1e-8)
        assert torch.equal(state_of(trainer, "bob"), others)

    run_alone(check)


def test_an_adapter_goes_on_exactly_from_what_was_saved_also_among_others_and_in_a_larger_bank(folder, tmp_path):
    def check(groups, _):
        trainer = build(groups, folder)
        step(trainer, 0)
        trainer.save(Folder(str(tmp_path / "bob"), "bob"))
        saved = write(trainer, "bob", tmp_path / "bob@1")
        other = build(groups, folder, names=[], rank=7)
        add(other, "alice", rank=1, alpha=1.0, seed=3)
        other.load(Folder(str(tmp_path / "bob"), "bob"))
        assert other.names == ("alice", "bob")
        batch = of_adapters(make_batch(1, 3, seed=5), ["bob"] * 3)
        for _ in range(2):
            for one in (trainer, other):
                one.forward_backward(batch)
            assert updated(trainer, {"bob": ADAM}) == pytest.approx(updated(other, {"bob": ADAM}), rel=1e-5)
        on = trainer._bank.adapter(trainer._slots["bob"]).named_tensors()
        for name, tensor in other._bank.adapter(other._slots["bob"]).named_tensors().items():
            torch.testing.assert_close(on[name], tensor, rtol=1e-5, atol=1e-6)
        moved = state_of(trainer, "bob")
        trainer.load(Folder(str(tmp_path / "bob"), "bob"))
        assert write(trainer, "bob", tmp_path / "again").fingerprint == saved.fingerprint
        trainer.forward_backward(batch)
        updated(trainer, {"bob": ADAM})
        trainer.forward_backward(batch)
        updated(trainer, {"bob": ADAM})
        assert torch.equal(state_of(trainer, "bob"), moved)

    run_alone(check)


def test_weights_alone_are_restored_for_a_fresh_optimizer(folder, tmp_path):
    def check(groups, _):
        trainer = build(groups, folder)
        step(trainer, 0)
        trainer.save(Folder(str(tmp_path / "bob"), "bob"))
        saved = write(trainer, "bob", tmp_path / "bob@1")
        step(trainer, 1)
        trainer.load(Folder(str(tmp_path / "bob"), "bob", optimizer=False))
        add(trainer, "same", rank=1, alpha=1.0, seed=0, folder=tmp_path / "bob@1")
        assert write(trainer, "bob", tmp_path / "again").fingerprint == saved.fingerprint
        assert trainer._steps("bob") == 0 and torch.equal(state_of(trainer, "bob"), state_of(trainer, "same"))

    run_alone(check)


@pytest.mark.parametrize("modules", [("attn",), ("mlp",)])
def test_layers_that_an_adapter_does_not_train_are_in_none_of_its_files_and_stay_as_in_the_model(modules, folder, tmp_path):
    def check(groups, _):
        trainer = build(groups, folder, names=["alice"])
        add(trainer, "bob", rank=2, alpha=8.0, seed=1, modules=modules)
        for number in range(2):
            assert step(trainer, number, ["alice", "bob"])["bob"] > 0
        write(trainer, "bob", tmp_path / "bob@1")
        config = json.loads((tmp_path / "bob@1" / "adapter_config.json").read_text())
        layers = {"attn": {"q_proj", "k_proj", "v_proj", "o_proj"}, "mlp": {"gate_proj", "up_proj", "down_proj"}}[modules[0]]
        assert set(config["target_modules"]) == layers
        model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), tmp_path / "bob@1")
        tokens = [3, 4, 5, 6, 7]
        with torch.no_grad():
            rows = model(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
        expected = rows.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].tolist()
        assert trainer.canary(tokens, name="bob") == pytest.approx(expected, abs=1e-5)
        trainer.save(Folder(str(tmp_path / "bob"), "bob"))
        before = state_of(trainer, "bob")
        trainer.load(Folder(str(tmp_path / "bob"), "bob"))
        assert torch.equal(state_of(trainer, "bob"), before)
        step(trainer, 2, ["alice", "bob"])
        assert {name.rpartition(".")[2] for name in trainer._bank.adapter(trainer._slots["bob"]).pairs} == layers
        assert np.count_nonzero(state_of(trainer, "alice")) > np.count_nonzero(state_of(trainer, "bob"))
        with pytest.raises(ModelError, match="the adapter would train no layer; model.lora.targets names layers of attn, mlp"):
            add(trainer, "carol", rank=2, alpha=8.0, seed=1, modules=())

    run_alone(check)


def test_adapters_are_written_and_loaded_in_the_format_of_peft(folder, tmp_path):
    def check(groups, _):
        trainer = build(groups, folder)
        step(trainer, 0)
        written = write(trainer, "carol", tmp_path / "carol@1")
        adapter = read_adapter(tmp_path / "carol@1")
        assert (adapter.fingerprint(), adapter.num_bytes, adapter.rank) == (written.fingerprint, written.num_bytes, 3)
        add(trainer, "dave", rank=1, alpha=1.0, seed=0, folder=tmp_path / "carol@1")
        dave, carol, bob = (trainer.canary([3, 4, 5, 6], name=name) for name in ("dave", "carol", "bob"))
        assert dave == carol != bob
        assert write(trainer, "dave", tmp_path / "dave@0").fingerprint == written.fingerprint
        with pytest.raises(StorageError, match="a version is written once"):
            write(trainer, "carol", tmp_path / "carol@1")

    run_alone(check)


def test_requests_that_cannot_be_served_say_why_and_change_nothing(folder, tmp_path):
    batch = make_batch(1, 2, prompt_len=9)

    def check(groups, _):
        trainer = build(groups, folder, max_tokens=8)
        write(trainer, "alice", tmp_path / "alice@0")
        before = {name: state_of(trainer, name) for name in NAMES}

        def run(names):
            trainer.forward_backward(of_adapters(batch, names))

        for error, sentence, action in (
            (ConfigError, "there is an adapter 'bob' already", lambda: add(trainer, "bob", rank=1, alpha=1.0, seed=0)),
            (ConfigError, "there is an adapter 'bob' already", lambda: add(
                trainer, "bob", rank=1, alpha=1.0, seed=0, folder=tmp_path / "alice@0")),
            (ConfigError, "an adapter's name is", lambda: add(trainer, "../bob", rank=1, alpha=1.0, seed=0)),
            (ConfigError, "an adapter's name is", lambda: trainer.load(Folder(str(tmp_path), "../bob"))),
            (ModelError, r"rank must be in 1\.\.4, got 5", lambda: add(trainer, "dave", rank=5, alpha=1.0, seed=0)),
            (ModelError, r"rank must be in 1\.\.4, got 0", lambda: add(trainer, "dave", rank=0, alpha=1.0, seed=0)),
            (ModelError, "is no adapter", lambda: add(trainer, "dave", rank=1, alpha=1.0, seed=0, folder=tmp_path)),
            (StorageError, "is not a checkpoint of an adapter", lambda: trainer.load(Folder(str(tmp_path), "bob"))),
            (ConfigError, "there is no adapter 'dave', only alice, bob, carol", lambda: trainer.remove(AdapterNames(("dave",)))),
            (ConfigError, "there is no adapter 'dave'", lambda: updated(trainer, {"alice": ADAM, "dave": ADAM})),
            (ConfigError, "there is no adapter 'dave'", lambda: run(["alice", "dave"])),
            (ConfigError, "model.lora.rank must be at least 1 to train many adapters", lambda: build(groups, folder, rank=0)),
            (ConfigError, "model.lora.dropout must be 0 to train many adapters, got 0.1", lambda: build(groups, folder, dropout=0.1)),
            (DataError, "exceeds train.max_tokens_per_microbatch = 8", lambda: run(["alice", "bob"])),
        ):
            with pytest.raises(error, match=sentence):
                action()
        assert trainer.names == tuple(NAMES)
        assert not trainer._bank.gradients.any()
        assert all(torch.equal(state_of(trainer, name), before[name]) for name in NAMES)

    run_alone(check)


def test_options_of_training_change_nothing_or_little(folder):
    def check(groups, _):
        expected = step(build(groups, folder), 0)
        assert step(build(groups, folder, gradient_checkpointing="full", share_prefix=False), 0) == pytest.approx(expected, rel=1e-4)
        assert step(build(groups, folder, precision="bf16_mixed"), 0) == pytest.approx(expected, rel=0.05)

    run_alone(check)


def _train_on_ranks(groups, folder):
    trainer = build(groups, f"{folder}/model")
    results = []
    for number in range(3):
        batch = mixed(number)
        # Bob has all his sequences on the last rank, and nobody's share is as large as another's.
        mine = [i for i in range(9) if (i % 4 == 0 and i not in (3, 4, 5)) == (groups.rank == 0)] if groups.world > 1 else range(9)
        answer = trainer.forward_backward(batch.select(mine))
        of_sequence = dict(zip(mine, answer.losses.tolist(), strict=True))
        losses = groups.sync.sum_scalars("losses", {str(i): of_sequence.get(i, 0.0) for i in range(9)})
        results.append([losses, updated(trainer, dict.fromkeys(NAMES, ADAM))])
    written = write(trainer, "bob", Path(folder) / f"bob@{groups.world}")
    trainer.save(Folder(str(Path(folder) / f"saved{groups.world}"), "bob"))
    groups.sync.barrier("written")
    trainer.load(Folder(f"{folder}/saved{groups.world}", "bob"))
    add(trainer, "dave", rank=1, alpha=1.0, seed=0, folder=f"{folder}/bob@{groups.world}")
    errors = []
    own = Path(folder) / ("saved2" if groups.rank == 0 else "nothing")
    try:
        trainer.load(Folder(str(own), "bob"))
    except StorageError as exc:
        errors.append(str(exc))
    return {
        "results": results, "fingerprint": written.fingerprint, "errors": errors, "canary": trainer.canary([3, 4, 5], name="dave"),
        "restored": trainer.canary([3, 4, 5], name="bob")}


def test_two_ranks_train_all_adapters_as_one_does(tmp_path):
    build_model(tmp_path / "model")
    alone = run_alone(_train_on_ranks, argument=str(tmp_path))
    first, second = run_ranks(_train_on_ranks, world=2, argument=str(tmp_path))
    for mine, expected in zip(first["results"], alone["results"], strict=True):
        for got, wanted in zip(mine, expected, strict=True):
            assert got == pytest.approx(wanted, rel=1e-4, abs=1e-6)
    assert first["fingerprint"] and not second["fingerprint"]
    for name in ("results", "canary", "restored"):
        assert first[name] == second[name]
    assert first["canary"] == first["restored"] == pytest.approx(alone["canary"], abs=1e-5)
    assert "1 of 2 ranks could not read" in first["errors"][0]
    assert "nothing is not a checkpoint" in second["errors"][0]


def _train_rows_together(groups, folder):
    trainer = build(groups if groups.world == 1 else arranged(groups, "cp2"), folder)
    found = []
    for number in range(2):
        answer = trainer.forward_backward(mixed(number))
        found.append([answer.logprobs.tolist(), answer.losses.tolist(), updated(trainer, dict.fromkeys(NAMES, ADAM))])
    base = trainer.score_base(CanaryTokens((3, 4, 5))).logprobs
    return [found, base, [trainer.canary([3, 4, 5], name=name) for name in NAMES]]


def test_two_ranks_that_share_rows_train_all_adapters_as_one_does(folder):
    expected, base, canaries = run_alone(_train_rows_together, argument=str(folder))
    for found, own_base, own_canaries in run_ranks(_train_rows_together, world=2, argument=str(folder)):
        for (logprobs, losses, norms), (own_logprobs, own_losses, own_norms) in zip(expected, found, strict=True):
            np.testing.assert_allclose(own_logprobs, logprobs, atol=1e-5)
            np.testing.assert_allclose(own_losses, losses, atol=1e-5)
            assert own_norms == pytest.approx(norms, rel=1e-5)
        np.testing.assert_allclose(own_base, base, atol=1e-5)
        np.testing.assert_allclose(own_canaries, canaries, atol=1e-5)


def test_many_more_adapters_than_slots_at_first(folder):
    def check(groups, _):
        trainer = build(groups, folder, names=[])
        for i in range(9):
            add(trainer, f"tenant-{i}", rank=1 + i % 4, alpha=4.0, seed=i)
        batch = imitated(of_adapters(Batch.concatenate([make_batch(1, 1, seed=i) for i in range(9)]), trainer.names))
        fast = AdamParams(lr=2e-2)
        losses = []
        for _ in range(5):
            losses.append(trainer.forward_backward(batch).losses)
            updated(trainer, dict.fromkeys(trainer.names, fast))
        assert (np.array(losses[-1]) < 0.95 * np.array(losses[0])).all()

    run_alone(check)
