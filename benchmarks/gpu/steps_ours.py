"""Offbeat's training step as a side of `steps.py`: packed rows, prompts shared by their groups, the fused head.

usage: steps_ours.py WORK
"""

import numpy as np
from steps_side import answer_steps, read_work

from offbeat.algorithms.adam import AdamParams
from offbeat.algorithms.experience import make_batch
from offbeat.config.dist import DistConfig
from offbeat.config.root import Config
from offbeat.data.packing import plan_microbatches
from offbeat.data.trajectory import Group, Trajectory
from offbeat.sync.links import MeetingPlace
from offbeat.sync.mesh import host_store, join
from offbeat.trainer.messages import TrainStep
from offbeat.trainer.model_trainer import ModelTrainer

work = read_work()
config = Config.model_validate({
    "algorithm": {
        "centre": "group", "scale": "none", "anchor": "prox", "weight": "none", "loss_aggregation": "token_mean", "kl_loss": "none"},
    "train": {
        "precision": "float32" if work["device"] == "cpu" else "bf16_mixed", "gradient_checkpointing": "off",
        "max_tokens_per_microbatch": work["max_tokens"]}})
params = AdamParams(lr=work["lr"], beta1=0.9, beta2=work["beta2"], eps=1e-8, weight_decay=0.0, clip_norm=1.0)


def group(number: int, prompt: list[int], answers: list[list[int]], rewards: list[float]) -> Group:
    """Return a group as engines would have sampled it; what they state as log-probabilities is not used by this loss."""
    return Group(str(number), 0, tuple(
        Trajectory(
            tokens=np.array(prompt + answer, np.int32), loss_mask=np.arange(len(prompt) + len(answer)) >= len(prompt),
            rollout_logprobs=np.zeros(len(prompt) + len(answer), np.float32),
            versions=np.array([-1] * len(prompt) + [0] * len(answer), np.int32), reward=reward)
        for answer, reward in zip(answers, rewards, strict=True)))


batch = make_batch(
    [group(i, *each) for i, each in enumerate(zip(work["prompts"], work["answers"], work["rewards"], strict=True))],
    config=config.algorithm, max_new_tokens=max(len(answer) for answers in work["answers"] for answer in answers))
trainer = ModelTrainer.build(
    work["model"], config=config.for_ranks, groups=join(rank=0, world=1, place=MeetingPlace(host_store(60)), config=DistConfig()))


def step() -> float:
    """Make a training step, planning included; returns the norm of the gradient."""
    plan = plan_microbatches(
        batch, num_ranks=1, max_tokens=config.train.max_tokens_per_microbatch, share_prefix=config.train.share_prefix)
    return trainer.train_step(TrainStep(batch, (tuple(plan.microbatches[0]),), params)).metrics["train/grad_norm"]


answer_steps(step, on_cpu=work["device"] == "cpu")
