"""TRL's GRPOTrainer on the task of `step.py`; runs in TRL's own environment, started by `step.py`.

Reads a job as JSON: model (folder), prompts (file of {"prompt", "answer"} lines, 64 per step), steps, lr, min_lr, warmup_steps, beta2,
group_size, max_new_tokens, seed, reward ("exact_match" or "varied"), output (folder for the model). Prints
{"begins_s": [...], "generation_s": [...]}: wall-clock time at which each step began, and what of it generated and scored completions.

usage: trl_step.py JOB
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

from datasets import Dataset
from measure import claim_stdout
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from varied_reward import varied


class StepClock(TrainerCallback):
    """Notes when each step begins."""

    def __init__(self) -> None:
        self.begins: list[float] = []

    def on_step_begin(self, *_args: object, **_kwargs: object) -> None:
        self.begins.append(time.time())


def clocked(owner: object, name: str) -> list[float]:
    """The seconds of each call of a method from now on."""
    method: Callable = getattr(owner, name)
    seconds: list[float] = []

    def timed(*args: object, **kwargs: object) -> object:
        start = time.perf_counter()
        try:
            return method(*args, **kwargs)
        finally:
            seconds.append(time.perf_counter() - start)

    setattr(owner, name, timed)
    return seconds


def exact_match(completions: list[str], answer: list[str], **_columns: object) -> list[float]:
    return [float(text.strip() == wanted) for text, wanted in zip(completions, answer, strict=True)]


def varied_reward(completions: list[str], **_columns: object) -> list[float]:
    return [varied(text, None) for text in completions]


def main(job: dict) -> None:
    pipe = claim_stdout()
    rows = [json.loads(line) for line in Path(job["prompts"]).read_text().splitlines()]
    config = GRPOConfig(
        output_dir=job["output"], seed=job["seed"], max_steps=job["steps"], save_strategy="no", report_to="none", logging_steps=10,
        disable_tqdm=True, use_cpu=True, bf16=False, gradient_checkpointing=False, dataloader_num_workers=0,
        # One generation and one update per step, on the rows in their order.
        per_device_train_batch_size=len(rows) // job["steps"] * job["group_size"], gradient_accumulation_steps=1, steps_per_generation=1,
        num_generations=job["group_size"], shuffle_dataset=False, max_completion_length=job["max_new_tokens"],
        temperature=1.0, top_p=1.0, top_k=0, beta=0.0, scale_rewards="group", loss_type="dapo",
        learning_rate=job["lr"], warmup_steps=job["warmup_steps"], lr_scheduler_type="polynomial",
        lr_scheduler_kwargs={"lr_end": job["min_lr"], "power": 1.0}, adam_beta2=job["beta2"], weight_decay=0.0, max_grad_norm=1.0)
    clock, reward = StepClock(), {"exact_match": exact_match, "varied": varied_reward}[job["reward"]]
    trainer = GRPOTrainer(model=job["model"], reward_funcs=reward, args=config, train_dataset=Dataset.from_list(rows), callbacks=[clock])
    generation_s = clocked(trainer, "_generate_and_score_completions")
    trainer.train()
    trainer.save_model(job["output"])
    pipe.write(json.dumps({"begins_s": clock.begins, "generation_s": generation_s}) + "\n")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
