"""A training loop to read and to change: GRPO on sorting digits, with public names only, in about two minutes on two cores.

    .venv/bin/python examples/loop.py [--steps 120]

Each step samples answers, rewards them, compares those to one prompt, updates an adapter, and publishes it to the engine. The next step's
answers are sampled while a step trains, so they are one version old; the ratio in the loss corrects for that. `offbeat.train` does the same
with checkpoints, recovery, balancing over ranks and much else; this is for an algorithm of one's own.
"""

import argparse
import asyncio
import random
from dataclasses import dataclass

import numpy as np

import offbeat
from offbeat import AdamParams, Sampling

NUM_DIGITS = 6
PROMPTS_PER_STEP, SAMPLES_PER_PROMPT = 32, 8
TRAINING = Sampling(max_new_tokens=NUM_DIGITS + 2, temperature=1.0)
GREEDY = Sampling(max_new_tokens=NUM_DIGITS + 2, temperature=0.0)
POLICY = "policy"


@dataclass
class Group:
    """Answers to one prompt, which are compared with each other."""

    prompt: list[int]
    answers: list[offbeat.Sample]
    rewards: list[float]


def draw(rng: random.Random) -> tuple[str, str]:
    """Return a prompt and its answer, such as "sort 5 3 1: " and "1 3 5"."""
    digits = [rng.choice("0123456789") for _ in range(NUM_DIGITS)]
    return f"sort {''.join(digits)}: ", "".join(sorted(digits))


def reward(text: str, answer: str) -> float:
    """Return 1.0 for the whole answer, else half the share of digits that stand in their place."""
    return 1.0 if text == answer else 0.5 * sum(a == b for a, b in zip(text, answer, strict=False)) / len(answer)


def advantages(rewards: list[float]) -> list[float]:
    """Return how much better each answer is than the group's mean, in standard deviations."""
    values = np.array(rewards)
    return list((values - values.mean()) / (values.std() + 1e-6))


async def play(tenants: offbeat.Tenants, rng: random.Random) -> list[Group]:
    """Sample and reward the answers of one step, all at once."""
    async def group() -> Group:
        text, answer = draw(rng)
        prompt = tenants.tokenizer.encode(text)
        samples = await tenants.sample(POLICY, prompt, TRAINING, n=SAMPLES_PER_PROMPT)
        return Group(prompt, samples, [reward(sample.text, answer) for sample in samples])

    return list(await asyncio.gather(*(group() for _ in range(PROMPTS_PER_STEP))))


async def accuracy(tenants: offbeat.Tenants, *, num_prompts: int = 128) -> float:
    """Return the share of held-out prompts that the newest version answers right."""
    rng = random.Random(1)

    async def is_right() -> bool:
        text, answer = draw(rng)
        [sample] = await tenants.sample(POLICY, tenants.tokenizer.encode(text), GREEDY)
        return sample.text == answer

    return float(np.mean(await asyncio.gather(*(is_right() for _ in range(num_prompts)))))


async def learn(model: str, *, steps: int) -> None:
    """Train an adapter on a base model."""
    async with offbeat.open_tenants(model, max_rank=32, name="loop") as tenants:
        await tenants.add(POLICY, seed=0)
        await tenants.publish(POLICY)
        print(f"accuracy before: {await accuracy(tenants):.2f}")
        rng = random.Random(0)
        ahead = asyncio.create_task(play(tenants, rng))
        for step in range(1, steps + 1):
            groups = await ahead
            ahead = asyncio.create_task(play(tenants, rng))
            batch = offbeat.policy_batch(
                [group.prompt for group in groups for _ in group.answers],
                [answer for group in groups for answer in group.answers],
                [advantage for group in groups for advantage in advantages(group.rewards)], loss="ppo")
            await tenants.forward_backward({POLICY: batch})
            norms = await tenants.optim_step({POLICY: AdamParams(lr=3e-3, clip_norm=1.0)})
            await tenants.publish(POLICY)
            if step % 20 == 0:
                mean = np.mean([value for group in groups for value in group.rewards])
                print(f"step {step}/{steps}: reward {mean:.3f}, gradient norm {norms[POLICY]:.3f}")
        await ahead
        print(f"accuracy after: {await accuracy(tenants):.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder of the base model (default: a small one that is taught to answer a third of the prompts)")
    parser.add_argument("--steps", type=int, default=120, help="optimizer steps (default: 120)")
    args = parser.parse_args()
    model = args.model
    if model is None:
        rng = random.Random(2)
        rows = [dict(zip(("prompt", "answer"), draw(rng), strict=True)) for _ in range(20_000)]
        base = offbeat.sft(
            data=rows, name="loop_base", total_steps=200, batch_size=128, lr=2e-3, max_new_tokens=NUM_DIGITS + 2, heldout_size=128,
            settings={"sft.evaluate_every_steps": 10, "sft.stop_at_accuracy": 0.3})
        model = base.model
    asyncio.run(learn(str(model), steps=args.steps))


if __name__ == "__main__":
    main()
