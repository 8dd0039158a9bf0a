"""Starts the processes of ranks and lets them meet. Torch-free; used for the ranks of a policy and for those of many tenants."""

from collections.abc import Iterable
from pathlib import Path

from offbeat.aio import gather_all
from offbeat.cluster.group import FAILED_STOP_S, Launcher, Nothing, Worker, WorkerSpec, ask, ask_all
from offbeat.cluster.messages import BuildRequest, JoinRequest, StoreAddress
from offbeat.config.root import Config


async def start_ranks(
    launcher: Launcher, config: Config, target: str, *, model: str, build: BuildRequest | None, log_dir: Path,
) -> list[Worker]:
    """Start `train.num_ranks` workers and wait until they have met and loaded the model. Where that fails, none of them is left.

    Args:
        target: "module:Class" of a `RankWorker`.
        model: folder or hub id of the initial weights.
        build: how rank 0 makes them first; None where they are there.
    """
    timeout_s = config.cluster.start_timeout_s
    names = [f"rank {rank}" for rank in range(config.train.num_ranks)]
    specs = [
        WorkerSpec(
            name, target, log_dir / f"{name.replace(' ', '-')}.log", threads=config.train.threads,
            num_devices=config.cluster.devices_per_worker)
        for name in names]
    started: list[Worker] = []

    async def start(spec: WorkerSpec) -> Worker:
        started.append(worker := await launcher.start(spec, timeout_s=timeout_s))
        return worker

    try:
        workers = await gather_all(start(spec) for spec in specs)
        if build is not None:
            await ask(workers[0], "build_model", build, Nothing, timeout_s=timeout_s)
        store = await ask(workers[0], "host_store", StoreAddress(workers[0].host, 0), StoreAddress, timeout_s=timeout_s)
        text = config.model_dump_json()
        requests = [JoinRequest(rank, len(workers), store, text, model) for rank in range(len(workers))]
        patience_s = config.dist.init_timeout_s
        await ask_all(workers, "join", requests, Nothing, timeout_s=timeout_s + patience_s, patience_s=patience_s)
        await ask_all(
            workers, "load_model", [Nothing()] * len(workers), Nothing, timeout_s=timeout_s, patience_s=config.dist.sync_timeout_s)
    except BaseException:
        await end_ranks(started)
        raise
    return workers


async def end_ranks(workers: Iterable[Worker]) -> None:
    """End ranks that have failed, those that hang included."""
    await gather_all(worker.stop(timeout_s=FAILED_STOP_S) for worker in workers)
