"""What a reference policy and a critic cost: a training step with one of them, against the same step without.

All sides are `ModelTrainer`s that take whole steps of the policy's loss (forward, backward, clipping, AdamW) on the same groups of 8
answers to one prompt, both of skewed lengths, packed into the same micro-batches. One of them first scores the batch under a frozen copy of
the initial weights, as the loop does between batch and step, and its loss holds the policy near them. Another has a critic of the policy's
size, a `ValueTrainer` that first gives the batch its values and afterwards takes a step of its own on their returns. The tiny model
computes in float32, the 27M model in bfloat16. Figures are seconds per step, alternating, on one process with --threads threads;
the aims are at most 1.35 times the seconds with a reference, and 2.1 times with a critic.

    python benchmarks/score.py [--quick] [--repeats 5] [--threads 1]
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
from measure import emit, take_turns
from packing import GROUP_SIZE, OPTIMIZER, VOCAB_SIZE, Step, grouped_batch, groups_of_one, read_arguments, timed

from engine import build
from offbeat.algorithms.adam import adam_params
from offbeat.algorithms.critic import critic_batch
from offbeat.algorithms.experience import with_scores
from offbeat.algorithms.objectives import policy_loss
from offbeat.config.root import Config
from offbeat.data.batch import Batch
from offbeat.data.packing import plan_microbatches
from offbeat.sync.mesh import ProcessGroups
from offbeat.trainer.messages import Policy, ScoreShare, TrainStep
from offbeat.trainer.model_trainer import ModelTrainer
from offbeat.trainer.value_trainer import ValueTrainer

AIMS = {"reference": 1 / 1.35, "critic": 1 / 2.1}
SETTINGS = {"plain": {}, "reference": {"kl_loss": "k3", "kl_coefficient": 1e-3}, "critic": {"preset": "ppo"}}


def main() -> None:
    sizes, repeats = read_arguments(__doc__)
    with groups_of_one() as groups:
        for model, count in sizes.items():
            compare(model, build(model), rollouts(count // GROUP_SIZE), groups=groups, repeats=repeats)


def compare(model: str, folder: Path, batch: Batch, *, groups: ProcessGroups, repeats: int) -> None:
    """All sides on one model."""
    steps = {side: make_step(model, folder, batch, groups=groups, side=side) for side in SETTINGS}
    losses = {side: step() for side, step in steps.items()}  # also the warm-up; the policy is its own reference yet
    assert abs(losses["plain"] - losses["reference"]) < 1e-4, f"the two steps compute different losses: {losses}"
    seconds = take_turns(
        {side: timed(step) for side, step in steps.items()}, repeats=repeats, what=f"{model}, {batch.num_tokens} tokens,")
    for side, aim in AIMS.items():
        emit("score", f"{model} step with a {side} vs without", ours=seconds[side]["s"], peer=seconds["plain"]["s"], unit="s/step",
             aim=aim, less_is_better=True)


def make_step(model: str, folder: Path, batch: Batch, *, groups: ProcessGroups, side: str) -> Step:
    """A training step, planning and scoring included; returns the loss of the policy."""
    config = Config.model_validate({"train": {"precision": "bf16_mixed" if model == "27M" else "float32"}, "algorithm": SETTINGS[side]})
    trainer = ModelTrainer.build(str(folder), config=config.for_ranks, groups=groups)
    critic = ValueTrainer.build_critic(str(folder), config=config.for_ranks, groups=groups, policy=trainer) if side == "critic" else None
    batch = replace(batch, losses=(policy_loss(config.algorithm),))
    max_tokens = config.train.max_tokens_per_microbatch

    def plan() -> tuple[np.ndarray, ...]:
        return tuple(plan_microbatches(batch, num_ranks=1, max_tokens=max_tokens, share_prefix=True).microbatches[0])

    def score(by: ModelTrainer, of: Policy) -> dict[str, np.ndarray]:
        return by.score(ScoreShare(batch, np.arange(len(batch)), plan(), of, with_entropy=False)).scores.columns

    def step() -> float:
        own = batch
        params = adam_params(trainer.step, config=OPTIMIZER, total_steps=1000)
        if side == "reference":
            own = batch.with_columns(ref_logprobs=score(trainer, "reference")["logprobs"])
        if critic is not None:
            ended = replace(batch, sequences=batch.sequences | {"truncated": np.zeros(len(batch), np.int64)})
            scores = score(critic, "policy") | {"end_values": np.zeros(len(batch), np.float32)}
            own = with_scores(ended, scores, config.algorithm)
            critic.train_step(TrainStep(critic_batch(own, value_clip=config.critic.value_clip), (plan(),), params))
        return trainer.train_step(TrainStep(own, (plan(),), params)).metrics["train/loss"]

    return step


def rollouts(num_groups: int) -> Batch:
    """Groups of answers with random advantages, as if a policy had drawn each token with the same probability."""
    batch = grouped_batch(num_groups)
    advantages = np.random.default_rng(3).standard_normal(len(batch))[batch.target_sequences]
    return batch.with_columns(
        advantages=advantages.astype(np.float32), rollout_logprobs=np.full(batch.num_targets, -np.log(VOCAB_SIZE), np.float32))


if __name__ == "__main__":
    main()
