"""Settings for workers on machines that do not see the run's folder: whole weights are broadcast, everything else travels.

Called once all workers have started. Logs, checkpoints, exports and adapters travel by themselves; see `Worker.disk`. Torch-free.
"""

from collections.abc import Iterable, Sequence

from offbeat.config.for_processes import EngineConfig
from offbeat.config.weights import WeightsConfig
from offbeat.ranks.ranks import unseen_model
from offbeat.telemetry.record import RunRecord
from offbeat.workers.worker import Worker


def apart(workers: Iterable[Worker]) -> tuple[str, ...]:
    """Return the names of the workers that do not see the run's folder."""
    return tuple(worker.name for worker in workers if worker.disk is not None)


def note_apart(record: RunRecord, apart: tuple[str, ...]) -> tuple[str, ...]:
    """Note the workers that do not see the run's folder, if any; returns their names, such as ("rank 1", "engine 0")."""
    if apart:
        who = f"{apart[0]} does" if len(apart) == 1 else f"{', '.join(apart[:-1])} and {apart[-1]} do"
        record.note("travels", f"{who} not see the run's folder, so files travel to and from their machines (cluster.scratch_dir)")
    return apart


def without_shared_disk(config: EngineConfig, *, apart: Sequence[str], builds: bool = False) -> WeightsConfig:
    """Return [weights] for a run whose ranks and engines `apart` do not see its folder.

    A `weights.dir` of the user counts as shared with all of them. Adapters, and weights for SGLang, stay in folders, which travel.

    `builds` says whether the model is made in the run's folder, which is refused with a ConfigError where workers are `apart`.
    """
    if apart and builds:
        raise unseen_model(config.run_dir, apart)
    by_folder = config.model.lora.rank or not config.inference.kind.takes_broadcasts or config.inference.urls or config.weights.dir
    if not apart or by_folder or config.weights.channel == "collective":
        return config.weights
    return config.weights.model_copy(update={"channel": "collective"})
