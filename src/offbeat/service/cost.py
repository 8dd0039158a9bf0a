"""What a request costs, known before any of it is worked on: the one place where tokens, cells and bytes are weighed against each other.

Work is counted in tokens: by it queues are bounded and shares are fair. A cell is an entry of targets, listed or not, or of the likeliest
tokens that an answer tells; four of them cost as much as a token. What trains nothing, a step, a saving or a loading, has a price as well,
so that nobody has it for nothing. Memory is the most that a request holds at once, in the controller, in a rank and as its answer. Called
by `work` and `sampling` for each request before it is taken, and by `serve` for how many models may be resident.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from offbeat.machine import machine_bytes
from offbeat.service.types import SampleRequest, TrainingData

CELLS_PER_TOKEN = 4
STEP_TOKENS = 256
FOLDER_TOKENS = 16_384
"""Of a saving or loading: as much as a quarter of the default pass, so that four of them are one turn."""

ANSWER_ROW_BYTES = 256
"""Of each answer in the database."""

REQUEST_BYTES = 4096
"""Of each request under way, whatever it asks for."""

# Of a batch in the controller: tokens; targets, their positions, four inputs and cells, and the results of passes and all together.
_TOKEN_BYTES, _TARGET_BYTES = 4, 44
# Of an answer while it is written: as an array, as a message, and as a record.
_ANSWER_COPIES = 3
# Of each target in the pass that has it: a dozen index arrays of int64, and logits that are gathered and differentiated.
_RANK_TARGET_BYTES, _RANK_TOKEN_BYTES = 160, 64
# Of what engines say, as JSON and as Python's numbers on both sides; of one sampled token, and of one of the likeliest beside it.
_SAMPLED_BYTES, _TOP_BYTES = 200, 400
# Of a token of a prompt, as a Python number.
_PROMPT_BYTES = 40
SLOT_BYTES = 4 << 20
"""Of one sample of ordinary length while an engine answers with it. One that may take more counts as several of those in flight, which
bounds what all of them take; what waits takes none of it."""
MOST_TOGETHER = 32
"""Samples that are asked for in one call of an engine, which nobody can take apart any more: larger requests are cut. It is a quarter of
those in flight where these are few."""


@dataclass(frozen=True)
class Cost:
    """Of one request.

    Attributes:
        tokens: of work.
        controller_bytes, rank_bytes: the most that it holds in the memory of this process, and of one that computes it.
        answer_bytes: the most that its answer takes up on disk.
    """

    tokens: int
    controller_bytes: int = 0
    rank_bytes: int = 0
    answer_bytes: int = 0

    @property
    def memory_bytes(self) -> int:
        """In all processes, the answer while it is written included."""
        return self.controller_bytes + self.rank_bytes + _ANSWER_COPIES * self.answer_bytes

    @property
    def charge(self) -> dict[str, int]:
        """What its owner's use is charged with until it has ended; from then on the answer is counted as it is."""
        return {"queued_tokens": self.tokens, "queued_bytes": self.memory_bytes, "disk_bytes": self.answer_bytes}


