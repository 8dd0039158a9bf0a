"""Publishing: the pause that requests in flight see when an engine switches to new weights, and for how long a publish holds the loop.

16 streams from one engine over HTTP, each of requests with 32 tokens of prompt and 64 to 192 of answer. Every second or so a new version is
staged, switched to, and proven. The pause of a publish is the largest gap between two tokens of any stream from its start
to its end, less the median gap; "quiet" is the same over a second without a publish, so what else the machine does. Versions are folders in
/dev/shm or on disk. Requests go on with their cache recomputed under the new weights, or with the old one kept.

The second part has a trainer and an embedded engine as a run has them, bfloat16 and a learning rate of 3e-6, and publishes after every
step: whole weights and changes in turns, to folders in /dev/shm or by broadcast. The loop is held until `WeightsPublisher.publish` returns,
where the next step may begin beside the rest; earlier releases held it until engines served the version.

    python benchmarks/publish.py [--quick] [--models tiny 27M] [--engines embedded vllm] [--interrupts recompute keep] [--publishes 8]
                                 [--parts pauses loop] [--channels disk collective]

vLLM takes part where `.venv-vllm` is.
"""

import argparse
import asyncio
import itertools
import statistics
import tempfile
import time
from collections.abc import Iterable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import numpy as np
import torch
from measure import ROOT, WORK, emit, note

from engine import MODELS, build
from offbeat.aio import both
from offbeat.algorithms.objectives import policy_loss
from offbeat.config.algorithms import AlgorithmConfig
from offbeat.config.root import Config
from offbeat.data.batch import Batch, SharedPrompts
from offbeat.fleet.engine_group import EngineGroup
from offbeat.fleet.kinds import MAKERS
from offbeat.fleet.pool import EnginePool
from offbeat.fleet.publication import PublishReport
from offbeat.fleet.publishers import WeightsPublisher
from offbeat.inference.client import EngineClient, EngineSession
from offbeat.model.tiny import build_tiny
from offbeat.ranks.ranks import WorkerRanks
from offbeat.ranks.trainers import Trainers
from offbeat.weights.channels import Channel
from offbeat.weights.proof import ProofJudge
from offbeat.weights.protocol import Interrupt, Manifest
from offbeat.workers.local import LocalLauncher

AIM_S = 0.1
"""For the embedded engine and the tiny model."""
NUM_STREAMS, PROMPT_TOKENS, ANSWER_TOKENS = 16, 32, (64, 192)
CANARY = tuple(range(3, 19))
TIMEOUT_S = 120.0
QUIET_S = 1.0
VLLM_PYTHON = ROOT / ".venv-vllm" / "bin" / "python"


