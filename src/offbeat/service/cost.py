"""Computes the cost of a request before any work on it. This is the only place that weighs tokens, cells and bytes against each other.

Work is counted in tokens, which bound queues and determine fair shares. A cell is an entry of the targets, stored or implied, or a top
token in an answer; four cells cost as much as one token: for example, a datum of 100 tokens with targets [100, 8] costs 200. So do four
patches of an image, in addition to the tokens that stand for it. Optimizer steps, saves and loads have a price too, so that nobody gets
them for free. Memory is the peak that a request holds in the controller, in a rank and as its answer. `work` and `sampling` compute the
cost of each request before they accept it, and `serve` the number of models that may be resident.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from offbeat.machine import machine_bytes
from offbeat.service.types import SampleRequest, TrainingData

CELLS_PER_TOKEN = 4
PATCHES_PER_TOKEN = 4
STEP_TOKENS = 256
FOLDER_TOKENS = 16_384
"""Price of a save or load: a quarter of the default pass, so that one turn takes four of them."""

ANSWER_ROW_BYTES = 256
"""Bytes of one answer's row in the database."""

REQUEST_BYTES = 4096
"""Bytes of any request under way, in addition to its contents."""

# Bytes in the controller for each token and each target (its position, four inputs, its cells, and the results of passes and joined).
_TOKEN_BYTES, _TARGET_BYTES = 4, 44
# Copies of an answer while it is written: as an array, as a message, and as a record.
_ANSWER_COPIES = 3
# Bytes in a rank for each target of the current pass: a dozen int64 index arrays, and logits that are gathered and differentiated.
_RANK_TARGET_BYTES, _RANK_TOKEN_BYTES = 160, 64
# Bytes of an engine's answer, as JSON and as Python numbers on both sides, for each sampled token and for each of its top tokens.
_SAMPLED_BYTES, _TOP_BYTES = 200, 400
# Bytes in a rank or an engine for each patch: its pixels, and its states in a layer of the tower.
_PATCH_BYTES = 8192
# Bytes of a prompt token as a Python number.
_PROMPT_BYTES = 40
SLOT_BYTES = 4 << 20
"""Bytes of one sample of ordinary length while an engine answers it.

A sample that may take more counts as several of the samples in flight, which bounds their total memory. Waiting samples take none.
"""
MOST_TOGETHER = 32
"""Largest number of samples in one engine call. A call cannot be split later, so larger requests are cut into parts.

Where few samples may be in flight, the limit is a quarter of that number.
"""


@dataclass(frozen=True)
class Cost:
    """Cost of one request.

    Attributes:
        tokens: amount of work.
        controller_bytes, rank_bytes: peak memory in this process, and in one rank that computes the request; for images also in an engine.
        answer_bytes: largest size of its answer on disk.
    """

    tokens: int
    controller_bytes: int = 0
    rank_bytes: int = 0
    answer_bytes: int = 0

    @property
    def memory_bytes(self) -> int:
        """Peak memory in all processes, including the answer while it is written."""
        return self.controller_bytes + self.rank_bytes + _ANSWER_COPIES * self.answer_bytes

    @property
    def charge(self) -> dict[str, int]:
        """Amounts charged to the owner until the request ends; from then on, the answer counts with its actual size."""
        return {"queued_tokens": self.tokens, "queued_bytes": self.memory_bytes, "disk_bytes": self.answer_bytes}


