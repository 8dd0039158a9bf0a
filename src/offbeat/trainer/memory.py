"""Estimates the device memory of a train rank by running one micro-batch on tensors without numbers.

Called by train ranks on an accelerator before they load a model, and as a program by `offbeat config check --memory`: it reads a
configuration as JSON and prints an estimate as JSON. Counted are all tensors that live at a time, by their sizes; not the memory of the
device's libraries, about a gigabyte, nor an allocator's losses between tensors, a few percent.
"""

import json
import logging
import math
import sys
import weakref
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from offbeat.config.for_processes import RankConfig
from offbeat.config.model import ROUNDED_BYTES
from offbeat.config.train import Recompute
from offbeat.data.batch import Batch
from offbeat.data.model_folder import check_model_folder
from offbeat.data.packing import PackedRow, pack_row
from offbeat.errors import ConfigError, ModelError, first_line
from offbeat.model.attention import PACKED
from offbeat.model.blocks import checkpoint_activations, decoder_layers
from offbeat.model.fused_experts import find_experts
from offbeat.model.logprobs import token_logprobs
from offbeat.model.lora_targets import ALL_LINEAR, find_expert_layers, find_targets
from offbeat.model.norm import use_fast_norms
from offbeat.model.rows import RAW_ERRORS
from offbeat.sync.mesh import ProcessGroups
from offbeat.trainer.offload import PART_SIZE

_SEQUENCE = 1024
"""Tokens of each of the sequences that the micro-batch is made of; memory depends on their sum alone."""

_USABLE = 0.92
"""Share of a device's memory that tensors may take; the rest is for the context, libraries, and gaps between tensors."""

_BESIDE_ENGINES = 0.6
"""Share of a device that a rank has beside engines, which are told to take 0.4."""

_AUTOCAST = 1.2
"""Activations under autocast, where values between matrix products are float32, by those in bfloat16: 70 and 57.5 GiB were counted on
Qwen3-1.7B with transformers' own norms. With those of `model.norm` on a GPU it was 48 GiB, for which 1 is taken."""

_FAILURES = (*RAW_ERRORS, AssertionError)
"""Exceptions of code that does not suit tensors without numbers."""

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of one train rank, at their peak: on the device, except for the last.

    Attributes:
        weights: the model's own, or this rank's part of them.
        gathered: whole layers that run, in the format of the computation, where weights are in shards, float32 masters or rounded.
        gradients: kept until the optimizer's step.
        optimizer: moments, or with `train.offload_optimizer` the moments of one part.
        reference: frozen copy of the model, or this rank's part of it.
        critic: weights, gradients and moments of the value model.
        teacher: weights of the frozen teacher.
        activations: all else that a forward and backward pass over one micro-batch holds at once, logits included.
        host: moments in host memory.
    """

    weights: int
    gathered: int
    gradients: int
    optimizer: int
    reference: int
    critic: int
    teacher: int
    activations: int
    host: int = 0

    @property
    def total(self) -> int:
        """Sum of all that is on the device."""
        return sum(asdict(self).values()) - self.host


def estimate_memory(model_config: Any, config: RankConfig, *, num_ranks: int, on_cpu: bool = False) -> MemoryEstimate:
    """Estimate the memory of one rank.

    The division of a layer by a tensor group is not imitated: weights and activations are counted as if it divided all of them evenly,
    though a rank keeps norms and the states between layers whole. A critic or teacher whose model is not on this machine counts as large as
    the policy; neither computes while the policy's activations are there.

    Args:
        model_config: transformers' configuration of the model.
        num_ranks: number of train ranks, which [train.parallel] lays out.
        on_cpu: whether the rank computes on a CPU, which has other kernels and chunks.
    """
    train, lora, parallel = config.train, config.model.lora, config.train.parallel
    mixed, bases_half = train.computes_in == "bf16_mixed", lora.rank > 0 and config.model.number_format == "bfloat16"
    # As `offbeat.trainer.strategies` chooses.
    sharded = parallel.shard > 1 or (parallel.divides and num_ranks > parallel.tp)
    autocasts = mixed and not sharded and not bases_half
    parts = parallel.tp * (parallel.shard * parallel.cp if sharded else 1)
    dtype = torch.bfloat16 if mixed or bases_half else torch.float32
    model = _build(model_config, dtype)
    activations = _peak(_PassShape(
        model_config, model_config.to_json_string(use_diff=False), dtype, train.recomputes,
        -(-train.max_tokens_per_microbatch // parallel.cp), on_cpu)) // parallel.tp
    count, form = _Count.of(model), config.model.quantization
    spread = parallel.ep if parallel.spreads_experts else 1
    held = partial(_Count.held, parts=parts, expert_parts=math.lcm(parallel.shard, spread) if spread > 1 else parts)
    rounded = [] if form == "none" else [layer.weight.numel() for layer in find_targets(model, (ALL_LINEAR,)).values()]
    whole = replace(count, others=count.others - sum(rounded))
    if lora.rank:  # each rank holds all of the adapter
        trained = lora.rank * (
            sum(layer.in_features + layer.out_features for layer in find_targets(model, lora.targets).values())
            + sum(layer.num_in + layer.num_out for layer in find_expert_layers(model, lora.targets)))
        weights = (2 if bases_half else 4) * held(whole) + int(ROUNDED_BYTES[form] * sum(rounded)) // parts + 4 * trained
    else:
        trained, weights = held(count), 4 * held(count)
    # Autocast keeps copies of whole weights for a pass; rounded ones are made whole a matrix at a time, and cast then.
    copies = (2 * whole.all // parallel.tp if autocasts else 0) + (6 if mixed or bases_half else 4) * max(rounded, default=0)
    count_critic = held(_count(config.critic.path, count)) if config.algorithm.needs_critic else 0
    moments = [8 * trained, 8 * count_critic]
    kept = [min(size, 8 * PART_SIZE) for size in moments] if train.offload_optimizer else moments
    algorithm, teacher = config.algorithm, config.teacher.path if config.algorithm.teacher == "model" else ""
    return MemoryEstimate(
        weights=weights, gathered=_largest_units(model, expert_parts=spread) // parallel.tp if sharded else copies,
        gradients=4 * trained, optimizer=kept[0], reference=4 * held(count) if algorithm.needs_reference and not lora.rank else 0,
        critic=8 * count_critic + kept[1],
        teacher=(2 if config.model.number_format == "bfloat16" else 4) * held(_count(teacher, count)) if teacher else 0,
        activations=int(activations * _AUTOCAST) if autocasts and (on_cpu or not use_fast_norms(model)) else activations,
        host=sum(moments) if train.offload_optimizer else 0)


def _build(model_config: Any, dtype: torch.dtype) -> PreTrainedModel:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(model_config, dtype=dtype, attn_implementation=PACKED)


@dataclass(frozen=True)
class _Count:
    """Numbers of a model's weights: those of its experts, and others."""

    others: int
    experts: int

    @classmethod
    def of(cls, model: PreTrainedModel) -> "_Count":
        experts = sum(parameter.numel() for module in find_experts(model).values() for parameter in module.parameters())
        return cls(sum(parameter.numel() for parameter in model.parameters()) - experts, experts)

    @property
    def all(self) -> int:
        """Number of all weights."""
        return self.others + self.experts

    def held(self, *, parts: int, expert_parts: int) -> int:
        """Return the number on one rank, which has one of so many parts of each."""
        return self.others // parts + self.experts // expert_parts