@dataclass(frozen=True)
class Gap:
    """Between two tokens of one stream: wall-clock seconds."""

    start_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smoke run: the tiny model in the embedded engine, three publishes")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--engines", nargs="+", choices=["embedded", "vllm"], default=["embedded", "vllm"])
    parser.add_argument("--interrupts", nargs="+", choices=["recompute", "keep"], default=["recompute", "keep"])
    parser.add_argument("--parts", nargs="+", choices=["pauses", "loop"], default=["pauses", "loop"])
    parser.add_argument("--channels", nargs="+", choices=["disk", "collective"], default=["disk", "collective"], help="of the second part")
    parser.add_argument("--publishes", type=int, default=8, help="of each kind (default: 8)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.quick:
        args.models, args.engines, args.interrupts, args.publishes = ["tiny"], ["embedded"], ["recompute"], 3
    if "vllm" in args.engines and not VLLM_PYTHON.exists():
        note(f"there is no {VLLM_PYTHON}, so vLLM does not take part")
        args.engines.remove("vllm")
    for model, channel in itertools.product(args.models, args.channels) if "loop" in args.parts else []:
        asyncio.run(measure_loop(model, channel, num_publishes=args.publishes))
    for model in args.models if "pauses" in args.parts else []:
        with tempfile.TemporaryDirectory(dir="/dev/shm") as shm, tempfile.TemporaryDirectory(dir=WORK) as disk:
            places = {"/dev/shm": versions(model, Path(shm)), "disk": versions(model, Path(disk))}
            for engine, interrupt in itertools.product(args.engines, args.interrupts):
                asyncio.run(measure(model, engine, interrupt, places, num_publishes=args.publishes))


def versions(model: str, folder: Path) -> list[Path]:
    """Two folders of weights to switch between."""
    tiny, vocab_size = MODELS[model]
    folders = [folder / "even", folder / "odd"]
    for seed, to in enumerate(folders):
        build_tiny(to, tiny=tiny, vocab_size=vocab_size, eos_token_id=0, pad_token_id=None, seed=seed)
    return folders


async def measure(model: str, engine: str, interrupt: Interrupt, places: dict[str, list[Path]], *, num_publishes: int) -> None:
    """One engine of one model, publishing from each place in turns."""
    folder = str(build(model))
    config = Config.model_validate({
        "model": {"path": folder}, "weights": {"interrupt": interrupt},
        "inference": {"engine": engine, "python": str(VLLM_PYTHON) if engine == "vllm" else "", "max_running": 64, "threads": 1}})
    pauses: dict[str, list[float]] = {place: [] for place in places}
    quiet: list[float] = []
    async with AsyncExitStack() as stack:
        launcher = await stack.enter_async_context(LocalLauncher(stop_timeout_s=5))
        group = await EngineGroup.start(launcher, config.for_engines, log_dir=WORK)
        ((name, url),) = (await group.serve(model=folder, tokenizer=folder, version=-1)).urls.items()
        http = await stack.enter_async_context(EngineSession())
        dialect = MAKERS[config.inference.engine].dialect(config.for_engines, folder)
        client = EngineClient(name, url, http.session, dialect=dialect, api_key=group.key)
        gaps: list[Gap] = []
        numbers = itertools.count(1)
        streams = [
            asyncio.create_task(stream(http.session, url, group.key, folder, gaps, vocab_size=MODELS[model][1], seed=seed))
            for seed in range(NUM_STREAMS)]
        await asyncio.sleep(2 * QUIET_S)  # the warm-up
        for number in range(num_publishes + 1):
            for place, folders in places.items():
                rested = time.perf_counter()
                await asyncio.sleep(QUIET_S)
                start = time.perf_counter()
                await publish(client, version=next(numbers), folder=folders[number % 2], interrupt=interrupt)
                end = time.perf_counter()
                await asyncio.sleep(QUIET_S / 2)
                if number:  # the first is the warm-up
                    quiet.append(largest(gaps, rested, start))
                    pauses[place].append(largest(gaps, start, end + QUIET_S / 4))
                    note(f"{model} {engine} {interrupt} {place}: {pauses[place][-1] * 1e3:.0f} ms, quiet {quiet[-1] * 1e3:.0f} ms, "
                         f"publish {end - start:.2f} s")
                gaps.clear()
        for task in streams:
            task.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
    report(f"{model} {engine} {interrupt}", pauses, quiet, aim=1.0 if (model, engine) == ("tiny", "embedded") else None)


def report(case: str, pauses: dict[str, list[float]], quiet: list[float], *, aim: float | None) -> None:
    """Against what is wanted, and against quiet stretches."""
    for place, seconds in pauses.items():
        p50, most = statistics.median(seconds), max(seconds)
        emit("publish", f"{case}, {place}: pause p50, vs wanted", ours=p50, peer=AIM_S, unit="s", aim=aim, less_is_better=True)
        emit("publish", f"{case}, {place}: largest pause, vs wanted", ours=most, peer=AIM_S, unit="s", aim=aim, less_is_better=True)
        emit("publish", f"{case}, {place}: pause p50, vs quiet", ours=p50, peer=statistics.median(quiet), unit="s", less_is_better=True)


@dataclass(frozen=True)
class Held:
    """One publish: seconds until the loop went on, seconds until the engine served it, and bytes that were written."""

    held_s: float
    served_s: float
    num_bytes: int


async def measure_loop(model: str, way: str, *, num_publishes: int) -> None:
    """Whole weights and changes in turns, after training steps."""
    folder, held = str(build(model)), {"whole weights": list[Held](), "changes": list[Held]()}
    with tempfile.TemporaryDirectory(dir="/dev/shm") as shm:
        config = Config.model_validate({
            "run": {"dir": shm, "name": "publish"}, "model": {"path": folder, "dtype": "bfloat16"}, "inference": {"threads": 1},
            "train": {"threads": 1, "optimizer": {"lr": 3e-6, "warmup_steps": 0}}, "weights": {"channel": way, "whole_every_versions": 2}})
        async with LocalLauncher(stop_timeout_s=5) as launcher, EngineSession() as http:
            ranks, group = await both(
                WorkerRanks.start(launcher, config.for_ranks, model=folder, build=None, log_dir=WORK),
                EngineGroup.start(launcher, config.for_engines, log_dir=WORK))
            ((name, url),) = (await group.serve(model=folder, tokenizer=folder, version=-1)).urls.items()
            pool, trainers = EnginePool([EngineClient(name, url, http.session, api_key=group.key)]), Trainers(ranks, config.for_ranks)
            channel = Channel(config.weights_dir, config.weights, canary=CANARY, incarnation="a", writer=trainers)
            async with WeightsPublisher(pool, channel, config.weights, judge=ProofJudge.of(0.0, "bfloat16")) as publisher:
                for version in range(2 * num_publishes + 2):
                    await trainers.train_step(train_batch(MODELS[model][1], seed=version))
                    start, reports = time.perf_counter(), list[PublishReport]()
                    await publisher.publish(version, on_served=reports.append)
                    held_s = time.perf_counter() - start
                    await publisher.settle()
                    one = Held(held_s, time.perf_counter() - start, reports[0].num_bytes)
                    what = "changes" if publisher.current is not None and publisher.current.base else "whole weights"
                    note(f"{model} {way} {what}: held {one.held_s:.3f} s, served after {one.served_s:.3f} s, {one.num_bytes / 1e6:.2f} MB")
                    if version > 1:  # the first of each way is the warm-up
                        held[what].append(one)
    report_loop(f"{model} {way}", **{what.replace(" ", "_"): each for what, each in held.items()})


def report_loop(model: str, *, whole_weights: list[Held], changes: list[Held]) -> None:
    """Against whole weights, and a loop that waits for engines."""
    def median(each: list[Held], name: str) -> float:
        return statistics.median(getattr(one, name) for one in each)

    waits = median(whole_weights, "served_s")
    for way, each in (("whole weights", whole_weights), ("changes", changes)):
        emit("publish", f"{model}: loop held, {way} beside training, vs whole weights until engines serve", ours=median(each, "held_s"),
             peer=waits, unit="s", less_is_better=True)
    emit("publish", f"{model}: until engines serve, changes vs whole weights", ours=median(changes, "served_s"), peer=waits, unit="s",
         less_is_better=True)
    emit("publish", f"{model}: written, changes vs whole weights", ours=median(changes, "num_bytes"),
         peer=median(whole_weights, "num_bytes"), unit="bytes", less_is_better=True)


def train_batch(vocab_size: int, *, seed: int) -> Batch:
    """Eight random answers of 32 tokens, with random advantages."""
    rng, lengths = np.random.default_rng(seed), [PROMPT_TOKENS + 32] * 8
    mask = np.tile(np.arange(PROMPT_TOKENS + 32) >= PROMPT_TOKENS, 8)
    return Batch.of_next_tokens(
        rng.integers(3, vocab_size, len(mask)), mask, lengths=lengths, columns={
            "rollout_logprobs": np.full(len(mask), -np.log(vocab_size)), "advantages": np.repeat(rng.standard_normal(8), lengths),
            "loss_weights": mask / mask.sum()},
        losses=(policy_loss(AlgorithmConfig()),), shared=SharedPrompts.none(8))


def largest(gaps: Iterable[Gap], start_s: float, end_s: float) -> float:
    """The largest gap in that time, less the median of all."""
    seconds = [gap.seconds for gap in gaps]
    return max(gap.seconds for gap in gaps if gap.end_s > start_s and gap.start_s < end_s) - statistics.median(seconds)


async def publish(client: EngineClient, *, version: int, folder: Path, interrupt: Interrupt) -> None:
    """As a publisher does it with one engine."""
    manifest = Manifest(version, str(folder), "", CANARY, ())
    await client.stage(manifest, timeout_s=TIMEOUT_S)
    await client.switch(manifest, interrupt=interrupt, timeout_s=TIMEOUT_S)
    proof = await client.prove(CANARY, timeout_s=TIMEOUT_S)
    assert proof.version == version, f"{client.name} serves version {proof.version}"


async def stream(
    session: aiohttp.ClientSession, url: str, key: str, model: str, gaps: list[Gap], *, vocab_size: int, seed: int,
) -> None:
    """One request after the other, until cancelled; adds the gaps between its events."""
    rng = np.random.default_rng(seed)
    while True:
        prompt = rng.integers(3, vocab_size, PROMPT_TOKENS).tolist()
        body = {"model": model, "prompt": prompt, "max_tokens": int(rng.integers(*ANSWER_TOKENS)), "ignore_eos": True, "stream": True}
        async with session.post(f"{url}/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"}) as response:
            assert response.status == 200, await response.text()
            last = None
            async for line in response.content:
                if line.startswith(b"data: {"):
                    now = time.perf_counter()
                    if last is not None:
                        gaps.append(Gap(last, now))
                    last = now


if __name__ == "__main__":
    main()
