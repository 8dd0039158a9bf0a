"""Each kind of Ray's errors becomes one sentence with what to do; the tests of real clusters are in `test_ray.py`."""

import asyncio
from typing import Any

import pytest
from ray import exceptions as ray_errors

from offbeat.errors import ConfigError, DeadlineError, DeathError, OffbeatError, WorkerError
from offbeat.workers.ray import RayLauncher, RayWorker
from offbeat.workers.worker import WorkerSpec

KINDS: list[tuple[Exception, type[OffbeatError], str]] = [
    (ray_errors.ActorDiedError(), DeathError, "rank 0 died with its Ray actor in train_step: "),
    (ray_errors.WorkerCrashedError("killed"), DeathError, "rank 0 died with its Ray actor in train_step: "),
    (ray_errors.ActorUnavailableError("no route to host", None), DeathError, "rank 0 cannot be reached in train_step, because the"),
    (ray_errors.OutOfMemoryError("1 worker\nwas killed"), DeathError, "rank 0 was ended by Ray in train_step, because its machine"),
    (ray_errors.LocalRayletDiedError(), DeathError, "rank 0 died in train_step, with Ray on its machine; look at `ray status`"),
    (ray_errors.OwnerDiedError("0" * 56, None, ""), DeathError, "rank 0 cannot be heard in train_step, because its message was lost"),
    (ray_errors.ObjectStoreFullError("full"), WorkerError, "a message from or to rank 0 does not fit into Ray's object store"),
    (ray_errors.OutOfDiskError("full"), WorkerError, "a message from or to rank 0 cannot be held by Ray in train_step, because the disk"),
    (ray_errors.RuntimeEnvSetupError("no such package"), ConfigError, "rank 0 cannot start, because Ray cannot set up its runtime"),
    (ray_errors.ActorUnschedulableError("no node"), WorkerError, "rank 0 has no room any more on the Ray cluster in train_step;"),
    (ray_errors.GetTimeoutError("5 s"), DeadlineError, "Ray did not bring the answer of rank 0 in train_step in time: 5 s"),
    (ray_errors.RaySystemError(RuntimeError("lost")), WorkerError, "the Ray cluster does not answer while rank 0 is called in train_step;"),
    (ray_errors.RpcError("connection refused"), WorkerError, "the Ray cluster does not answer while rank 0 is called in train_step;"),
    (ConnectionError("connection lost"), WorkerError, "the Ray cluster does not answer while rank 0 is called in train_step;"),
]


class Raising:
    """An actor whose methods raise what Ray raises for it."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __getattr__(self, _name: str) -> Any:
        return self

    async def remote(self, *_: object) -> object:
        raise self._error


@pytest.mark.parametrize(("error", "kind", "text"), KINDS, ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "")
def test_errors_of_ray_are_told_in_a_sentence(error: Exception, kind: type[OffbeatError], text: str) -> None:
    worker = RayWorker(WorkerSpec("rank 0", "a:B", None), Raising(error))
    with pytest.raises(OffbeatError) as found:
        asyncio.run(worker.call("train_step", timeout_s=1))
    assert type(found.value) is kind and str(found.value).startswith(text)
    assert "\n" not in str(found.value) and found.value.__cause__ is error
    assert worker.alive is (kind is not DeathError)


def test_a_cluster_that_does_not_take_the_run_is_named_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_options: object) -> None:
        raise RuntimeError("Version mismatch: The cluster was started with:\n    Ray: 2.9.0\n    Python: 3.9.1")

    async def enter() -> None:
        async with RayLauncher(address="head:6379", num_cpus=1, start_timeout_s=5, stop_timeout_s=1):
            pass

    monkeypatch.setattr("ray.init", refuse)
    with pytest.raises(ConfigError, match="at cluster.ray_address = 'head:6379' does not take this run: Version mismatch: .* Ray: 2"):
        asyncio.run(enter())
