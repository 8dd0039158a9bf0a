"""Starts the engines of a run beside its ranks, so that all load the model at once. Called by the modes' own openings. Torch-free."""

import asyncio
from pathlib import Path

from offbeat.config.for_processes import EngineConfig
from offbeat.fleet.engine_group import EngineAddresses, EngineGroup
from offbeat.fleet.fleet import UNPUBLISHED
from offbeat.ranks.ranks import unseen_model
from offbeat.runs.shared_disk import apart
from offbeat.workers.worker import Launcher


async def start_engines(
    launcher: Launcher, config: EngineConfig, *, log_dir: Path, model: str, tokenizer: str, builds: bool, may_load: asyncio.Event,
) -> tuple[EngineGroup, EngineAddresses]:
    """Start the engines, and have them load `model` with the tokenizer of a folder once the start of the ranks sets `may_load`.

    Raises:
        ConfigError: the model is made where an engine does not see it.
    """
    engines = await EngineGroup.start(launcher, config, log_dir=log_dir)
    if builds and (far := apart(engines.workers)):
        raise unseen_model(config.run_dir, far)
    await may_load.wait()  # the start of the ranks has deadlines, and if it fails, this is cancelled
    return engines, await engines.serve(model=model, tokenizer=tokenizer, version=UNPUBLISHED)
