"""What a run does about workers on machines that do not see its folder: weights are broadcast to engines, and ranks are refused.

Called once all workers have started. Logs travel by themselves; see `Worker.shares_disk`. Torch-free.
"""

from collections.abc import Iterable, Sequence

from offbeat.config.root import Config
from offbeat.errors import ConfigError
from offbeat.workers.worker import Worker


def apart(workers: Iterable[Worker]) -> tuple[str, ...]:
    """Return the names of the workers that do not see the run's folder."""
    return tuple(worker.name for worker in workers if not worker.shares_disk)


def without_shared_disk(config: Config, *, ranks: Sequence[str], engines: Sequence[str]) -> Config:
    """Return the configuration under which these ranks and engines can work without seeing the run's folder.

    A `weights.dir` that the user gives is taken to be shared with the engines.

    Raises:
        ConfigError: they cannot.
    """
    if ranks:
        raise ConfigError(
            f"{_listed(ranks)} not see the run's folder {config.run_dir.absolute()}, into which all train ranks write checkpoints; give"
            " run.dir a folder on a disk that the controller and the machines of the ranks share (engines need none)")
    if not engines or config.weights.dir or config.weights.channel == "collective":
        return config
    if config.model.lora.rank or config.inference.engine == "sglang":
        what = "adapters, which engines read from folders" if config.model.lora.rank else "weights, which SGLang reads from folders"
        raise ConfigError(
            f"{_listed(engines)} not see the run's folder {config.run_dir.absolute()}, and the run publishes {what}; give weights.dir or"
            " run.dir a folder on a disk that the train ranks and the engines share")
    return config.model_copy(update={"weights": config.weights.model_copy(update={"channel": "collective"})})


def _listed(names: Sequence[str]) -> str:
    return f"{names[0]} does" if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]} do"
