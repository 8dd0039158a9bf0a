"""A part of `check.py`: weights from a trainer's process into an engine's on the same device, in three ways that take turns.

- through an IPC handle: the trainer copies a version into a buffer that the engine has mapped, and the engine copies it from there;
- by a file of safetensors in the folder for temporary files, as the `disk` channel has it;
- by a broadcast, as the `collective` channel has it: through the host, since NCCL wants a device for each process.

Each time counts from weights that lie on the trainer's device to the engine's answer that it computes with them, writing included. After
every one the engine states the fingerprint of its weights, which must be that of the version, and sets them to zero. Offbeat has no channel
for handles yet; this shows whether one would work, and what it would save.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import astuple
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from counts import model_config
from handles import shared_buffer
from measure import SOURCES, Contestant
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from offbeat.engine.forward import fingerprint_tensors
from offbeat.sync.broadcast import Spec
from offbeat.sync.platform import current_platform
from offbeat.sync.weight_broadcast import WeightBroadcast

ENGINE = Path(__file__).with_name("publishing_engine.py")
ROUNDS = 4
"""Versions; what happens only once, as opening the handle does, falls into the first."""
LIMIT_S = 60.0

Ask = Callable[[dict[str, Any]], dict[str, Any]]
Publish = Callable[[dict[str, Tensor], Ask], float]
"""Publishes weights to the engine that is asked; returns how long that took."""


def publishing(device: torch.device) -> dict[str, Any]:
    """Return the size of a version and for each way its rate, and how long the first version took.

    Raises:
        RuntimeError: the engine died, or computes with other weights than the trainer.
    """
    weights = random_weights(device)
    size = sum(tensor.nbytes for tensor in weights.values())
    with shared_buffer(size, device) as (buffer, handle):
        seconds = take_turns(weights, {"handle": partial(by_handle, buffer, handle), "file": by_file, "broadcast": by_broadcast}, device)
    rates = {f"{name}_gb_per_s": size / 1e9 / median(own[1:]) for name, own in seconds.items()}
    return {"bytes": size} | rates | {f"{name}_first_s": own[0] for name, own in seconds.items()}


def take_turns(weights: dict[str, Tensor], ways: dict[str, Publish], device: torch.device) -> dict[str, list[float]]:
    """Publish some versions in every way; returns the seconds of each, and raises as `publishing`."""
    engine = Contestant("gpu-publish-engine", [sys.executable, ENGINE, device.type], env={
        "PYTHONPATH": SOURCES} | ({"CUDA_VISIBLE_DEVICES": ""} if device.type == "cpu" else {}))

    def ask(job: dict[str, Any]) -> dict[str, Any]:
        return engine.ask(job, limit_s=LIMIT_S).values

    seconds: dict[str, list[float]] = {name: [] for name in ways}
    try:
        ask({"hold": [astuple(Spec.of(name, tensor)) for name, tensor in weights.items()]})
        for number in range(ROUNDS):
            torch.manual_seed(number)
            for tensor in weights.values():
                tensor.normal_()
            fingerprint = fingerprint_tensors(weights)
            for name, publish in ways.items():
                seconds[name].append(publish(weights, ask))
                told = ask({"do": "fingerprint"})["fingerprint"]
                if told != fingerprint:
                    raise RuntimeError(f"version {number} by {name} has the fingerprint {told} in the engine, not {fingerprint}")
    finally:
        engine.close()
    return seconds


def by_handle(buffer: Tensor, handle: list[Any], weights: dict[str, Tensor], ask: Ask) -> float:
    """Publish through a buffer of these weights' size."""
    began_s = time.perf_counter()
    flat = [tensor.view(-1).view(torch.uint8) for tensor in weights.values()]
    torch._foreach_copy_(list(buffer.split([len(part) for part in flat])), flat)
    current_platform.synchronize()  # the engine reads in a stream of its own
    ask({"handle": handle})
    return time.perf_counter() - began_s


def by_file(weights: dict[str, Tensor], ask: Ask) -> float:
    """Publish by a file."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        began_s = time.perf_counter()
        save_file(weights, path)
        ask({"file": str(path)})
        return time.perf_counter() - began_s


def by_broadcast(weights: dict[str, Tensor], ask: Ask) -> float:
    """Publish by a broadcast from host memory."""
    began_s = time.perf_counter()
    offer = WeightBroadcast(
        {name: tensor.to("cpu", copy=True) for name, tensor in weights.items()}, host="127.0.0.1", num_receivers=1, timeout_s=LIMIT_S,
        write_folder=refuse)
    try:
        ask({"broadcast": offer.address})
    finally:
        offer.close()
    return time.perf_counter() - began_s


def refuse(_state: dict[str, Tensor]) -> None:
    raise RuntimeError("there is no folder beside this broadcast")


def random_weights(device: torch.device) -> dict[str, Tensor]:
    """Return tensors with the names and shapes of a model's weights, in bfloat16."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_config("tiny" if device.type == "cpu" else "0.6B"), dtype=torch.bfloat16)
    return {name: torch.empty(tensor.shape, dtype=tensor.dtype, device=device) for name, tensor in model.named_parameters()}
