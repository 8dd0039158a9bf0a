"""The `local` launcher: workers are child processes of this one."""

import asyncio
from typing import Self

from offbeat.cluster.group import Worker, WorkerSpec
from offbeat.config.root import Config
from offbeat.process import Child, ChildSpec


class LocalLauncher:
    """Starts processes on this machine. Accelerators are dealt out by number, in the order of starting."""

    def __init__(self, *, stop_timeout_s: float, visible_devices_variable: str = "CUDA_VISIBLE_DEVICES") -> None:
        self._stop_timeout_s = stop_timeout_s
        self._visible_devices_variable = visible_devices_variable
        self._children: list[Child] = []
        self._next_device = 0

    @classmethod
    def from_config(cls, config: Config) -> Self:
        return cls(stop_timeout_s=config.cluster.stop_timeout_s)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await asyncio.gather(*(child.stop(timeout_s=self._stop_timeout_s) for child in self._children))

    async def start(self, spec: WorkerSpec, *, timeout_s: float) -> Worker:
        """See `Launcher.start`."""
        env = spec.environment
        if spec.num_devices:
            devices = range(self._next_device, self._next_device + spec.num_devices)
            self._next_device += spec.num_devices
            env[self._visible_devices_variable] = ",".join(map(str, devices))
        child = await Child.start(ChildSpec(spec.name, spec.target, env, spec.log), timeout_s=timeout_s)
        self._children.append(child)
        return child
