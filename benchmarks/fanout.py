"""Fan-out: adapters of 16 tenants to 4 embedded engines, all at once, and what serving so many costs.

Publishing: two rank processes meet in a gloo barrier after rank 0 has written 16 adapters. Ours fans out after that, all adapters to all
engines at once, through `AdapterPublisher`; the naive order is rank 0 bringing them to one engine after the other while rank 1 waits in the
barrier. Both load and prove the same adapters on the same engines, in turns. A publish lasts from the moment at which all 16 are written
until every engine serves it; ranks are held until the barrier is passed.

Fleet: the same requests of 64 tokens each through the same pool, 64 in flight, of 16 tenants and of one; and how evenly engines got them.

    python benchmarks/fanout.py [--quick] [--repeats 5] [--tenants 16] [--engines 4]
"""

import argparse
import asyncio
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed as dist
from measure import WORK, Contestant, answer_jobs, claim_stdout, contest, emit, take_turns

from engine import ONE_THREAD, build
from offbeat.config.dist import DistConfig
from offbeat.config.root import Config
from offbeat.fleet.engine_group import EngineGroup
from offbeat.fleet.fleet import Fleet, open_fleet
from offbeat.inference.client import EngineClient, EngineSession
from offbeat.inference.sampling import Sampling
from offbeat.model.load import load_causal_lm
from offbeat.model.peft_io import Adapter, write_adapter
from offbeat.sync.links import MeetingPlace
from offbeat.sync.mesh import connect_store, host_store, join, leave
from offbeat.telemetry.record import SilentRecord
from offbeat.weights.protocol import Manifest
from offbeat.workers.local import LocalLauncher

ORDERS = ("ours", "naive")
RANK = 16
CANARY = tuple(range(3, 19))
IN_FLIGHT = 64
NUM_TOKENS = 64
AIM_BALANCE = 1.1
AIM_THROUGHPUT = 0.9
TIMEOUT_S = 60.0
FOLDER = WORK / "fanout"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smoke run: two rounds, few requests")
    parser.add_argument("--repeats", type=int, default=5, help="rounds; the median counts (default: 5)")
    parser.add_argument("--tenants", type=int, default=16)
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--rank", nargs=3, metavar=("RANK", "PORT", "MODEL"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.rank:
        run_rank(int(args.rank[0]), int(args.rank[1]), args.rank[2])
        return
    repeats, num_requests = (2, 4 * IN_FLIGHT) if args.quick else (args.repeats, 12 * IN_FLIGHT)
    shutil.rmtree(FOLDER, ignore_errors=True)
    model, store = build("tiny"), host_store(TIMEOUT_S)
    ranks = [
        Contestant(f"rank-{rank}", [sys.executable, Path(__file__), "--rank", str(rank), str(store.port), model], env=ONE_THREAD)
        for rank in range(2)]
    with ThreadPoolExecutor(2) as threads, asyncio.Runner() as runner, serving(runner, str(model), args.engines) as served:
        with contest(ranks):
            list(threads.map(lambda rank: rank.ask({"do": "join"}), ranks))
            compare_publishing(Publishes(runner, served, ranks, threads, args.tenants), repeats=repeats)
        compare_serving(runner, served, num_tenants=args.tenants, num_requests=num_requests, repeats=repeats)


@contextmanager
def serving(runner: asyncio.Runner, model: str, num_engines: int) -> Iterator[Fleet]:
    """Engine processes in service, as a run has them."""
    config = Config.model_validate({
        "run": {"dir": str(WORK), "name": "fanout"}, "model": {"path": model, "lora": {"rank": RANK}},
        "inference": {"num_engines": num_engines, "max_adapters": 64, "threads": 1},
        "weights": {"proof_tolerance": 1e9}})  # there is no trainer to say what the canary scores; the fingerprint is proven

    async def start(stack: AsyncExitStack) -> Fleet:
        launcher = await stack.enter_async_context(LocalLauncher(stop_timeout_s=5))
        record = SilentRecord(config.run_dir)
        record.log_dir.mkdir(parents=True)
        group = await EngineGroup.start(launcher, config.for_engines, log_dir=record.log_dir)
        addresses = await group.serve(model=model, tokenizer=model, version=-1)
        return await open_fleet(stack, group, addresses, config.for_engines, record, model=model)

    stack = AsyncExitStack()
    try:
        yield runner.run(start(stack))
    finally:
        runner.run(stack.aclose())


# -- publishing ------------------------------------------------------------------------------------------------------------------------


