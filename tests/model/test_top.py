"""The likeliest tokens of packed rows, against each sequence alone in float64."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from offbeat.config.train import TrainConfig
from offbeat.data.packing import pack_row
from offbeat.model import head
from offbeat.model.logprobs import dummy_row, token_logprobs
from offbeat.model.top import top_logprobs
from offbeat.trainer.policy import load_policy
from train_samples import VOCAB, build_model, make_batch


@pytest.mark.parametrize("share_prefix", [True, False])
@pytest.mark.parametrize(("top_k", "temperature"), [(1, 1.0), (5, 0.7), (VOCAB + 2, 1.3)])
def test_they_are_those_of_each_sequence_alone_in_falling_order(share_prefix, top_k, temperature, tmp_path, monkeypatch):
    monkeypatch.setattr(head, "CPU_SIZES", replace(head.CPU_SIZES, chunk_rows=3))  # three positions at a time
    model = load_policy(build_model(tmp_path), config=TrainConfig())
    batch = make_batch(3, 2)
    row = pack_row(batch, share_prefix=share_prefix)
    found = top_logprobs(model, row, top_k=top_k, temperature=temperature)
    assert not found.top_logprobs.requires_grad
    for i in range(len(batch)):
        one = batch.select([i])
        logits = model(input_ids=torch.from_numpy(one.tokens.astype(np.int64))[None], use_cache=False).logits[0]
        expected = (logits[one.positions].double() / temperature).log_softmax(-1).detach().numpy()
        own = np.searchsorted(row.batch_index, np.arange(batch.target_offsets[i], batch.target_offsets[i + 1]))
        np.testing.assert_allclose(found.logprobs[own].numpy(), expected[np.arange(len(own)), one.targets], atol=1e-4)
        width = min(top_k, VOCAB)
        np.testing.assert_allclose(found.top_logprobs[own, :width].numpy(), -np.sort(-expected, axis=1)[:, :width], atol=1e-4)
        tokens = found.top_tokens[own, :width].numpy()
        np.testing.assert_allclose(np.take_along_axis(expected, tokens, axis=1), found.top_logprobs[own, :width].numpy(), atol=1e-4)
        assert torch.isneginf(found.top_logprobs[own, width:]).all()
    plain = token_logprobs(model, row, temperature=temperature)
    torch.testing.assert_close(found.logprobs, plain.detach(), atol=1e-5, rtol=1e-5)


def test_a_row_that_scores_nothing_has_none(tmp_path):
    model = load_policy(build_model(tmp_path), config=TrainConfig())
    found = top_logprobs(model, dummy_row(), top_k=2)
    assert found.logprobs.shape == (0,) and found.top_tokens.shape == found.top_logprobs.shape == (0, 2)
