"""The `local` launcher: workers are child processes of this one."""

import asyncio
import os
from typing import Self

from offbeat.config.root import Config
from offbeat.errors import ConfigError
from offbeat.process.child import Child, ChildSpec
from offbeat.workers.worker import FAILED_STOP_S, Worker, WorkerSpec


class LocalLauncher:
    """Starts processes on this machine. Accelerators are assigned by number, in the order of starting, and kept across restarts."""

    def __init__(self, *, stop_timeout_s: float, devices_taken: int = 0, visible_devices_variable: str = "CUDA_VISIBLE_DEVICES") -> None:
        self._stop_timeout_s = stop_timeout_s
        self._visible_devices_variable = visible_devices_variable
        self._children: list[Child] = []
        self._next_device = devices_taken
        self._devices: dict[str, list[str]] = {}

    @classmethod
    def from_config(cls, config: Config, *, devices_taken: int = 0) -> Self:
        return cls(stop_timeout_s=config.cluster.stop_timeout_s, devices_taken=devices_taken)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, error: object, *_: object) -> None:
        timeout_s = min(self._stop_timeout_s, FAILED_STOP_S) if error else self._stop_timeout_s
        await asyncio.gather(*(child.stop(timeout_s=timeout_s) for child in self._children))

    async def start(self, spec: WorkerSpec, *, timeout_s: float) -> Worker:
        """Start a worker; see `Launcher.start`."""
        env = spec.environment
        if spec.num_devices:
            if spec.name not in self._devices:
                self._devices[spec.name] = self._deal(spec.num_devices)
            env[self._visible_devices_variable] = ",".join(self._devices[spec.name])
        child = await Child.start(ChildSpec(spec.name, spec.target, env, spec.log), timeout_s=timeout_s)
        self._children.append(child)
        return child

    def _deal(self, count: int) -> list[str]:
        first = self._next_device
        self._next_device += count
        given = os.environ.get(self._visible_devices_variable)
        if given is None:
            return [str(device) for device in range(first, first + count)]
        devices = [name for name in given.split(",") if name]
        if first + count > len(devices):
            raise ConfigError(
                f"the workers need {first + count} or more devices, but {self._visible_devices_variable} = {given!r} shows {len(devices)};"
                " lower cluster.devices_per_worker, train.num_ranks or inference.num_engines")
        return devices[first : first + count]
