"""Deltas into vLLM: the bytes of a version, whole and as changes, and the seconds to stage it and to switch to it.

A pretrained model (SmolLM2-135M of `make smollm2`, or another folder) takes steps of AdamW as in `delta.py`. Of every three versions one is
published whole and two as changes. Folders are in /dev/shm, and broadcasts stay on this machine, so that the seconds are the server's and
not a link's.

    python benchmarks/delta_vllm.py [--model FOLDER] [--rate 3e-6] [--rounds 4] [--channels disk collective]

Prints one JSON line for each channel and kind of version: the median of `bytes`, and the least `stage_s`, and `switch_s`, in which the
server loads, because whatever else the machine does only adds to them. Every version is proven by its fingerprint. Needs vLLM in
`.venv-vllm`.
"""

import argparse
import asyncio
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from delta import SMOLLM2, batches, between_numbers, published, train
from measure import ROOT, WORK, note
from torch import Tensor

from engine import build
from offbeat.config.root import Config
from offbeat.config.train import OptimizerConfig
from offbeat.engine.forward import fingerprint_tensors
from offbeat.fleet.engine_group import EngineGroup
from offbeat.fleet.kinds import MAKERS
from offbeat.inference.client import EngineClient, EngineSession
from offbeat.model.changes_io import smaller_changes, write_changes
from offbeat.model.hf_io import write_safetensors
from offbeat.model.load import load_causal_lm
from offbeat.sync.weight_broadcast import Changes, WeightBroadcast
from offbeat.trainer.optim import build_optimizer
from offbeat.weights.protocol import Manifest
from offbeat.workers.local import LocalLauncher

CANARY = tuple(range(3, 19))
TIMEOUT_S = 120.0
EVERY = 3
"""Versions from one that is whole to the next."""


@dataclass(frozen=True)
class Publish:
    """One publish: bytes that the server had to get, and seconds."""

    num_bytes: int
    stage_s: float
    switch_s: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="", help="a model folder (default: SmolLM2, or the 27M of random weights where it is not there)")
    parser.add_argument("--rate", type=float, default=3e-6, help="learning rate (default: 3e-6)")
    parser.add_argument("--rounds", type=int, default=4, help="of three versions each; the first is the warm-up (default: 4)")
    parser.add_argument("--channels", nargs="+", choices=["disk", "collective"], default=["disk", "collective"])
    options = parser.parse_args()
    model = options.model or str(SMOLLM2 if SMOLLM2.exists() else build("27M"))
    with tempfile.TemporaryDirectory(dir="/dev/shm") as work:
        asyncio.run(measure(model, Path(work), options.channels, rate=options.rate, num_rounds=options.rounds))


async def measure(folder: str, work: Path, channels: list[str], *, rate: float, num_rounds: int) -> None:
    """One server, which gets versions by each channel in turns."""
    WORK.mkdir(parents=True, exist_ok=True)
    config = Config.model_validate({
        "model": {"path": folder, "dtype": "bfloat16"}, "weights": {"whole_every_versions": EVERY},
        "inference": {"engine": "vllm", "python": str(ROOT / ".venv-vllm" / "bin" / "python"), "threads": 1}})
    async with LocalLauncher(stop_timeout_s=5) as launcher, EngineSession() as http:
        group = await EngineGroup.start(launcher, config.for_engines, log_dir=WORK)
        served = await group.serve(model=folder, tokenizer=folder, version=-1)
        ((name, url),) = served.urls.items()
        dialect = MAKERS[config.inference.engine].dialect(config.for_engines, folder)
        client = EngineClient(name, url, http.session, dialect=dialect, api_key=served.key)
        found: dict[tuple[str, str], list[Publish]] = {}
        for number, state in enumerate(learning(folder, rate)):
            channel, kind = channels[number // EVERY % len(channels)], "changes" if number % EVERY else "whole"
            if number == EVERY * len(channels) * num_rounds:
                break
            if kind == "whole":
                since, base = None, Path()
                for old in work.iterdir():  # no later version builds on them
                    shutil.rmtree(old)
            version = work / f"v{number}"
            one = await publish(client, channel, number + 1, version, state, since=since, base=base, config_from=folder)
            since, base = state, version
            note(f"{channel}, {kind}: {one.num_bytes / 1e6:.1f} MB, staged in {one.stage_s:.2f} s, switched in {one.switch_s:.2f} s")
            if number >= EVERY * len(channels):
                found.setdefault((channel, kind), []).append(one)
    for (channel, kind), publishes in found.items():
        print(json.dumps({
            "benchmark": "delta_vllm", "model": Path(folder).name, "lr": rate, "channel": channel, "kind": kind,
            "bytes": int(statistics.median(one.num_bytes for one in publishes)),
            "stage_s": round(min(one.stage_s for one in publishes), 3),
            "switch_s": round(min(one.switch_s for one in publishes), 3)}), flush=True)


def learning(folder: str, rate: float) -> Iterator[dict[str, Tensor]]:
    """The weights after every step."""
    model = load_causal_lm(folder, attention="sdpa")
    between_numbers(model)
    optimizer, config = build_optimizer(model), OptimizerConfig(lr=rate, schedule="constant", warmup_steps=0)
    for step, tokens in enumerate(batches(folder, 128, vocab_size=model.config.vocab_size)):
        train(model, optimizer, tokens, config, step)
        yield published(model)


async def publish(
    client: EngineClient, channel: str, number: int, folder: Path, state: dict[str, Tensor], *, since: dict[str, Tensor] | None, base: Path,
    config_from: str,
) -> Publish:
    """Publish a version, whole or as changes, and prove it."""
    fingerprint, offer = fingerprint_tensors(state), None
    changes = None if since is None else smaller_changes(state, since=since)
    if channel == "collective":
        offer = WeightBroadcast(
            state, host="127.0.0.1", num_receivers=1, timeout_s=TIMEOUT_S, write_folder=lambda _state: None,
            changes=None if changes is None else Changes(str(base), changes))
    elif since is None:
        write_safetensors(state, folder, config_from=config_from)
    else:
        write_changes(state, folder, since=since, base=base)
    manifest = Manifest(number, str(folder), fingerprint, CANARY, (), "" if offer is None else offer.address)
    start = time.perf_counter()
    await client.stage(manifest, timeout_s=TIMEOUT_S)
    staged = time.perf_counter()
    await client.switch(manifest, interrupt="recompute", timeout_s=TIMEOUT_S)
    switched = time.perf_counter()
    if offer is not None:
        offer.close()
    proof = await client.prove(CANARY, timeout_s=TIMEOUT_S)
    assert (proof.version, proof.fingerprint) == (number, fingerprint), "another version is served"
    size = sum(tensor.nbytes for tensor in (state if changes is None else changes).values())
    return Publish(size, staged - start, switched - staged)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