class Publishes:
    """Rounds of publishing all tenants, in either order."""

    def __init__(
        self, runner: asyncio.Runner, served: Fleet, ranks: Sequence[Contestant], threads: ThreadPoolExecutor, num_tenants: int,
    ) -> None:
        self.seconds: dict[str, list[float]] = {order: [] for order in ORDERS}
        self._runner = runner
        self._served = served
        self._ranks = ranks
        self._threads = threads
        self._num_tenants = num_tenants

    def round(self, order: str, number: int) -> dict[str, float]:
        """Publish all tenants once."""
        pool = self._served.pool
        urls = {name: pool.client(name).url for name in pool.states}
        job = {"do": order, "round": number, "tenants": self._num_tenants, "urls": urls, "key": self._served.engines.key}
        first, last = (answer.values for answer in self._threads.map(lambda rank: rank.ask(job), self._ranks))
        tuples = [{name: tuple(m[name]) for name in ("canary", "canary_logprobs")} for m in first["manifests"]]
        manifests = [Manifest(**m | each) for m, each in zip(first["manifests"], tuples, strict=True)]
        if order == "ours":
            self.seconds[order] += self._runner.run(self._fan_out(manifests))
        else:
            self.seconds[order] += first["seconds"]
            self._runner.run(self._forget(manifests))
        return {"held_s": last["held_s"]}

    async def _fan_out(self, manifests: Sequence[Manifest]) -> list[float]:
        reports = await asyncio.gather(*(self._served.publisher.publish(manifest) for manifest in manifests))
        assert all(len(report.serving) == len(self._served.pool.states) for report in reports), "an engine is missing"
        return [report.total_s for report in reports]

    async def _forget(self, manifests: Sequence[Manifest]) -> None:
        for engine in self._served.pool.healthy.values():
            for manifest in manifests:
                await engine.unload_adapter(manifest.name, timeout_s=TIMEOUT_S)


def compare_publishing(publishes: Publishes, *, repeats: int) -> None:
    """Both orders."""
    for order in ORDERS:
        publishes.round(order, repeats)  # the warm-up
        publishes.seconds[order].clear()

    def side(order: str) -> Callable[[int], dict[str, float]]:
        return lambda number: publishes.round(order, repeats + 1 + number)

    held = take_turns({order: side(order) for order in ORDERS}, repeats=repeats, what="publish")
    for percent in (50, 95):
        ours, naive = (float(np.percentile(publishes.seconds[order], percent)) for order in ORDERS)
        emit("fanout", f"publish p{percent}, all at once vs one after the other", ours=ours, peer=naive, unit="s", less_is_better=True)
    emit("fanout", "ranks held while they write vs fan-out inside the barrier", ours=held["ours"]["held_s"],
         peer=held["naive"]["held_s"], unit="s", less_is_better=True)


def run_rank(rank: int, port: int, model: str) -> None:
    """A rank process: writes adapters if it is rank 0, and passes the barrier."""
    pipe = claim_stdout()
    adapters: list[Adapter] = []
    group = None

    def run(job: dict[str, Any]) -> dict[str, Any]:
        nonlocal group
        if job["do"] == "join":
            place = MeetingPlace(connect_store("127.0.0.1", port, timeout_s=TIMEOUT_S))
            group = join(rank=rank, world=2, place=place, config=DistConfig()).cpu_group
            return {}
        dist.barrier(group=group)  # noqa: TID251 - what we compare with
        start, manifests, seconds = time.perf_counter(), [], []
        if rank == 0:
            while len(adapters) < job["tenants"]:
                adapters.append(random_adapter(model, seed=len(adapters)))
            manifests = [write(adapter, i, job) for i, adapter in enumerate(adapters)]
            if job["do"] == "naive":
                seconds = asyncio.run(fan_out_in_turn(manifests, job["urls"], job["key"]))
        dist.barrier(group=group)  # noqa: TID251
        return {"held_s": time.perf_counter() - start, "manifests": [asdict(m) for m in manifests], "seconds": seconds}

    answer_jobs(pipe, run)
    leave()


def random_adapter(model: str, *, seed: int) -> Adapter:
    """Of all linear layers."""
    generator = torch.Generator().manual_seed(seed)
    linears = {
        name: module for name, module in load_causal_lm(model, attention="sdpa").named_modules()
        if isinstance(module, torch.nn.Linear) and name.endswith("_proj")}
    return Adapter(RANK, 1.0, {
        name: (torch.randn(RANK, m.in_features, generator=generator) * 0.1, torch.randn(m.out_features, RANK, generator=generator) * 0.1)
        for name, m in linears.items()})


