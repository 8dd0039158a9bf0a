"""A task of one's own from a Python program: a small model of random weights learns to write words backwards, in about a minute.

    .venv/bin/python examples/five_lines.py

A pretrained model needs no warm-up, by which a model of random weights first imitates a little, but other settings, since the defaults are
for GPUs and for training all weights. docs/python.md shows them, and describes the interface.
"""

import random

import offbeat

rng = random.Random(0)
words = ["".join(rng.choice("abcdefgh") for _ in range(rng.randint(4, 7))) for _ in range(5000)]
rows = [{"prompt": f"reverse {word}: ", "answer": word[::-1]} for word in words]


def reward(completion: str, row: offbeat.Row) -> float:
    """The share of letters that stand where they should; 1.0 only for the whole answer."""
    if completion == row.answer:
        return 1.0
    right = sum(a == b for a, b in zip(completion, row.answer, strict=False))
    return 0.5 * right / max(len(completion), len(row.answer))


run = offbeat.train(
    data=rows, reward=reward, name="five_lines", total_steps=60, lr=2e-4, max_new_tokens=10, every_steps=20, warm_up=True,
    sft={"total_steps": 300, "evaluate_every_steps": 25, "stop_at_accuracy": 0.3})
if run.heldout_after is not None:  # it is None if the run was stopped before an evaluation after a step
    print(f"held-out accuracy: {run.heldout_before:.2f} before, {run.heldout_after:.2f} after")
if run.steps:  # there are none if the run was stopped in its warm-up
    print(f"the model is in {run.model}")
    best = max(run.rollouts(step=run.rollout_steps[-1]), key=lambda rollout: rollout.reward)
    print(f"{best.prompt!r} was answered {best.completion!r}")
