"""The `local` launcher: workers are child processes of this one."""

import asyncio
import os
from collections.abc import Sequence
from typing import Self

from offbeat.config.for_processes import LauncherConfig
from offbeat.errors import ConfigError, DeadlineError
from offbeat.machine import VISIBLE_DEVICES, visible_devices
from offbeat.phase import phase
from offbeat.process.child import Child, ChildSpec
from offbeat.workers.worker import FAILED_STOP_S, Worker, WorkerSpec


class LocalLauncher:
    """Starts processes on this machine. Accelerators are dealt out in the order of starting, and kept across restarts.

    No two workers get the same one, unless they share devices: then, when all are dealt, the first is dealt again.
    """

    def __init__(self, *, stop_timeout_s: float, devices_taken: int = 0, share_devices: bool = False) -> None:
        self._stop_timeout_s = stop_timeout_s
        self._share_devices = share_devices
        self._children: list[Child] = []
        self._next_device = devices_taken
        self._devices: dict[str, list[str]] = {}

    @classmethod
    def from_config(cls, config: LauncherConfig, *, devices_taken: int = 0) -> Self:
        cluster = config.cluster
        return cls(stop_timeout_s=cluster.stop_timeout_s, devices_taken=devices_taken, share_devices=cluster.devices_are_shared)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, error: object, *_: object) -> None:
        timeout_s = min(self._stop_timeout_s, FAILED_STOP_S) if error else self._stop_timeout_s
        with phase("ending the processes"):
            await asyncio.gather(*(child.stop(timeout_s=timeout_s) for child in self._children))

    async def reserve(self, specs: Sequence[WorkerSpec], *, timeout_s: float) -> None:
        """Do nothing: every worker starts on this machine."""

    async def start(self, spec: WorkerSpec, *, timeout_s: float) -> Worker:
        env = spec.environment
        if spec.num_devices:
            if spec.name not in self._devices:
                self._devices[spec.name] = self._deal(spec.num_devices)
            env[VISIBLE_DEVICES] = ",".join(self._devices[spec.name])
        try:
            child = await Child.start(ChildSpec(spec.name, spec.target, env, spec.log), timeout_s=timeout_s)
        except DeadlineError as exc:
            exc.add_note("if the machine is busy, raise cluster.start_timeout_s, or inference.start_timeout_s for an engine")
            raise
        self._children.append(child)
        return child

    def _deal(self, count: int) -> list[str]:
        first = self._next_device
        self._next_device += count
        shown, given = visible_devices(), os.environ.get(VISIBLE_DEVICES)
        if not shown and given is None:  # of another make, perhaps; a worker that finds none says so
            return [str(device) for device in range(first, first + count)]
        if self._share_devices and count <= len(shown):
            return [shown[device % len(shown)] for device in range(first, first + count)]
        if first + count > len(shown):
            whose = f"{VISIBLE_DEVICES} = {given!r}" if given is not None else "this machine"
            raise ConfigError(
                f"the workers need {first + count} or more devices, but {whose} shows {len(shown)}; set cluster.share_devices, or lower"
                " inference.devices_per_engine, train.num_ranks or inference.num_engines")
        return shown[first : first + count]
