"""What requests cost, against numbers worked out by hand, and against what they really take."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from offbeat.algorithms.objectives import CROSS_ENTROPY
from offbeat.data.batch import Batch
from offbeat.service.cost import (
    ANSWER_ROW_BYTES,
    FOLDER_TOKENS,
    SLOT_BYTES,
    STEP_TOKENS,
    adapter_size,
    cost_of_folder,
    cost_of_pass,
    cost_of_samples,
    cost_of_step,
    datum_sizes,
    max_resident,
)
from offbeat.service.types import Layout, SampleRequest, SparseArray, TrainingData
from small_service import training_data

REQUEST = SampleRequest("s", 1, prompt=(1,) * 100)


def wide(num_tokens: int, width: int, *, listed: int | None = None) -> TrainingData:
    """One datum with so many targets at each position, of which only the first are listed if that is said."""
    cells = num_tokens * width
    num = cells if listed is None else listed
    columns = ("loss_weights", "rollout_logprobs", "advantages", "ratio_mask")
    batch = Batch(
        tokens=np.zeros(num_tokens), offsets=np.array([0, num_tokens]), positions=np.arange(num) // width, targets=np.zeros(num),
        columns={name: np.zeros(num) for name in columns}, sequences={"group_ids": [0], "prefix_lens": [0]}, losses=(CROSS_ENTROPY,))
    return TrainingData(batch, (Layout((num_tokens, width), None if listed is None else np.arange(listed)),))


def test_a_pass_costs_its_tokens_or_a_quarter_of_its_cells_if_that_is_more() -> None:
    assert datum_sizes(training_data(1, num=3, length=8)).tolist() == [8, 8, 8]
    assert datum_sizes(wide(10, 4)).tolist() == [10] and datum_sizes(wide(10, 400)).tolist() == [1000]
    assert datum_sizes(wide(1, 1024, listed=1)).tolist() == [256], "listed or not, for the answer has all of them"


def test_the_memory_of_a_pass_is_bounded_before_it_is_there() -> None:
    data = wide(100, 1000)
    cost = cost_of_pass(data, datum_sizes(data), pass_tokens=65536)
    arrays = [data.batch.tokens, data.batch.positions, data.batch.targets, *data.batch.columns.values()]
    held = sum(array.nbytes for array in arrays)
    assert held < cost.controller_bytes < 3 * held
    assert cost.answer_bytes == 4 * 100_000 + ANSWER_ROW_BYTES and cost.tokens == 25_000
    assert cost.memory_bytes > cost.controller_bytes + cost.rank_bytes + cost.answer_bytes


def test_a_rank_never_has_more_of_a_request_than_a_pass_or_its_largest_datum() -> None:
    data = training_data(1, num=100, length=10)
    small, large = (cost_of_pass(data, datum_sizes(data), pass_tokens=tokens).rank_bytes for tokens in (50, 5000))
    assert large == 1000 * (160 + 64) and small == 200 * 160 + 50 * 64
    one = wide(10, 1000)
    assert cost_of_pass(one, datum_sizes(one), pass_tokens=50).rank_bytes >= 10_000 * 160


def test_four_patches_of_an_image_cost_as_much_as_a_token_beside_its_own() -> None:
    data = replace(training_data(1, num=3, length=8), patches=(0, 16, 17))
    sizes = datum_sizes(data)
    assert sizes.tolist() == [8, 12, 13]
    text, seen = (cost_of_pass(each, datum_sizes(each), pass_tokens=65536) for each in (replace(data, patches=()), data))
    assert seen.tokens - text.tokens == 9 and seen.rank_bytes - text.rank_bytes == 33 * 8192
    assert cost_of_pass(data, sizes, pass_tokens=5).rank_bytes < seen.rank_bytes
    plain, with_image = (
        cost_of_samples(replace(REQUEST, num_samples=8, num_patches=num), room=50, max_in_flight=256).whole for num in (0, 17))
    assert with_image.tokens - plain.tokens == 5, "once for all samples"
    assert with_image.memory_bytes - plain.memory_bytes == 17 * 8192


def test_steps_and_folders_cost_something() -> None:
    assert cost_of_step().tokens == STEP_TOKENS and cost_of_folder().tokens == FOLDER_TOKENS
    assert min(cost_of_step().charge["queued_bytes"], cost_of_folder().charge["disk_bytes"]) > 0


@pytest.mark.parametrize(("fields", "tokens"), [
    ({}, 100 + 50), ({"num_samples": 8}, 100 + 8 * 50), ({"topk_sample_logprobs": 256}, 50 * 64), ({"topk_sample_logprobs": 2}, 150),
    ({"num_samples": 8, "topk_sample_logprobs": 20}, 8 * 50 * 5), ({"topk_prompt_logprobs": 256}, 100 * 64),
    ({"target_prompt_logprobs": SparseArray(np.zeros(1, np.int64), np.array([40]), (100, 40))}, 1000)])
def test_samples_cost_what_they_may_become_or_a_quarter_of_their_cells(fields: dict[str, Any], tokens: int) -> None:
    assert cost_of_samples(SampleRequest("s", 1, prompt=(1,) * 100, **fields), room=50, max_in_flight=256).whole.tokens == tokens


def test_many_samples_are_cut_and_heavy_ones_into_smaller_parts() -> None:
    plain = cost_of_samples(SampleRequest("s", 1, prompt=(1,), num_samples=512), room=256, max_in_flight=256)
    assert plain.together == 32 and plain.slots(32) == 32
    assert cost_of_samples(SampleRequest("s", 1, prompt=(1,), num_samples=5), room=256, max_in_flight=256).together == 5
    assert cost_of_samples(SampleRequest("s", 1, prompt=(1,), num_samples=5), room=256, max_in_flight=8).together == 2
    heavy = cost_of_samples(SampleRequest("s", 1, prompt=(1,), num_samples=512, topk_sample_logprobs=256), room=256, max_in_flight=256)
    assert 1 <= heavy.together < 8 and heavy.sample_bytes > 256 * 256 * 400
    assert heavy.slots(heavy.together) * SLOT_BYTES >= heavy.together * heavy.sample_bytes
    assert heavy.whole.controller_bytes < 2**13, "what engines answer with is bounded by what is in flight"
    assert heavy.whole.answer_bytes >= 512 * 256 * 256 * 8


def test_an_adapter_has_as_many_numbers_as_its_layers() -> None:
    config = {
        "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "intermediate_size": 128}
    layers = [(64, 64), (64, 32), (64, 32), (64, 64), (64, 128), (64, 128), (128, 64)]
    assert adapter_size(config, rank=8) == 8 * 2 * sum(map(sum, layers))
    assert adapter_size({"text_config": config}, rank=1) == adapter_size(config, rank=1)


def test_as_many_models_are_resident_as_fit_a_quarter_of_the_memory_twice() -> None:
    config = {"hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
              "intermediate_size": 3072}
    each = 16 * adapter_size(config, rank=32)
    found = max_resident(config, rank=32, num_ranks=2, memory_bytes=64 << 30)
    assert found == math.floor((64 << 30) / 4 / (2 * 2 * each))
    assert max_resident(config, rank=32, num_ranks=2, memory_bytes=1) == 4 and max_resident({}, rank=32, num_ranks=1) > 4
