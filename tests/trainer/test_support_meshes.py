"""Training within supports: the same numbers on one rank and on two in every mesh, for all log-probabilities that a loss compares."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from drawn_supports import supports_at_random
from offbeat.algorithms.objectives import policy_loss
from offbeat.config.algorithms import AlgorithmConfig
from offbeat.trainer.bank_trainer import BankTrainer
from offbeat.trainer.model_trainer import ModelTrainer
from ranks import run_alone, run_ranks
from train_samples import OPTIMIZER, VOCAB, arranged, build_model, configure, make_batch, own_share, score, take_step

ALGORITHM = {"entropy_coefficient": 0.1, "kl_loss": "k3"}


def _batch(*, whole=False):
    batch = make_batch(3, 4, loss=policy_loss(AlgorithmConfig(**ALGORITHM)))
    batch = batch.with_columns(ref_logprobs=np.linspace(-3, -1, batch.num_targets))
    supports, _ = supports_at_random(batch.targets, VOCAB)
    return batch if whole else replace(batch, supports=supports)


def _trainer(groups, folder, kind=ModelTrainer, mesh="ddp"):
    config = configure(folder, lora={"rank": 4} if kind is BankTrainer else None, algorithm=ALGORITHM, temperature=0.8)
    return kind.build(folder, config=config.for_ranks, groups=arranged(groups, mesh))


def _step(groups, folder, *, mesh, kind):
    trainer = _trainer(groups, folder, kind, mesh)
    part, micros = own_share(trainer, _batch(), max_tokens=40)
    found = [take_step(trainer, part, [micros, micros], optimizer=OPTIMIZER) for _ in range(2)]
    return [step[name] for step in found for name in ("train/grad_norm", "train/loss", "train/entropy")]


def _in_meshes(groups, folder):
    meshes = ("ddp",) if groups.world == 1 else ("fsdp", "cp2", "tp2")
    cases = product((ModelTrainer, BankTrainer), meshes)
    return {f"{kind.__name__} {mesh}": _step(groups, folder, mesh=mesh, kind=kind) for kind, mesh in cases}


@pytest.mark.drill
def test_two_ranks_in_any_mesh_normalise_within_supports_as_one_does(tmp_path):
    folder = build_model(tmp_path)
    alone = run_alone(_in_meshes, argument=folder)
    for found in run_ranks(_in_meshes, world=2, argument=folder):
        assert len(found) == 6 and all(np.isfinite(numbers).all() for numbers in found.values())
        for case, numbers in found.items():
            assert numbers == pytest.approx(alone[f"{case.split()[0]} ddp"], rel=1e-4), case


@pytest.mark.parametrize("kind", [ModelTrainer, BankTrainer])
def test_policy_reference_and_old_policy_are_normalised_within_the_same_supports(kind, tmp_path):
    folder = build_model(tmp_path)

    def check(groups, _):
        trainer = _trainer(groups, folder, kind)
        batch, whole = _batch(), _batch(whole=True)
        policy, reference = (score(trainer, batch, of=of)["logprobs"] for of in ("policy", "reference"))
        assert np.allclose(policy, reference, atol=1e-6) and (policy - score(trainer, whole)["logprobs"]).max() > 0.5
        # The ratio to the old policy is 1 before the first update, so both are normalised alike.
        still = OPTIMIZER.model_copy(update={"lr": 1e-12, "warmup_steps": 0})
        metrics = take_step(trainer, batch.with_columns(ref_logprobs=reference), [[np.arange(12)], [np.arange(12)]], optimizer=still)
        assert metrics["policy/ratio_max"] == pytest.approx(1, abs=1e-5)

    run_alone(check)