def datum_sizes(data: TrainingData) -> np.ndarray:
    """[N] int64, of each datum the larger of its tokens and a quarter of its cells, at least 1."""
    cells = np.array([math.prod(layout.shape) for layout in data.layouts], np.int64)
    return np.maximum(np.maximum(data.batch.lengths, -(-cells // CELLS_PER_TOKEN)), 1)


def cost_of_pass(data: TrainingData, sizes: np.ndarray, *, pass_tokens: int) -> Cost:
    """Of a forward, or forward and backward, over datums.

    Args:
        sizes: as `datum_sizes` gives them.
        pass_tokens: most of all sizes in one pass, unless a single datum has more.
    """
    batch, work = data.batch, int(sizes.sum())
    at_once = min(work, max(pass_tokens, int(sizes.max(initial=0))))
    num_cells = sum(math.prod(layout.shape) for layout in data.layouts)
    targets_at_once = min(batch.num_targets, CELLS_PER_TOKEN * at_once)
    return Cost(
        work, controller_bytes=REQUEST_BYTES + _TOKEN_BYTES * batch.num_tokens + _TARGET_BYTES * batch.num_targets,
        rank_bytes=_RANK_TOKEN_BYTES * min(batch.num_tokens, at_once) + _RANK_TARGET_BYTES * targets_at_once,
        answer_bytes=4 * num_cells + ANSWER_ROW_BYTES)


def cost_of_step() -> Cost:
    """Of an optimizer step."""
    return Cost(STEP_TOKENS, REQUEST_BYTES, answer_bytes=ANSWER_ROW_BYTES)


def cost_of_folder() -> Cost:
    """Of what the trainers write or read a folder for."""
    return Cost(FOLDER_TOKENS, REQUEST_BYTES, answer_bytes=ANSWER_ROW_BYTES)


@dataclass(frozen=True)
class SampleCost:
    """Of one call for samples, and of the parts in which it is carried out.

    Attributes:
        whole: all of it.
        together: samples of one part; the last has what is left.
        sample_bytes: of one sample while an engine answers with it.
    """

    whole: Cost
    together: int
    sample_bytes: int

    def slots(self, num_samples: int) -> int:
        """Of those that samples in flight may have, what a part takes."""
        return max(num_samples, -(-num_samples * self.sample_bytes // SLOT_BYTES))


def cost_of_samples(request: SampleRequest, *, room: int, max_in_flight: int) -> SampleCost:
    """Of a call whose samples may have up to `room` tokens each, where so many samples of all calls are in flight at most."""
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
    tokens = max(prompt + num * room, -(-cells // CELLS_PER_TOKEN))
    held_bytes = REQUEST_BYTES + _PROMPT_BYTES * prompt + scored_bytes
    return SampleCost(Cost(tokens, held_bytes, answer_bytes=answer_bytes), together, sample_bytes)


# -- models in the trainers ----------------------------------------------------------------------------------------------------------------

_COPIES_OF_ADAPTER = 4
"""Weights, gradients and two moments, each float32."""
_MEMORY_SHARE = 4
_LEAST_RESIDENT = 4


def max_resident(config: Mapping[str, Any], *, rank: int, num_ranks: int, memory_bytes: int = 0) -> int:
    """Models that ranks on this machine may hold at once, in a quarter of its memory.

    Args:
        config: the base model's config.json.
        rank: the largest of an adapter, which is what each takes up.
        memory_bytes: of the machine; 0 asks it.
    """
    each = _COPIES_OF_ADAPTER * 4 * adapter_size(config, rank=rank) * num_ranks
    # A rank that is full makes room for twice as many, so that half of its places may be empty.
    return max((memory_bytes or machine_bytes()) // _MEMORY_SHARE // max(2 * each, 1), _LEAST_RESIDENT)


def adapter_size(config: Mapping[str, Any], *, rank: int) -> int:
    """Numbers of an adapter of all linear layers of a decoder; of experts, which few families adapt, as if all were adapted."""
    text: Mapping[str, Any] = config.get("text_config") or config
    width, layers = _number(text, "hidden_size", "n_embd", "d_model"), _number(text, "num_hidden_layers", "n_layer", "num_layers")
    heads = _number(text, "num_attention_heads", "n_head") or 1
    head_dim = _number(text, "head_dim") or width // heads
    key_heads = _number(text, "num_key_value_heads") or heads
    inner = _number(text, "intermediate_size", "n_inner", "ffn_dim") or 4 * width
    experts = max(_number(text, "num_experts", "num_local_experts", "n_routed_experts"), 1)
    attention = 2 * (width + heads * head_dim) + 2 * (width + key_heads * head_dim)
    return rank * layers * (attention + 3 * experts * (width + inner))


def _number(config: Mapping[str, Any], *names: str) -> int:
    return next((value for name in names if isinstance(value := config.get(name), int)), 0)
