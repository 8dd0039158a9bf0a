"""[cluster]: where worker processes run."""

from typing import Literal

from offbeat.config.base import Section, field


class ClusterConfig(Section):
    """The launcher of train workers and engines."""

    launcher: Literal["local", "ray"] = field("local", "Processes on this machine, or Ray actors on many.")
    ray_address: str = field("", "Address of a running Ray cluster; empty starts one on this machine.")
    devices_per_worker: int = field(0, "Accelerators for each train rank and each engine; 0 runs on the CPU.", ge=0)
    start_timeout_s: float = field(120.0, "Seconds for one worker to start.", gt=0)
    stop_timeout_s: float = field(10.0, "Seconds for a worker to stop by itself before it is killed.", gt=0)
