"""transformers' `generate` as a contestant of `engine.py`: static batches of `in_flight` left-padded prompts, in the order given.

A batch runs as long as its longest output. It computes no log-probabilities, which spares it work that the engines do.

usage: engine_transformers.py MODEL
"""

import sys
import time
from typing import Any

import torch
from measure import answer_jobs, claim_stdout
from transformers import AutoModelForCausalLM

pipe = claim_stdout()
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
# Nothing ends early: every contestant generates exactly the tokens asked for.
model.generation_config.eos_token_id = None


@torch.inference_mode()
def run(job: dict[str, Any]) -> dict[str, float]:
    size = job["in_flight"]
    start = time.perf_counter()
    for low in range(0, len(job["prompts"]), size):
        prompts, lengths = job["prompts"][low : low + size], job["lengths"][low : low + size]
        width = max(map(len, prompts))
        tokens = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        model.generate(tokens, attention_mask=mask, max_new_tokens=max(lengths), do_sample=True, top_k=0, top_p=1.0, pad_token_id=0)
    return {"wall_s": time.perf_counter() - start, "tokens": sum(job["lengths"])}


answer_jobs(pipe, run)
