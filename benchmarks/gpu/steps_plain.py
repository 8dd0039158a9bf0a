"""A plain loop of torch and transformers as a side of `steps.py`: padded batches, and logits of all tokens at once.

usage: steps_plain.py WORK
"""

from statistics import fmean

import torch
from steps_side import answer_steps, read_work
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

work = read_work()
device = torch.device(work["device"])
model = AutoModelForCausalLM.from_pretrained(work["model"], dtype=torch.float32, attn_implementation="sdpa").to(device).train()
optimizer = torch.optim.AdamW(model.parameters(), lr=work["lr"], betas=(0.9, work["beta2"]), weight_decay=0.0, fused=True)
samples = [
    (torch.tensor(prompt + answer), len(prompt), reward - fmean(rewards))
    for prompt, answers, rewards in zip(work["prompts"], work["answers"], work["rewards"], strict=True)
    for answer, reward in zip(answers, rewards, strict=True)]
num_trained = sum(len(tokens) - num_given for tokens, num_given, _ in samples)


def padded(rows: list[tuple[Tensor, int, float]]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return tokens [N, L], which of them are no padding, which of them are trained on, and advantages [N, 1]."""
    tokens = pad_sequence([row for row, _, _ in rows], batch_first=True)
    at = torch.arange(tokens.shape[1])
    there = at < torch.tensor([len(row) for row, _, _ in rows])[:, None]
    trained = there & (at >= torch.tensor([num_given for _, num_given, _ in rows])[:, None])
    advantages = torch.tensor([[advantage] for _, _, advantage in rows])
    return tokens.to(device), there.to(device), trained.to(device), advantages.to(device)


def step() -> float:
    """Make a training step; returns the norm of the gradient."""
    optimizer.zero_grad(set_to_none=True)
    for first in range(0, len(samples), work["rows"]):
        tokens, there, trained, advantages = padded(samples[first : first + work["rows"]])
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type != "cpu"):
            logits = model(input_ids=tokens, attention_mask=there.long(), use_cache=False).logits[:, :-1]
        logprobs = logits.float().log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
        ratio = (logprobs - logprobs.detach()).exp()
        loss = -(ratio * advantages * trained[:, 1:]).sum() / num_trained
        loss.backward()
    norm = clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return norm.item()


answer_steps(step, on_cpu=device.type == "cpu")
