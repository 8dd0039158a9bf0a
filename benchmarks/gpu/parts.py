"""The parts of benchmarks/gpu/check.py, and those of them that compute in its own process."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from counts import flops_of, model_config
from publishing import publishing
from steps import step_times
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from offbeat.config.dist import DistConfig
from offbeat.config.root import Config
from offbeat.config.train import Recompute
from offbeat.data.packing import PackedRow, Segments
from offbeat.model.attention import PACKED, build_plan, packed_attention
from offbeat.model.blocks import checkpoint_activations, compile_layers
from offbeat.model.head import FusedHead, Picks
from offbeat.model.logprobs import token_logprobs
from offbeat.model.lora import AdapterBank
from offbeat.sync.links import MeetingPlace
from offbeat.sync.mesh import host_store, join, leave
from offbeat.sync.platform import current_platform
from offbeat.trainer.memory import estimate_memory, packed_tokens


def parts(device: torch.device, *, trl_python: str) -> dict[str, Callable[[], Any]]:
    """Return the parts by name; on a CPU all are tiny. TRL takes part where `trl_python` has it."""
    tiny = device.type == "cpu"
    passes: list[tuple[str, Recompute, bool]] = [
        ("0.6B", "off", False), ("0.6B", "off", True), ("1.7B", "off", False), ("1.7B", "selective", False), ("1.7B", "full", False),
        ("8B", "selective", False), ("8B", "full", False)]
    if tiny:
        passes = [("tiny", "off", False), ("tiny", "full", False)]
    speed = {
        f"pass {name} {recompute}{' compiled' if compiled else ''}": partial(
            timed_pass, device, name, recompute, compiled, num_tokens=512 if tiny else 16384, repeats=1 if tiny else 5)
        for name, recompute, compiled in passes}
    return {
        "attention": lambda: attention(device), "head": lambda: fused_head(device), "model": lambda: model_pass(device),
        "adapters": lambda: adapters(device), "collectives": lambda: collectives(device), "publishing": lambda: publishing(device),
        "steps": lambda: step_times(device, trl_python)} | speed


def attention(device: torch.device) -> dict[str, float]:
    """Largest differences from float32 on the CPU, of outputs and gradients, as a share of the largest value."""
    lengths = np.array([96, 130, 40, 61, 7, 300])
    prefixes = {"packed": [-1] * 6, "shared": [-1, -1, 0, 1, 0, 1]}
    found = {}
    for name, prefix in prefixes.items():
        segments = Segments(np.cumsum(lengths) - lengths, lengths, np.array(prefix))
        none = np.zeros(0, np.int64)
        row = PackedRow(np.zeros(lengths.sum(), np.int32), np.zeros(lengths.sum(), np.int32), segments, none, none, none, none)
        for window in (None, 64):
            torch.manual_seed(0)
            inputs = [torch.randn(1, heads, len(row), 64) for heads in (8, 2, 2)]
            weights = torch.randn(1, len(row), 8, 64)
            dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
            found[f"{name}, window {window}"] = max(
                _off(mine, theirs) for mine, theirs in zip(
                    _attend(row, inputs, weights, window, device, dtype), _attend(row, inputs, weights, window, "cpu", torch.float32),
                    strict=True))
    _require(max(found.values()) < 0.03, found)
    return found


def fused_head(device: torch.device) -> dict[str, float]:
    """The same of the fused head, in float32."""
    torch.manual_seed(0)
    head, hidden = torch.nn.Linear(64, 5000, bias=False), torch.randn(1, 700, 64)
    picks = Picks(np.arange(700), np.arange(700) * 7, 1.0, with_entropy=True, entropy_gradient=True)
    found = []
    for where in (device, torch.device("cpu")):
        layer, x = head.to(where), hidden.to(where).detach().requires_grad_()
        fused = FusedHead(layer, picks, None)
        logprobs = fused(x)
        grads = torch.autograd.grad(logprobs.sum() + fused.entropy.sum(), [x, layer.weight])
        found.append([logprobs.detach().cpu(), fused.entropy.detach().cpu(), *(grad.cpu() for grad in grads)])
    result = {"largest": max(_off(mine, theirs) for mine, theirs in zip(*found, strict=True))}
    _require(result["largest"] < 1e-3, result)
    return result


def model_pass(device: torch.device) -> dict[str, float]:
    """The same of a small model's log-probabilities and gradients, in float32 and in bfloat16."""
    found = {}
    for dtype, bound in ((torch.float32, 1e-3), (torch.bfloat16, 0.2)):
        theirs, mine = (_scored(_random("tiny", where, kind)) for where, kind in ((torch.device("cpu"), torch.float32), (device, dtype)))
        found[str(dtype)] = max(_off(ours, plain) for ours, plain in zip(mine, theirs, strict=True))
        _require(found[str(dtype)] < bound, found)
    return found


