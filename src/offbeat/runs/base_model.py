"""A base model for an adapter that would otherwise be trained on random weights.

An adapter cannot teach a model its first words, because embeddings and head stay as they are. So the warm-up of such a run trains a whole
model first, as a run of its own.
"""

from collections.abc import Callable

from offbeat.config.root import Config
from offbeat.controller.checkpoints import TRAINING, index_of


def needs_base(config: Config) -> bool:
    """Whether the warm-up has to make the adapter's base model."""
    return bool(config.run.warm_up and config.model.lora.rank and not config.model.path)


def base_config(config: Config) -> Config:
    """Return the configuration of the run that makes the base: the same supervised fine-tuning of the whole model, as `NAME-base`."""
    run = config.run.model_copy(update={"name": f"{config.run.name}-base"})
    model = config.model.model_copy(update={"lora": config.model.lora.model_copy(update={"rank": 0}), "quantization": "none"})
    return config.model_copy(update={"run": run, "model": model})


def on_base(config: Config, make: Callable[[Config], object], *, fresh: bool) -> Config:
    """Return the configuration of this run on its base, which `make` trains and exports unless this run goes on from a checkpoint."""
    base = base_config(config)
    export = base.run_dir / "export"
    goes_on = not fresh and index_of(config.run_dir, TRAINING).newest() is not None
    if not (goes_on and (export / "config.json").exists()):
        make(base)
    model = config.model.model_copy(update={"path": str(export), "tokenizer": ""})
    return config.model_copy(update={"model": model, "run": config.run.model_copy(update={"warm_up": False})})
