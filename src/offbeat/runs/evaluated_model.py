"""Finds the models of `offbeat eval`: a model folder or hub id, a LoRA adapter with its base, a run's export, or a URL. Torch-free."""

import json
from dataclasses import dataclass
from pathlib import Path

from offbeat.config.root import Config
from offbeat.errors import ConfigError, ModelError

KEY_ENV = "OFFBEAT_API_KEY"
"""Environment variable with the key of endpoints, unless another one is named."""

_URLS = ("http://", "https://")
_ADAPTER_CONFIG, _MODEL_CONFIG, _RUN_CONFIG = "adapter_config.json", "config.json", "config.toml"


@dataclass(frozen=True)
class EvaluatedModel:
    """A model to evaluate.

    Attributes:
        name: name as given, for example "runs/quickstart" or "http://localhost:8001/v1#qwen".
        folder: folder or hub id of whole weights, for an adapter of its base's; "" for an endpoint.
        adapter: folder of a LoRA adapter in PEFT's format; "" for none.
        url: base URL of an OpenAI-style endpoint; "" for none.
        served: the endpoint's name of the model; "" takes the only one that it has.
    """

    name: str
    folder: str = ""
    adapter: str = ""
    rank: int = 0
    url: str = ""
    served: str = ""


def is_run(path: Path) -> bool:
    """Whether a folder belongs to a run."""
    return (path / _RUN_CONFIG).is_file()


def run_config(path: Path) -> Path:
    """Return the file with a run's configuration."""
    return path / _RUN_CONFIG


def find_models(names: tuple[str, ...], config: Config, *, checkpoint: str = "") -> list[EvaluatedModel]:
    """Return the models that a person names; without any, the one at `model.path`.

    `checkpoint` is an export of a run, as in `run_export`; "" is the last.

    Raises:
        ConfigError: a model is named twice, or a checkpoint is given and none of the models is a run.
        ModelError: a run has no such export, or an adapter names no base.
    """
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigError(f"the model {twice!r} is named twice; name each model once")
    if checkpoint and not any(is_run(Path(name)) for name in names):
        raise ConfigError(f"--checkpoint {checkpoint} is for runs, and none of the models is a run's folder; leave it out, or name a run")
    if not names:
        return [EvaluatedModel(config.model.path, config.model.path)]
    return [_find(name, config, checkpoint or "last") for name in names]


def _find(name: str, config: Config, checkpoint: str) -> EvaluatedModel:
    if name.startswith(_URLS):
        url, _, served = name.partition("#")
        return EvaluatedModel(name, url=url, served=served)
    path = Path(name)
    if (path / _ADAPTER_CONFIG).is_file() and not (path / _MODEL_CONFIG).is_file():
        return _adapter(path, config)
    return EvaluatedModel(name, str(run_export(path, checkpoint)) if is_run(path) else name)


def _adapter(path: Path, config: Config) -> EvaluatedModel:
    file = path / _ADAPTER_CONFIG
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
        base, rank = settings.get("base_model_name_or_path") or "", int(settings["r"])
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as exc:
        raise ModelError(f"{file} cannot be read as the configuration of a LoRA adapter: {exc!r}; give a folder that PEFT wrote") from exc
    if not (folder := config.model.path or base):
        raise ModelError(f"{file} does not name the base model of the adapter; give it as --model.path")
    return EvaluatedModel(str(path), folder, adapter=str(path.resolve()), rank=rank)


def run_export(run_dir: Path, checkpoint: str) -> Path:
    """Return the folder of a run's export: "last", "best", or the number of a step; e.g. "50" is `exports/step-00000050`.

    Raises:
        ConfigError: it is none of these.
        ModelError: the run has no such export.
    """
    if checkpoint in ("last", "best"):
        folder = run_dir / {"last": "export", "best": "best"}[checkpoint]
    elif checkpoint.isascii() and checkpoint.isdecimal():
        folder = run_dir / "exports" / f"step-{int(checkpoint):08d}"
    else:
        raise ConfigError(f"--checkpoint must be last, best or the number of a step, got {checkpoint!r}")
    if not (folder / _MODEL_CONFIG).is_file():
        known = {"last": run_dir / "export", "best": run_dir / "best"} | {
            str(int(each.name.removeprefix("step-"))): each for each in sorted((run_dir / "exports").glob("step-*"))}
        there = ", ".join(name for name, each in known.items() if (each / _MODEL_CONFIG).is_file())
        raise ModelError(
            f"the run {run_dir} has no export {checkpoint!r}, which would be in {folder}; "
            + (f"--checkpoint can be {there}" if there else "a run writes one at its end (checkpoint.export), or in between"
               " (checkpoint.export_every_steps, evaluate.keep_best)"))
    return folder