def datum_sizes(data: TrainingData) -> np.ndarray:
    """Return [N] int64: for each datum, the larger of its tokens and a quarter of its cells, at least 1, and a quarter of its patches."""
    cells = np.array([math.prod(layout.shape) for layout in data.layouts], np.int64)
    patches = np.array(data.patches or [0] * len(cells), np.int64)
    return np.maximum(np.maximum(data.batch.lengths, -(-cells // CELLS_PER_TOKEN)), 1) + -(-patches // PATCHES_PER_TOKEN)


def cost_of_pass(data: TrainingData, sizes: np.ndarray, *, pass_tokens: int) -> Cost:
    """Return the cost of a forward pass, or of a forward and backward pass, over datums.

    Args:
        sizes: [N] int64 from `datum_sizes`.
        pass_tokens: largest sum of sizes in one pass, unless a single datum is larger.
    """
    batch, work = data.batch, int(sizes.sum())
    at_once = min(work, max(pass_tokens, int(sizes.max(initial=0))))
    num_cells = sum(math.prod(layout.shape) for layout in data.layouts)
    targets_at_once = min(batch.num_targets, CELLS_PER_TOKEN * at_once)
    return Cost(
        work, controller_bytes=REQUEST_BYTES + _TOKEN_BYTES * batch.num_tokens + _TARGET_BYTES * batch.num_targets,
        rank_bytes=_RANK_TOKEN_BYTES * min(batch.num_tokens, at_once) + _RANK_TARGET_BYTES * targets_at_once
        + _PATCH_BYTES * min(sum(data.patches), PATCHES_PER_TOKEN * at_once),
        answer_bytes=4 * num_cells + ANSWER_ROW_BYTES)


def cost_of_step() -> Cost:
    return Cost(STEP_TOKENS, REQUEST_BYTES, answer_bytes=ANSWER_ROW_BYTES)


def cost_of_folder() -> Cost:
    """Return the cost of a folder that the trainers write or read."""
    return Cost(FOLDER_TOKENS, REQUEST_BYTES, answer_bytes=ANSWER_ROW_BYTES)


@dataclass(frozen=True)
class SampleCost:
    """Cost of one sampling request, and the size of its parts.

    Attributes:
        together: number of samples in each part; the last part has the remainder, e.g. 8 samples by 3 are parts of 3, 3 and 2.
        sample_bytes: memory of one sample while an engine answers it.
    """

    whole: Cost
    together: int
    sample_bytes: int

    def slots(self, num_samples: int) -> int:
        """Return the number of samples in flight that a part with this many samples counts as, such as 2 for one sample of 8 MiB."""
        return max(num_samples, -(-num_samples * self.sample_bytes // SLOT_BYTES))


def cost_of_samples(request: SampleRequest, *, room: int, max_in_flight: int) -> SampleCost:
    """Return the cost of a request with up to `room` tokens per sample, where all requests share `max_in_flight` samples in flight."""
    prompt, num = len(request.prompt), request.num_samples
    targets = request.target_prompt_logprobs
    target_cells = 0 if targets is None else math.prod(targets.shape)
    prompt_cells = prompt * (request.topk_prompt_logprobs + request.prompt_alt_tokens_k)
    sample_cells = room * request.topk_sample_logprobs
    sample_bytes = _SAMPLED_BYTES * room + _TOP_BYTES * sample_cells
    most = max(min(MOST_TOGETHER, max_in_flight // 4), 1)
    together = min(num, most, max(most * SLOT_BYTES // max(sample_bytes, 1), 1))
    scored = request.prompt_logprobs or prompt_cells or targets is not None
    scored_bytes = scored and _SAMPLED_BYTES * (prompt + (0 if targets is None else len(targets.cells))) + _TOP_BYTES * prompt_cells
    answer_bytes = num * (8 * room + 8 * sample_cells) + 4 * prompt + 8 * prompt_cells + 4 * target_cells + ANSWER_ROW_BYTES
    cells = prompt_cells + target_cells + num * sample_cells
    tokens = max(prompt + num * room, -(-cells // CELLS_PER_TOKEN)) + -(-request.num_patches // PATCHES_PER_TOKEN)
    held_bytes = REQUEST_BYTES + _PROMPT_BYTES * prompt + scored_bytes
    rank_bytes = _PATCH_BYTES * request.num_patches  # an engine computes an image once for all samples
    return SampleCost(Cost(tokens, held_bytes, rank_bytes, answer_bytes=answer_bytes), together, sample_bytes)


_COPIES_OF_ADAPTER = 4
"""Weights, gradients and two moments, each float32."""
_MEMORY_SHARE = 4
_LEAST_RESIDENT = 4


def max_resident(config: Mapping[str, Any], *, rank: int, num_ranks: int, memory_bytes: int = 0) -> int:
    """Return the number of models that the ranks on this machine may hold at once in a quarter of its memory.

    Args:
        config: the base model's config.json.
        rank: the largest rank of an adapter, which every model is assumed to have.
        memory_bytes: memory of the machine; 0 asks the machine.
    """
    each = _COPIES_OF_ADAPTER * 4 * adapter_size(config, rank=rank) * num_ranks
    # A full rank makes room for twice as many models, so half of its places may be empty.
    return max((memory_bytes or machine_bytes()) // _MEMORY_SHARE // max(2 * each, 1), _LEAST_RESIDENT)


def adapter_size(config: Mapping[str, Any], *, rank: int) -> int:
    """Return the number of weights in an adapter on all of a decoder's linear layers and experts, which few families adapt."""
    text: Mapping[str, Any] = config.get("text_config") or config
    width, layers = _first_of(text, "hidden_size", "n_embd", "d_model"), _first_of(text, "num_hidden_layers", "n_layer", "num_layers")
    heads = _first_of(text, "num_attention_heads", "n_head") or 1
    head_dim = _first_of(text, "head_dim") or width // heads
    key_heads = _first_of(text, "num_key_value_heads") or heads
    inner = _first_of(text, "intermediate_size", "n_inner", "ffn_dim") or 4 * width
    experts = max(_first_of(text, "num_experts", "num_local_experts", "n_routed_experts"), 1)
    attention = 2 * (width + heads * head_dim) + 2 * (width + key_heads * head_dim)
    return rank * layers * (attention + 3 * experts * (width + inner))


def _first_of(config: Mapping[str, Any], *names: str) -> int:
    return next((value for name in names if isinstance(value := config.get(name), int)), 0)
