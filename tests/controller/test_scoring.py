"""The score step asks for what an algorithm reads and no more, and gives the batch what follows."""

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest

from offbeat.algorithms.experience import make_batch
from offbeat.config.algorithms import AlgorithmConfig
from offbeat.controller.scoring import score_batch
from offbeat.data.trajectory import Group, Trajectory
from offbeat.trainer.messages import TargetScores


class Ranks:
    """Answers with the token id of each target's predecessor, and remembers who was asked."""

    def __init__(self, column="logprobs"):
        self.column, self.asked = column, []

    async def score(self, batch, *, of="policy", with_entropy=False):
        self.asked.append((of, batch.num_targets))
        return TargetScores({self.column: -0.1 * batch.tokens[batch.positions].astype(np.float32)})


def batch_of(config):
    samples = (Trajectory([1, 2, 3], [False, True, True], [0.0, -1.0, -1.0], [-1, 0, 0], 1.0),
               Trajectory([1, 4], [False, True], [0.0, -1.0], [-1, 0], 0.0, "length"))
    return make_batch([Group("0:0", 0, samples)], config=config, max_new_tokens=4)


def scored(config):
    trainers, critic = Ranks(), Ranks("values") if config.needs_critic else None
    parts = SimpleNamespace(trainers=trainers, critic=critic, teacher=None)
    batch = asyncio.run(score_batch(batch_of(config), parts, config, seed=0, row_of=lambda _group: None)).batch
    return batch, trainers.asked, critic.asked if critic else []


@pytest.mark.parametrize(("settings", "asked", "columns"), [
    ({"kl_loss": "k3"}, [("reference", 3)], {"ref_logprobs"}),
    ({"reward_kl": 0.1}, [("reference", 3)], set()),
    ({"preset": "m2po"}, [("policy", 3)], {"m2_mask"}),
    ({"preset": "ppo"}, [], {"values", "returns"}),
    ({"preset": "ppo", "kl_loss": "k2"}, [("reference", 3)], {"values", "returns", "ref_logprobs"})])
def test_each_algorithm_has_scored_what_it_reads(settings, asked, columns):
    config = AlgorithmConfig(**settings)
    batch, of_ranks, of_critic = scored(config)
    assert of_ranks == asked and of_critic == ([("policy", 4)] if config.needs_critic else [])
    assert batch.columns.keys() - batch_of(config).columns.keys() == columns


@pytest.mark.parametrize(("settings", "names"), [
    ({"preset": "m2po"}, ["prox_logprobs"]), ({"reward_kl": 0.1}, ["ref_logprobs"]), ({"preset": "ppo"}, [])])
def test_log_probabilities_that_came_up_on_the_way_are_there_for_the_record(settings, names):
    config = AlgorithmConfig(**settings)
    critic = Ranks("values") if config.needs_critic else None
    parts = SimpleNamespace(trainers=Ranks(), critic=critic, teacher=None)
    known = asyncio.run(score_batch(batch_of(config), parts, config, seed=0, row_of=lambda _group: None)).known
    assert list(known) == names
    for values in known.values():
        np.testing.assert_allclose(values, [-0.1, -0.2, -0.1])


def test_an_answer_that_was_cut_off_is_worth_what_the_critic_expects_after_it():
    batch, _, _ = scored(AlgorithmConfig(preset="ppo"))
    np.testing.assert_allclose(batch.columns["values"], [-0.1, -0.2, -0.1])
    np.testing.assert_allclose(batch.columns["returns"], [1.0, 1.0, -0.4], rtol=1e-6)
    np.testing.assert_allclose(batch.columns["advantages"], [1.1, 1.2, -0.3], rtol=1e-6)
