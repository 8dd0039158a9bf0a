"""Which tokens of a row count how often, and whose routers have a loss that is computed here."""

import numpy as np
import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, MixtralForCausalLM
from transformers.models.mixtral import modeling_mixtral

from offbeat.data.batch import SharedPrompts
from offbeat.data.packing import pack_row
from offbeat.errors import ModelError
from offbeat.model.logprobs import dummy_row, packs_rows, token_logprobs, unscored
from offbeat.model.routers import RouterRecord, balancing_loss, experts_per_token, recorded, sequence_ends
from train_samples import make_batch

SIZES = {
    "vocab_size": 23, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8,
    "intermediate_size": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}


def mixtral():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(CONFIG_MAPPING["mixtral"](**SIZES), attn_implementation="sdpa")


def used(batch):
    """How often each token id is part of a sequence, up to the token that predicts its last target."""
    counts = np.zeros(23)
    for low, high in zip(batch.offsets[:-1], batch.offsets[1:], strict=True):
        np.add.at(counts, batch.tokens[low : high - 1], 1)
    return counts


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("alone", [True, False])
def test_each_token_counts_once_for_every_sequence_that_it_is_part_of(share, alone):
    batch = make_batch(3, 4)
    for keep in (np.arange(12), np.array([0, 2, 5]), np.array([11])):
        row = pack_row(part := batch.select(keep), share_prefix=share)
        record, segments, counts = RouterRecord(sequence_ends(part, row), top_k=2), row.segments, np.zeros(23)
        if alone:
            for segment in range(len(segments)):
                runs = [segments.prefix[segment], segment] if segments.prefix[segment] >= 0 else [segment]
                tokens = np.concatenate([row.tokens[segments.starts[run] :][: segments.lengths[run]] for run in runs])
                np.add.at(counts, tokens, record.uses_alone(segments, segment))
        else:
            np.add.at(counts, row.tokens, record.uses(segments))
        assert counts.tolist() == used(part).tolist()


def test_answers_of_one_token_count_their_shared_prompt():
    batch = make_batch(1, 3)
    first = np.isin(np.arange(batch.num_targets), np.unique(batch.target_sequences, return_index=True)[1])
    batch = type(batch).of_next_tokens(
        batch.tokens, np.isin(np.arange(len(batch.tokens)), batch.positions[first] + 1), lengths=batch.lengths, columns={}, losses=(),
        shared=SharedPrompts(np.zeros(3, np.int64), np.full(3, 5)))
    row = pack_row(batch, share_prefix=True)
    record = RouterRecord(sequence_ends(batch, row), top_k=2)
    assert len(row) == 5
    assert record.uses(row.segments).tolist() == record.uses_alone(row.segments, 0).tolist() == [3.0] * 5


def test_a_row_that_scores_nothing_counts_nothing():
    model, row = mixtral(), dummy_row()
    with recorded(model, RouterRecord(row.source, top_k=2)) as record:
        token_logprobs(model, row)
    assert record.num_tokens == 0 and not torch.stack(record.counts).any() and record.probs_E is not None and not record.probs_E.any()


def test_only_the_last_run_of_a_row_is_kept_and_nothing_outside_of_the_body():
    model, batch = mixtral(), make_batch(2, 2)
    assert not packs_rows(model)
    row = pack_row(batch, share_prefix=False)
    with recorded(model, RouterRecord(sequence_ends(batch, row), top_k=2)) as record:
        token_logprobs(model, row)
        first = torch.stack(record.counts)
        token_logprobs(model, row)
    token_logprobs(model, unscored(row))
    assert torch.equal(torch.stack(record.counts), first) and record.num_tokens == len(row)
    assert first.shape == (2, 4) and first.sum() == len(row) * 2 * 2


def test_even_loads_have_the_least_loss_of_top_k():
    even, uneven = torch.full((4,), 5.0), torch.tensor([10.0, 10.0, 0.0, 0.0])
    assert balancing_loss(even, even / 2, num_rows=10) == 2
    assert balancing_loss(uneven, uneven / 2, num_rows=10) == 4


def test_a_family_with_another_loss_or_without_logits_of_its_routers_is_refused(monkeypatch):
    model = mixtral()
    assert experts_per_token(model) == 2
    monkeypatch.setattr(modeling_mixtral, "load_balancing_loss_func", lambda logits, *_: logits[0].sum())
    with pytest.raises(ModelError, match="must be 0 for MixtralForCausalLM, whose routers have a load-balancing loss of their own"):
        experts_per_token(model)
    forward = MixtralForCausalLM.forward
    monkeypatch.setattr(MixtralForCausalLM, "forward", lambda self, output_router_logits, **rest: forward(self, **rest))
    row = dummy_row()
    with recorded(model, RouterRecord(row.source, top_k=2)), pytest.raises(ModelError, match="does not give the logits of its routers"):
        token_logprobs(model, row)
