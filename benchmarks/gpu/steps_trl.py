"""TRL's GRPOTrainer as a side of `steps.py`; runs where TRL is installed, without Offbeat.

The trainer is given the samples in place of generating them, and what it does besides training on them (scoring, padding) is not counted.
Its own loop runs, which waits for the next job where a step begins.

usage: steps_trl.py WORK
"""

import json
import sys
from typing import Any

from datasets import Dataset
from measure import claim_stdout
from steps_side import begin_turn, end_turn, now_s, read_work
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

pipe, work = claim_stdout(), read_work()
on_cpu = work["device"] == "cpu"
group_size = len(work["rewards"][0])


class Turns(TrainerCallback):
    """Makes as many steps as each job asks for, and answers it."""

    def __init__(self) -> None:
        self._left, self._began_s, self._seconds = 0, 0.0, []
        self.apart_s = 0.0
        """Of the current step, and not counted."""

    def on_step_begin(self, *_args: object, **_kwargs: object) -> None:
        while not self._left:
            line = sys.stdin.readline()
            if not line:
                sys.exit()
            self._left, self._seconds = json.loads(line).get("steps", 0), []
            if not self._left:  # the question whether this side is ready
                self._tell({})
        if not self._seconds:
            begin_turn(on_cpu=on_cpu)
        self.apart_s, self._began_s = 0.0, now_s(on_cpu=on_cpu)

    def on_step_end(self, *_args: object, **_kwargs: object) -> None:
        self._seconds.append(now_s(on_cpu=on_cpu) - self._began_s - self.apart_s)
        self._left -= 1

    def on_log(self, *_args: object, logs: dict[str, float], **_kwargs: object) -> None:
        if not self._left:
            self._tell(end_turn(self._seconds, float(logs["grad_norm"]), on_cpu=on_cpu))

    def _tell(self, answer: dict[str, Any]) -> None:
        pipe.write(json.dumps(answer) + "\n")
        pipe.flush()


def given(prompts: list[str], _trainer: GRPOTrainer) -> dict[str, Any]:
    """Return the samples for prompts, which are numbers of groups, each as often as it has samples."""
    groups, places = [int(prompt) for prompt in prompts], [i % group_size for i in range(len(prompts))]
    return {
        "prompt_ids": [work["prompts"][group] for group in groups],
        "completion_ids": [work["answers"][group][place] for group, place in zip(groups, places, strict=True)],
        "logprobs": None, "given_reward": [work["rewards"][group][place] for group, place in zip(groups, places, strict=True)]}


def reward(given_reward: list[float], **_columns: object) -> list[float]:
    return given_reward


turns = Turns()
num_samples = len(work["prompts"]) * group_size
trainer = GRPOTrainer(
    model=work["model"], processing_class=AutoTokenizer.from_pretrained(work["model"]), reward_funcs=reward, rollout_func=given,
    callbacks=[turns], train_dataset=Dataset.from_list([{"prompt": str(number)} for number in range(len(work["prompts"]))]),
    args=GRPOConfig(
        output_dir=work["output"], max_steps=1_000_000, save_strategy="no", report_to="none", logging_steps=1, disable_tqdm=True,
        use_cpu=on_cpu, bf16=not on_cpu, gradient_checkpointing=False, dataloader_num_workers=0,
        model_init_kwargs={"dtype": "float32", "attn_implementation": "sdpa"},
        per_device_train_batch_size=work["rows"], gradient_accumulation_steps=num_samples // work["rows"],
        num_generations=group_size, shuffle_dataset=False, temperature=1.0, beta=0.0, scale_rewards="none", loss_type="dapo",
        learning_rate=work["lr"], lr_scheduler_type="constant", adam_beta2=work["beta2"], weight_decay=0.0, max_grad_norm=1.0,
        optim="adamw_torch_fused"))
generate = trainer._generate_and_score_completions


def timed(inputs: Any) -> Any:
    began_s = now_s(on_cpu=on_cpu)
    result = generate(inputs)
    turns.apart_s += now_s(on_cpu=on_cpu) - began_s
    return result


trainer._generate_and_score_completions = timed
trainer.train()