def adapters(device: torch.device) -> dict[str, float]:
    """The same of the gradients of an adapter."""
    found = []
    for where in (device, torch.device("cpu")):
        model = _random("tiny", where, torch.float32)
        bank = AdapterBank(model, rank=4)
        slot = bank.add(rank=4, scaling=2.0, seed=0)
        with bank.using(bank.route_all(slot)):
            token_logprobs(model, packed_tokens(256, 512)).sum().backward()
        found.append(bank.gradients[slot].cpu())
    result = {"gradients": _off(*found)}
    _require(result["gradients"] < 1e-3, result)
    return result


def collectives(device: torch.device) -> dict[str, Any]:
    """A group of one rank on the device's own backend."""
    groups = join(rank=0, world=1, place=MeetingPlace(host_store(60)), config=DistConfig())
    try:
        tensor = torch.arange(4.0, device=device)
        dist.all_reduce(tensor, group=groups.mesh.get_group("dp"))
        _require(tensor.tolist() == [0, 1, 2, 3], tensor)
        return {"backend": current_platform.backend}
    finally:
        leave()


def timed_pass(
    device: torch.device, name: str, recompute: Recompute, compiled: bool, *, num_tokens: int, repeats: int,
) -> dict[str, Any]:
    """Median time of a forward and backward pass in bfloat16; gradients are dropped as they come, as there may be no room for them."""
    config = model_config(name)
    model = _random(name, device, torch.bfloat16)
    checkpoint_activations(model, recompute)
    if compiled:
        compile_layers(model)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", None))
    row, seconds = packed_tokens(num_tokens, config.vocab_size), []
    weights = sum(parameter.nbytes for parameter in model.parameters())
    if device.type != "cpu":
        torch.accelerator.reset_peak_memory_stats()
    for _ in range(repeats + 1):  # the first one is warming up
        began_s = time.perf_counter()
        token_logprobs(model, row, with_entropy=True)[0].sum().backward()
        current_platform.synchronize()
        seconds.append(time.perf_counter() - began_s)
    median_s = float(np.median(seconds[1:]))
    settings = Config.model_validate({"train": {
        "precision": "bf16_mixed", "gradient_checkpointing": recompute, "max_tokens_per_microbatch": num_tokens}})
    estimated = weights + estimate_memory(config, settings.for_ranks, num_ranks=1, on_cpu=device.type == "cpu").activations
    lengths = [len(chunk) for chunk in np.array_split(np.arange(num_tokens), max(1, num_tokens // 1024))]
    flops = flops_of(sum(parameter.numel() for parameter in model.parameters()), config, lengths)
    found = {
        "seconds": median_s, "tokens_per_s": num_tokens / median_s, "model_flop_per_s": flops / median_s, "estimated_bytes": estimated,
        "peak_bytes": current_platform.memory(), "first_seconds": seconds[0]}
    if peak := current_platform.peak_flop_per_s:
        found["mfu"] = flops / median_s / peak
    del model
    if device.type != "cpu":
        torch.cuda.empty_cache()
    return found


def _attend(
    row: PackedRow, inputs: list[Tensor], weights: Tensor, window: int | None, device: torch.device | str, dtype: torch.dtype,
) -> list[Tensor]:
    own = [tensor.to(device, dtype).requires_grad_() for tensor in inputs]
    queries, keys, values = own
    out, _ = packed_attention(
        torch.nn.Module(), queries, keys, values, None, sliding_window=window, attention_plan=build_plan(row, device))
    grads = torch.autograd.grad((out * weights.to(device, dtype)).sum(), own)
    return [tensor.detach().float().cpu() for tensor in (out, *grads)]


def _random(name: str, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    torch.manual_seed(0)
    # Made on the CPU where it is small, so that devices begin with the same numbers.
    with torch.device("cpu" if name == "tiny" else device):
        model = AutoModelForCausalLM.from_config(model_config(name), dtype=dtype, attn_implementation=PACKED)
    return model.to(device)


def _scored(model: PreTrainedModel) -> list[Tensor]:
    logprobs, entropy = token_logprobs(model, packed_tokens(700, 512), with_entropy=True, entropy_gradient=True)
    (logprobs.sum() + 0.1 * entropy.sum()).backward()
    grads = torch.cat([parameter.grad.flatten().float().cpu() for parameter in model.parameters() if parameter.grad is not None])
    return [logprobs.detach().float().cpu(), grads]


def _off(mine: Tensor, theirs: Tensor) -> float:
    return float((mine - theirs).abs().max() / theirs.abs().max())


def _require(holds: bool, found: object) -> None:
    if not holds:
        raise RuntimeError(f"the device does not compute what the CPU does: {found}")
