"""The head's picks by torch's softmax; that they are those of a whole log-softmax is tested with `head`, in all kinds of chunks."""

import numpy as np
import pytest
import torch

from offbeat.model import head as head_module
from offbeat.model.head import ACCELERATOR_SIZES, FusedHead, Picks


@pytest.fixture(autouse=True)
def as_on_an_accelerator(monkeypatch):
    monkeypatch.setattr(head_module, "sizes_of", lambda _: ACCELERATOR_SIZES)


def picked(logits, targets, temperature=1.0):
    """Log-probabilities [M] of a head in bfloat16 that passes logits [N, V] on, and their gradient by these."""
    head = torch.nn.Linear(logits.shape[1], logits.shape[1], bias=False, dtype=torch.bfloat16)
    head.weight.data.copy_(torch.eye(logits.shape[1]))
    leaf = logits.to(torch.bfloat16).requires_grad_()
    fused = FusedHead(head, Picks(np.arange(len(targets)), np.array(targets), temperature, True), None)
    logprobs = fused.logprobs(fused(leaf[None]))
    logprobs.sum().backward()
    return logprobs.detach(), leaf.grad


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_tokens_without_any_probability_in_float32_keep_their_log_probability(temperature):
    logits = torch.tensor([[0.0, -200.0, 3.0], [500.0, 0.0, -1000.0]])
    logprobs, _ = picked(logits, [1, 2], temperature)
    expected = (logits.double() / temperature).log_softmax(-1)[[0, 1], [1, 2]]
    torch.testing.assert_close(logprobs.double(), expected, rtol=1e-6, atol=1e-6)


def test_the_gradient_of_a_likely_token_is_not_lost_in_bfloat16():
    logits = torch.tensor([[8.0, 0.0, 0.0]])
    _, gradient = picked(logits, [0])
    expected = 1 - logits.double().softmax(-1)[0, 0]
    assert expected < 1e-3
    torch.testing.assert_close(gradient[0, 0].double(), expected, rtol=4e-3, atol=0)