def write(adapter: Adapter, index: int, job: dict[str, Any]) -> Manifest:
    """As a trainer does it."""
    tenant = f"{job['do']}-{index}"
    folder = FOLDER / tenant / f"v{job['round']:08d}"
    write_adapter(adapter, folder, base_model="tiny")
    return Manifest(
        job["round"], str(folder), adapter.fingerprint(), CANARY, (0.0,) * (len(CANARY) - 1), adapter=tenant, num_bytes=adapter.num_bytes)


async def fan_out_in_turn(manifests: Sequence[Manifest], urls: dict[str, str], key: str) -> list[float]:
    """Seconds from the start until each adapter is on every engine."""
    seconds, start = [], time.perf_counter()
    async with EngineSession() as http:
        clients = [EngineClient(name, url, http.session, api_key=key) for name, url in urls.items()]
        for manifest in manifests:
            for client in clients:
                await client.load_adapter(manifest.name, manifest.folder, timeout_s=TIMEOUT_S)
                proof = await client.prove(manifest.canary, adapter=manifest.name, timeout_s=TIMEOUT_S)
                assert proof.fingerprint == manifest.fingerprint, f"{client.name} serves something else"
            seconds.append(time.perf_counter() - start)
    return seconds


# -- serving ---------------------------------------------------------------------------------------------------------------------------


def compare_serving(runner: asyncio.Runner, served: Fleet, *, num_tenants: int, num_requests: int, repeats: int) -> None:
    """Many tenants against one."""
    counts = count_requests(served)

    def side(tenants: int) -> Callable[[int], dict[str, float]]:
        def run(number: int) -> dict[str, float]:
            counts.clear()
            cpu_s, start = engines_cpu_s(served), time.perf_counter()
            tokens = runner.run(load(served, tenants=tenants, num_requests=num_requests, seed=number))
            wall_s, cpu_s = time.perf_counter() - start, engines_cpu_s(served) - cpu_s
            assert counts.total() == num_requests, f"requests were repeated: {counts}"
            return {
                "tokens/s": tokens / wall_s, "tokens/CPU-s": tokens / cpu_s,
                "largest/mean": max(counts.values()) / (num_requests / len(served.pool.states))}

        return run

    for tenants in (1, num_tenants):
        runner.run(load(served, tenants=tenants, num_requests=IN_FLIGHT, seed=repeats))  # the warm-up
    medians = take_turns({"one tenant": side(1), f"{num_tenants} tenants": side(num_tenants)}, repeats=repeats, what="serving")
    one, many = medians.values()
    emit("fanout", f"requests per engine, largest over mean, {num_tenants} tenants, vs wanted", ours=many["largest/mean"], peer=AIM_BALANCE,
         unit="largest/mean", aim=1.0, less_is_better=True)
    for unit, aim in (("tokens/s", AIM_THROUGHPUT), ("tokens/CPU-s", None)):
        emit("fanout", f"{num_tenants} tenants vs one, {IN_FLIGHT} requests in flight", ours=many[unit], peer=one[unit], unit=unit, aim=aim)


def count_requests(served: Fleet) -> Counter[str]:
    """Requests that each engine gets from now."""
    counts: Counter[str] = Counter()

    def counted(client: EngineClient) -> None:
        generate = client.generate

        async def count(*args: Any, **kwargs: Any) -> Any:
            counts[client.name] += 1
            return await generate(*args, **kwargs)

        client.generate = count

    for name in served.pool.states:
        counted(served.pool.client(name))
    return counts


async def load(served: Fleet, *, tenants: int, num_requests: int, seed: int) -> int:
    """Tokens that were generated."""
    rng = np.random.default_rng(seed)
    waiting = [(f"ours-{i % tenants}", tuple(rng.integers(3, 49, 16).tolist())) for i in range(num_requests)]
    lengths: list[int] = []

    async def client() -> None:
        while waiting:
            tenant, prompt = waiting.pop()
            samples = await served.dispatcher.generate(
                prompt, Sampling(NUM_TOKENS, seed=len(waiting), ignore_eos=True), n=1, adapter=tenant)
            lengths.extend(len(sample.token_ids) for sample in samples)

    await asyncio.gather(*(client() for _ in range(IN_FLIGHT)))
    return sum(lengths)


def engines_cpu_s(served: Fleet) -> float:
    """CPU seconds of all engines so far."""
    times = [psutil.Process(worker.pid).cpu_times() for worker in served.engines.workers]
    return sum(each.user + each.system for each in times)


if __name__ == "__main__":
    main()
