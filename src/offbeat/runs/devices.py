"""Chooses the accelerators of each process of a run, where the configuration leaves that open. Torch-free.

Called once, before threads are chosen and anything is started, so that a run's own `config.toml` states the choice.
"""

from offbeat.config.for_processes import PlanConfig
from offbeat.errors import ConfigError
from offbeat.machine import VISIBLE_DEVICES, torch_is_for_cpus, visible_devices
from offbeat.runs.rank_info import RankInfo

_CONTROLLER = RankInfo()


def choose_devices(
    config: PlanConfig, *, devices: int, num_judges: int = 0, rank_info: RankInfo = _CONTROLLER, trains: bool = True, serves: bool = True,
) -> PlanConfig:
    """Return the sections with numbers in place of a `train.devices_per_rank` or `inference.devices_per_engine` of 0.

    Every process gets one device if there are enough for all; where the numbers of both are open, engines share the devices of the ranks
    if there are at least enough for the ranks. Otherwise, open numbers stay 0, the CPU. For example, 2 ranks and 2 engines get one each of
    4 devices, share 2, and compute on the CPU with 1. On a Ray cluster, whose devices this machine does not show, the numbers stay.

    In SPMD mode each machine decides for itself and only the first has engines, so ranks take devices wherever there are some: all ranks
    have to compute on the same kind.

    Args:
        devices: number of devices that this process may use.
        num_judges: number of reward models that the run starts on this machine; each takes a device.

    Raises:
        ConfigError: torchrun has started more ranks on this machine than it shows devices, or ranks and engines need more.
    """
    spmd, cluster = config.run.mode == "spmd", config.cluster
    if not devices or (cluster.launcher == "ray" and cluster.ray_address):
        return config
    train, inference = config.train, config.inference
    num_ranks = (rank_info.local_world if spmd else train.num_ranks) if trains else 0
    on_devices = (serves and rank_info.is_on_first_machine and not inference.urls and (inference.form is None or inference.form.on_devices))
    num_engines = inference.num_engines if on_devices else 0
    if spmd and num_ranks > devices:
        raise ConfigError(
            f"torchrun started {num_ranks} ranks on a machine that shows {_count(devices)}, and each rank needs its own; start as many with"
            f" --nproc-per-node, or set {VISIBLE_DEVICES}= (empty) to compute on the CPU")
    open_ranks, open_engines = num_ranks and not train.devices_per_rank, num_engines and not inference.devices_per_engine
    engine_devices = inference.devices_per_engine or 1
    wanted = num_ranks + num_engines * engine_devices + num_judges
    shares = cluster.devices_are_shared or (
        wanted > devices and cluster.launcher == "local" and not train.devices_per_rank and not inference.devices_per_engine)
    if (max(num_ranks, engine_devices) if shares else wanted) > devices:
        if spmd and num_ranks:
            raise ConfigError(
                f"{num_ranks} ranks, {num_engines} engines of {_count(engine_devices)} and {num_judges} reward models need"
                f" {_count(wanted)}, and the machine of rank {rank_info.rank} shows {devices}; set cluster.share_devices, or lower"
                " --nproc-per-node or inference.num_engines")
        return config
    updates: dict[str, object] = {}
    if open_ranks:
        updates["train"] = train.model_copy(update={"devices_per_rank": 1})
    if open_engines:
        updates["inference"] = inference.model_copy(update={"devices_per_engine": 1})
    if shares:
        updates["cluster"] = cluster.model_copy(update={"share_devices": True})
    return config.model_copy(update=updates)


def usable_devices() -> int:
    """Return the number of devices that processes of this machine can compute on; 0 also where torch was built for CPUs."""
    return 0 if torch_is_for_cpus() else len(visible_devices())


def describe_devices(config: PlanConfig, *, devices: int) -> str:
    """Return, for example, "devices: 1 device for each train rank, the CPU for each engine, of 2 that are visible"; "" without devices."""
    if not devices:
        return ""
    users = (("train rank", config.train.devices_per_rank), ("engine", config.inference.devices_per_engine))
    held = ", ".join(f"{_count(count) if count else 'the CPU'} for each {user}" for user, count in users)
    return f"devices: {held}, of {devices} that are visible{', shared' if config.cluster.devices_are_shared else ''}"


def _count(devices: int) -> str:
    return f"{devices} device{'' if devices == 1 else 's'}"
