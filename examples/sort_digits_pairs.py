"""Pairs of answers to `sort_digits`, for examples/reward_model.toml: the right one against a wrong one.

    python examples/sort_digits_pairs.py MODEL pairs.jsonl --size 3 --count 32000

Half of the wrong answers are samples of the policy in the folder MODEL, the others are sorted, but not the digits of the prompt.
"""

import argparse
import json
import random
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from offbeat.config.data import DataConfig
from offbeat.data.tasks import find_task
from offbeat.data.tokenizer import load_tokenizer

CHUNK = 2000


def sample_answers(model: str, prompts: list[str], *, max_new_tokens: int) -> list[str]:
    """Sample one answer to each prompt, all of the same length, at temperature 1."""
    policy, tokenizer = AutoModelForCausalLM.from_pretrained(model), load_tokenizer(model)
    answers = []
    for start in range(0, len(prompts), CHUNK):
        tokens = torch.tensor([tokenizer.encode(prompt) for prompt in prompts[start : start + CHUNK]])
        made = policy.generate(tokens, do_sample=True, top_k=0, max_new_tokens=max_new_tokens, pad_token_id=tokenizer.pad_token_id)
        answers += [tokenizer.decode(row.tolist()) for row in made[:, tokens.shape[1]:]]
    return answers


def nearly(right: str, rng: random.Random) -> str:
    """Change one or two digits, and sort again."""
    while True:
        digits = list(right)
        for index in rng.sample(range(len(digits)), rng.choice([1, 1, 2])):
            digits[index] = rng.choice("0123456789")
        if (wrong := "".join(sorted(digits))) != right:
            return wrong


def main() -> None:
    """Write the pairs."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model")
    parser.add_argument("path", type=Path)
    parser.add_argument("--size", type=int, default=3)
    parser.add_argument("--count", type=int, default=32000)
    args = parser.parse_args()
    torch.manual_seed(0)
    rng, task = random.Random(0), find_task(DataConfig(task="sort_digits", task_size=args.size))
    rows = [task.row(index, seed=123) for index in range(args.count)]
    samples = sample_answers(args.model, [str(row.prompt) for row in rows], max_new_tokens=2 * args.size)
    with args.path.open("w", encoding="utf-8") as file:
        for row, sample in zip(rows, samples, strict=True):
            is_wrong = sample.strip() and sample != row.answer
            rejected = sample if is_wrong and rng.random() < 0.5 else nearly(row.answer, rng)
            file.write(json.dumps({"prompt": row.prompt, "chosen": row.answer, "rejected": rejected}) + "\n")


if __name__ == "__main__":
    main()
