"""The reference policy: to the bit the weights that training began with, until it is refreshed, of a whole model and of an adapter."""

from pathlib import Path

import numpy as np
import pytest

from offbeat.errors import ConfigError
from offbeat.trainer import shards
from offbeat.trainer.messages import Folder
from ranks import run_alone, run_ranks
from train_samples import MESHES, build_model, build_trainer, make_batch, score, take_step, train

KINDS = {**{mesh: {"mesh": mesh} for mesh in MESHES[2]}, "lora": {"lora": {"rank": 4, "alpha": 8.0}}}
BATCHES = [make_batch(3, 2, seed=seed) for seed in range(6)]
PROBE = make_batch(4, 3, seed=9)


def _bits(trainer, of):
    return score(trainer, PROBE, of)["logprobs"].tobytes().hex()


def _both(trainer):
    return [_bits(trainer, "policy"), _bits(trainer, "reference")]


def _live(groups, folder):
    """By kind, what both policies give at each moment of a trainer's life, and of one that went on from its checkpoints."""
    kinds = ("ddp", "lora") if groups.world == 1 else MESHES[2]
    return {kind: _live_one(groups, Path(folder), kind, KINDS[kind]) for kind in kinds}


def _live_one(groups, folder, kind, settings):
    def build(**changes):
        return build_trainer(groups, folder / "model", **settings | changes)

    def at(name):
        return Folder(str(folder / f"{kind}-{name}-{groups.world}"))

    seen = {}
    fixed = build(refresh_steps=0)
    seen["begin"] = _both(fixed)
    plain = train(build(), BATCHES[:3])
    seen["unmoved"] = train(fixed, BATCHES[:3]) == plain
    seen["trained"] = _both(fixed)
    fixed.save(at("fixed"))
    resumed = build(refresh_steps=0)
    resumed.load(at("fixed"))
    seen["resumed"] = _both(resumed)

    moving = build(refresh_steps=2)
    for step, batch in enumerate(BATCHES[:3], 1):
        results = train(moving, [batch])
        assert results == [plain[step - 1]], "a reference changes no step that does not read it"
        seen[f"step {step}"] = _both(moving)
    moving.save(at("moving"))
    resumed = build(refresh_steps=2)
    resumed.load(at("moving"))
    seen["moving resumed"] = _both(resumed)
    seen["goes on"] = train(moving, BATCHES[3:]) == train(resumed, BATCHES[3:]) and _both(moving) == _both(resumed)
    resumed.load(at("fixed"))
    seen["back"] = _both(resumed)
    without = build()
    without.load(at("moving"))
    seen["without"] = [_bits(without, "policy")]

    fixed.restart_optimizer()
    seen["new phase"] = _both(fixed)
    seen["saved"] = [shards.holds(at(name).folder, "reference") for name in ("fixed", "moving")]
    return seen


@pytest.fixture(scope="module")
def lives(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reference")
    build_model(folder / "model")
    return [run_alone(_live, argument=str(folder)), *run_ranks(_live, world=2, argument=str(folder))]


@pytest.mark.drill
@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_is_the_initial_policy_to_the_bit_and_stays_so(lives, kind):
    for seen in (life[kind] for life in lives if kind in life):
        policy, initial = seen["begin"]
        assert policy == initial
        assert seen["unmoved"], "a model without a reference trains in the same way"
        assert seen["trained"][0] != initial and seen["trained"][1] == initial
        assert seen["resumed"] == seen["trained"]
        assert seen["saved"] == [False, True], "an initial reference is in no checkpoint"


@pytest.mark.drill
@pytest.mark.parametrize("kind", KINDS)
def test_a_refreshed_reference_is_the_policy_of_that_step_and_goes_on_from_a_checkpoint(lives, kind):
    for seen in (life[kind] for life in lives if kind in life):
        initial = seen["begin"][1]
        assert seen["step 1"][1] == initial
        assert seen["step 2"][0] == seen["step 2"][1] != initial
        assert seen["step 3"][0] != seen["step 3"][1] == seen["step 2"][1]
        assert seen["moving resumed"] == seen["step 3"] and seen["goes on"]
        assert seen["back"] == seen["trained"], "a checkpoint without a reference means the initial one"
        assert seen["without"] == seen["step 3"][:1], "a trainer without a reference leaves out the one in a checkpoint"


@pytest.mark.drill
@pytest.mark.parametrize("kind", KINDS)
def test_a_new_phase_of_training_refers_to_what_the_last_one_has_trained(lives, kind):
    for seen in (life[kind] for life in lives if kind in life):
        assert seen["new phase"] == [seen["trained"][0]] * 2


@pytest.mark.parametrize("kind", ["ddp", "lora"])
def test_scores_are_those_of_the_training_step_to_the_bit_whatever_the_micro_batches_are_to_rounding(kind, tmp_path):
    folder = build_model(tmp_path / "model")

    def check(groups, _):
        trainer = build_trainer(groups, folder, temperature=0.7, refresh_steps=0, **KINDS[kind])
        train(trainer, BATCHES[:2])
        for of in ("policy", "reference"):
            scores = score(trainer, PROBE, of, with_entropy=True)
            small = score(trainer, PROBE, of, with_entropy=True, max_tokens=20)
            assert list(small) == ["logprobs", "entropy"]
            for name, values in small.items():
                np.testing.assert_allclose(values, scores[name], atol=1e-5)
            assert list(score(trainer, PROBE, of)) == ["logprobs"]
        scores = score(trainer, PROBE, with_entropy=True)
        on_policy = PROBE.with_columns(rollout_logprobs=scores["logprobs"])
        metrics = take_step(trainer, on_policy, [[np.arange(len(PROBE))]])
        whole = score(trainer, PROBE, max_tokens=10_000)
        assert metrics["train/entropy"] == pytest.approx(scores["entropy"].mean(), abs=1e-5)
        assert metrics["policy/logprob_gap_max"] < 1e-5
        exact = PROBE.with_columns(rollout_logprobs=whole["logprobs"])
        assert take_step(trainer, exact, [[np.arange(len(PROBE))]])["policy/logprob_gap_max"] == 0.0

    run_alone(check)


def test_only_an_algorithm_that_compares_with_a_reference_has_one(tmp_path):
    folder = build_model(tmp_path / "model")

    def check(groups, _):
        for settings in (KINDS["ddp"], KINDS["lora"]):
            trainer = build_trainer(groups, folder, **settings)
            with pytest.raises(ConfigError, match=r"there is no reference policy here: only algorithm.kl_loss and algorithm.reward_kl"):
                score(trainer, PROBE, "reference")
            assert score(trainer, PROBE)["logprobs"].shape == (PROBE.num_targets,)

    run_alone(check)
