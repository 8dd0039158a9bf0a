"""A head that is sliced by vocabulary against the whole one: log-probabilities, entropies and all gradients."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from offbeat.model.head import FusedHead, Picks
from offbeat.model.vocabulary import Vocabulary
from ranks import run_ranks
from train_samples import arranged


def _pick(x, weight, bias, picks, keep, factors):
    """Log-probabilities and entropies, and the gradients of x, weight and bias under random factors."""
    head = nn.Linear(1, 1)
    head.weight, head.bias = weight, bias
    fused = FusedHead(head, picks, keep)
    logprobs, entropy = fused(x)[0, :, 0], fused.entropy
    loss = (logprobs * factors[: len(logprobs)]).sum()
    if picks.entropy_gradient:
        loss = loss + (entropy * factors[: len(entropy)]).sum()
    loss.backward()
    return [logprobs, entropy, x.grad, weight.grad] + ([] if bias is None else [bias.grad])


def _compare(groups, _argument):
    mesh = arranged(groups, f"tp{groups.world}").mesh["tp"]

    @settings(max_examples=25, deadline=None, derandomize=True, database=None)  # every rank draws the same examples
    @given(
        num_tokens=st.integers(groups.world, 30), num_positions=st.integers(1, 12), num_picks=st.integers(0, 9), seed=st.integers(0, 99),
        with_entropy=st.booleans(), entropy_gradient=st.booleans(), has_bias=st.booleans(), temperature=st.sampled_from([1.0, 0.7]))
    def check(num_tokens, num_positions, num_picks, seed, with_entropy, entropy_gradient, has_bias, temperature):
        generator, rng = torch.Generator().manual_seed(seed), np.random.default_rng(seed)
        picks = Picks(
            rng.integers(0, num_positions, num_picks), rng.integers(0, num_tokens, num_picks), temperature, with_entropy,
            with_entropy and entropy_gradient)
        states, weight, bias, factors = (
            torch.randn(size, generator=generator) for size in ((1, num_positions + 3, 8), (num_tokens, 8), (num_tokens,), (20,)))
        keep = torch.arange(num_positions)
        found = []
        for place in (lambda tensor: tensor, lambda tensor: distribute_tensor(tensor, mesh, [Shard(0)])):
            own = states.clone().requires_grad_()
            parameters = [nn.Parameter(place(tensor.clone())) for tensor in (weight, bias)]
            found.append(_pick(own, parameters[0], parameters[1] if has_bias else None, picks, keep, factors))
        for whole, sliced in zip(*found, strict=True):
            sliced = sliced.full_tensor() if hasattr(sliced, "full_tensor") else sliced
            torch.testing.assert_close(sliced, whole, atol=1e-5, rtol=1e-5)

    check()
    weight = torch.arange(14.0).view(7, 2)
    part = Vocabulary.of(distribute_tensor(weight, mesh, [Shard(0)]))
    whole = Vocabulary.of(distribute_tensor(weight, mesh, [Replicate()]))
    return [[part.start, part.stop], [whole.start, whole.stop, whole.group is None]]


def test_a_sliced_head_picks_and_learns_what_the_whole_one_does():
    first, second = run_ranks(_compare, world=2)
    assert first == [[0, 4], [0, 7, True]] and second == [[4, 7], [0, 7, True]]
