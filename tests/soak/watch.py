"""What a long soak leaves behind minute by minute: memory, file descriptors, disk, latencies, and how even the engines are used."""

import asyncio
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil

from offbeat.fleet.members import Member
from offbeat.runs.adapters import Adapters
from soak.ledger import Ledger

EVERY_S = 60.0


@dataclass(frozen=True)
class Row:
    """One minute of a sitting; memory is resident and shared with nothing, in MB (of the first sitting all that is resident).

    Attributes:
        sitting: number of the sitting, from 0.
        at_s: seconds since its begin.
        controller_mb, ranks_mb, lasting_mb: of the program itself, of all train ranks, and of the engine that is never killed.
        controller_fds, ranks_fds, lasting_fds: open file descriptors of the same.
        weights_mb, log_mb: size of the folder of published adapters, and of the events.
        samples, publishes: done in this minute.
        sample_p50_s, sample_p99_s, publish_p50_s: of these, in seconds.
        imbalance: tokens that the busiest engine was asked for, by the mean of all; 0 if an engine was out of service in this minute.
        complaints: of the sitting up to now.
    """

    sitting: int
    at_s: float
    controller_mb: float
    ranks_mb: float
    lasting_mb: float
    controller_fds: int
    ranks_fds: int
    lasting_fds: int
    weights_mb: float
    log_mb: float
    samples: int
    publishes: int
    sample_p50_s: float
    sample_p99_s: float
    publish_p50_s: float
    imbalance: float
    complaints: int


class Watch:
    """Makes the rows of a sitting; counts the tokens that each engine is asked for."""

    def __init__(self, adapters: Adapters, ledger: Ledger, *, folder: Path, sitting: int, lasting: str) -> None:
        """`folder` is the run's; `lasting` names the engine that is never killed."""
        self._adapters = adapters
        self._ledger = ledger
        self._folder = folder
        self._sitting = sitting
        self._lasting = lasting
        self._begun_s = time.monotonic()
        self._asked: Counter[str] = Counter()
        self._all_served = True
        self._carrying = adapters.fleet.pool.carrying
        adapters.fleet.pool.carrying = self._on_asked

    async def row(self) -> Row:
        """The minute that begins now."""
        self._asked.clear()
        self._all_served = True
        self._ledger.take_seconds()
        for _ in range(int(EVERY_S)):
            await asyncio.sleep(EVERY_S / int(EVERY_S))
            self._all_served &= len(self._adapters.fleet.pool.healthy) == len(self._adapters.fleet.pool.states)
        return await asyncio.to_thread(self._measure, self._ledger.take_seconds())

    def _measure(self, seconds: Mapping[str, Sequence[float]]) -> Row:
        engines = {worker.name: worker.pid for worker in self._adapters.fleet.engines.workers}
        own = psutil.Process()
        lasting = psutil.Process(engines[self._lasting])
        ranks = [child for child in own.children() if any("TrainWorker" in part for part in child.cmdline())]
        samples, publishes = seconds.get("sample", []), seconds.get("publish", [])
        asked = [self._asked[name] for name in engines]
        even = sum(asked) / len(asked)
        return Row(
            self._sitting, round(time.monotonic() - self._begun_s, 1), *(_megabytes(group) for group in ([own], ranks, [lasting])),
            *(sum(process.num_fds() for process in group) for group in ([own], ranks, [lasting])), _size_mb(self._folder / "weights"),
            _size_mb(self._folder / "events.jsonl"), len(samples), len(publishes), _percentile(samples, 50), _percentile(samples, 99),
            _percentile(publishes, 50), round(max(asked) / even, 3) if even and self._all_served else 0.0, self._ledger.num_complaints())

    @contextmanager
    def _on_asked(self, member: Member, cost: int) -> Iterator[None]:
        self._asked[member.client.name] += cost
        with self._carrying(member, cost):
            yield


def _megabytes(processes: Sequence[psutil.Process]) -> float:
    infos = [process.memory_info() for process in processes]
    return round(sum(info.rss - info.shared for info in infos) / 1e6, 2)


def _size_mb(path: Path) -> float:
    """Of a file, or of all files below a folder, some of which may go meanwhile."""
    files = [path] if path.is_file() else [Path(root) / name for root, _, names in os.walk(path) for name in names]
    return round(sum(file.stat().st_size for file in files if file.exists()) / 1e6, 3)


def _percentile(values: Sequence[float], share: float) -> float:
    return round(float(np.percentile(values, share)), 4) if values else 0.0
