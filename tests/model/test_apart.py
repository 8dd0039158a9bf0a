"""Sequences one by one, in padded batches, against one forward per sequence."""

import copy

import numpy as np
import pytest
import torch

from offbeat.data.packing import pack_row
from offbeat.model import attention
from offbeat.model.logprobs import dummy_row, token_logprobs
from row_samples import build, make_batch, one_by_one


@pytest.mark.parametrize("waste", [0.0, 0.25, 1.0])
@pytest.mark.parametrize("share", [False, True])
def test_scores_and_gradients_are_those_of_one_forward_per_sequence(share, waste, monkeypatch):
    monkeypatch.setattr(attention, "_MAX_WASTE", waste)  # many batches, some, one
    model = build("llama", attention="sdpa")
    reference, batch = copy.deepcopy(model), make_batch()
    row = pack_row(batch, share_prefix=share)
    expected, _ = one_by_one(reference, batch)
    got = token_logprobs(model, row)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)
    weights = torch.linspace(-1, 1, len(got))
    (got * weights).sum().backward()
    (expected * weights).sum().backward()
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, atol=2e-4, rtol=1e-4)


def test_no_batch_holds_more_padding_than_a_bucket_may():
    model, batch = build("llama", attention="sdpa"), make_batch()
    shapes = []
    model.register_forward_pre_hook(lambda _, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True)
    row = pack_row(batch, share_prefix=False)
    token_logprobs(model, row)
    assert len(shapes) > 1
    assert sum(map(np.prod, shapes)) * 0.75 <= len(row)


def test_a_dummy_row_runs_once():
    logprobs = token_logprobs(build("llama", attention="sdpa"), dummy_row())
    assert logprobs.shape == (0,)
    logprobs.sum().backward()