def _count(folder: str, unknown: _Count) -> _Count:
    """Return the number of weights of another model, or `unknown` if it cannot be read here."""
    if not folder:
        return unknown
    try:
        return _Count.of(_build(_config_of(folder), torch.float32))
    except (ModelError, OSError, *_FAILURES):
        return unknown


def advise(model_config: Any, config: RankConfig, *, num_ranks: int, available: int) -> str:
    """Return "" if a rank fits into `available` bytes of a device; otherwise a sentence with the first setting that would make it fit."""
    needed = estimate_memory(model_config, config, num_ranks=num_ranks)
    if needed.total <= _USABLE * available:
        return ""
    train = config.train
    changes: list[dict[str, Any]] = [] if train.computes_in == "bf16_mixed" else [{"precision": "bf16_mixed"}]
    recompute = {"gradient_checkpointing": "full"} | ({"compile": False} if train.compile else {})  # which exclude each other
    changes += [recompute, *(recompute | {"max_tokens_per_microbatch": train.max_tokens_per_microbatch // part} for part in (2, 4, 8))]
    most = num_ranks // train.parallel.ranks_per_share
    if most > train.parallel.shard:
        sharded = {"parallel.shard": most}
        changes += [sharded, sharded | {"precision": "bf16_mixed"} | recompute]
    if not config.model.lora.rank:
        offload = {"offload_optimizer": True}
        changes += [recompute | offload, recompute | offload | {"precision": "bf16_mixed"}]
    for change in changes:
        shard = change.get("parallel.shard", train.parallel.shard)
        own = {name: value for name, value in change.items() if name in type(train).model_fields}
        changed = {"parallel": train.parallel.model_copy(update={"shard": shard}), **own}
        other = config.model_copy(update={"train": train.model_copy(update=changed)})
        if estimate_memory(model_config, other, num_ranks=num_ranks).total <= _USABLE * available:
            settings = " and ".join(f"train.{name} = {json.dumps(value)}" for name, value in change.items())
            break
    else:
        settings = 'more ranks with train.parallel.shard, model.lora.rank, or a smaller model'
    return (
        f"a training step needs about {_gib(needed.total)} GiB on each device, of which {_gib(needed.activations)} GiB are activations, and"
        f" {_gib(available)} GiB are there; use {settings}")


def check_memory(folder: str, config: RankConfig, *, groups: ProcessGroups, device: int) -> None:
    """Check that a run fits, before anything is loaded; collective. A model that cannot be estimated is let through.

    `device` is the bytes of this rank's device; the smallest device of all ranks decides. Engines that share them take their part.

    Raises:
        ConfigError: it does not; the message names a setting with which it would.
        ModelError: there is no such model.
    """
    least = -groups.sync.max_scalars("device_memory", {"bytes": -float(device)})["bytes"]
    available = int(least * (_BESIDE_ENGINES if config.cluster.computes_beside_engines else 1))
    model_config = _config_of(folder)
    try:
        reason = advise(model_config, config, num_ranks=groups.world, available=available)
    except (ModelError, *_FAILURES) as exc:  # a model whose rows cannot be packed, or whose code looks at numbers
        if groups.rank == 0:
            _LOG.warning("the memory of a training step was not estimated: %s", first_line(exc))
        return
    if reason:
        raise ConfigError(reason)


class LiveBytes(TorchDispatchMode):
    """Follows the memory of all tensors that operations make; `peak` is the most bytes that lived at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._live = 0
        self._known: dict[int, weakref.ref] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, and count the new tensors in its results."""
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._note(leaf.untyped_storage())
        return result

    def ignore(self, tensor: Tensor) -> None:
        """Leave an existing tensor of any shape out of the count."""
        storage = tensor.untyped_storage()
        self._known[storage._cdata] = weakref.ref(storage)

    def _note(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._known:
            return
        size = storage.nbytes()

        def forget(_ref: object) -> None:
            del self._known[key]
            self._live -= size

        self._known[key] = weakref.ref(storage, forget)
        self._live += size
        self.peak = max(self.peak, self._live)


def packed_tokens(num_tokens: int, vocab_size: int) -> PackedRow:
    """Return a row of sequences of 1,024 tokens, all scored but their first."""
    lengths = [_SEQUENCE] * (num_tokens // _SEQUENCE) + ([num_tokens % _SEQUENCE] if num_tokens % _SEQUENCE else [])
    tokens = np.arange(num_tokens, dtype=np.int32) % vocab_size
    trained = np.arange(num_tokens) % _SEQUENCE > 0
    return pack_row(Batch.of_next_tokens(tokens, trained, lengths=lengths, columns={}, losses=()), share_prefix=False)


def _largest_units(model: PreTrainedModel, *, expert_parts: int) -> int:
    """Return the bytes of the units that FSDP2 holds whole at a time: two layers, the running and the next one, and all other weights.

    Of the experts in a layer, a rank gathers one of so many parts.
    """
    dealt = {parameter for module in find_experts(model).values() for parameter in module.parameters()}
    sizes = {parameter: parameter.nbytes // (expert_parts if parameter in dealt else 1) for parameter in model.parameters()}
    layers = [sum(sizes[parameter] for parameter in layer.parameters()) for layer in decoder_layers(model)]
    rest = sum(sizes.values()) - sum(layers)
    return 2 * max(layers, default=0) + rest


@dataclass(frozen=True)
class _PassShape:
    """All that the activations of a pass depend on."""

    model_config: Any = field(compare=False)  # has no hash
    described: str
    dtype: torch.dtype
    recomputes: Recompute
    num_tokens: int
    on_cpu: bool


@lru_cache(maxsize=64)  # advice tries many settings, of which few change a pass's tensors
def _peak(wanted: _PassShape) -> int:
    """Return the most bytes that live during a forward and backward pass besides weights and their gradients."""
    model = _build(wanted.model_config, wanted.dtype)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.to_empty(device="cpu" if wanted.on_cpu else "meta").tie_weights()
        checkpoint_activations(model, wanted.recomputes)
        return _counted(model, wanted.num_tokens)


def _counted(model: PreTrainedModel, num_tokens: int) -> int:
    """Run the pass; gradients of weights are dropped at once, as they are counted elsewhere."""
    counted = LiveBytes()
    row = packed_tokens(num_tokens, model.config.get_text_config().vocab_size)

    def drop(parameter: Tensor) -> None:
        parameter.grad = None

    for tensor in (*model.parameters(), *model.buffers()):
        counted.ignore(tensor)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(drop)
    with counted:
        logprobs, _ = token_logprobs(model, row, with_entropy=True)
        logprobs.sum().backward()
    return counted.peak


def _config_of(folder: str) -> Any:
    return AutoConfig.from_pretrained(check_model_folder(folder), local_files_only=True)


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f}"


def main() -> None:
    """Read a configuration from standard input, and print its estimate."""
    config = RankConfig.model_validate_json(sys.stdin.read())
    estimate = estimate_memory(_config_of(config.model.path), config, num_ranks=config.train.num_ranks)
    print(json.dumps(asdict(estimate)))


if __name__ == "__main__":
    main()
