"""`offbeat.policy_batch`: sampled answers with their advantages, as a batch for `forward_backward`. Torch-free; called by user programs."""

from collections.abc import Sequence

import numpy as np

from offbeat.algorithms.objectives import client_loss
from offbeat.config.objectives import objective_of
from offbeat.data.batch import Batch, SharedPrompts
from offbeat.errors import DataError
from offbeat.inference.sampling import Sample


def policy_batch(
    prompts: Sequence[Sequence[int]], answers: Sequence[Sample], advantages: Sequence[float], *, loss: str = "ppo", **constants: float,
) -> Batch:
    """Make a batch of N answers whose loss is the mean over all of their tokens.

        right = offbeat.Sample([7, 3], [-0.1, -0.2], [1, 1], "73", "stop")
        wrong = offbeat.Sample([7, 7], [-0.1, -2.2], [1, 1], "77", "stop")
        batch = offbeat.policy_batch([[5, 9], [5, 9]], [right, wrong], [0.7, -0.7])

    Each token has its answer's advantage; the ratio compares with the log-probabilities of the engine. Equal prompts are computed once.

    Args:
        prompts: token ids of each answer's prompt.
        answers: as `sample` returns them.
        advantages: [N]; an answer of advantage 0 adds nothing, and still counts in the mean.
        loss: "ppo", "gspo", "cispo", "importance_sampling" or "dro".
        constants: constants of the loss, such as `clip_high=1.28`; docs/adapters.md has them.

    Raises:
        DataError: the numbers of prompts, answers and advantages differ, or the loss does not read advantages or lacks a constant.
    """
    if not len(prompts) == len(answers) == len(advantages):
        raise DataError(
            f"policy_batch takes as many prompts and advantages as answers, got {len(prompts)} prompts, {len(answers)} answers and"
            f" {len(advantages)} advantages")
    spec = client_loss(loss, **constants)
    if objective_of(spec.name).imitates:
        raise DataError(f"policy_batch takes a loss that reads advantages, got {loss!r}; use sft_batch to imitate answers")
    tokens = [np.concatenate([np.asarray(prompt, np.int32), answer.tokens]) for prompt, answer in zip(prompts, answers, strict=True)]
    lengths = [len(answer.tokens) for answer in answers]
    groups = {prompt: number for number, prompt in enumerate(dict.fromkeys(map(tuple, prompts)))}
    values = np.repeat(np.asarray(advantages, np.float32), lengths)
    ones = np.ones(len(values), np.float32)
    return Batch.of_sequences(
        tokens, [np.arange(len(each)) >= len(each) - length for each, length in zip(tokens, lengths, strict=True)],
        columns={
            "advantages": values, "loss_weights": ones / max(len(ones), 1), "ratio_mask": ones,
            "rollout_logprobs": np.concatenate([np.zeros(0, np.float32), *(answer.token_logprobs for answer in answers)])},
        losses=(spec,), denominator=float(len(ones)), shared=SharedPrompts(
            np.array([groups[tuple(prompt)] for prompt in prompts], np.int64), np.array([len(prompt) for prompt in prompts], np.int64)))
