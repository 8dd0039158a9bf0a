"""The engine of a replay that generates again: it takes each version of the weights that the ranks compute. Torch-free.

Called by `recorded_run`, which has started the ranks.
"""

import asyncio
from contextlib import AsyncExitStack

from offbeat.config.root import Config
from offbeat.controller.live_replay import LiveEngines
from offbeat.controller.parts import RunParts
from offbeat.errors import ConfigError
from offbeat.fleet.fleet import open_fleet
from offbeat.runs.assemble import open_policy
from offbeat.runs.engine_start import start_engines
from offbeat.workers.worker import Launcher


def check_live(config: Config) -> None:
    """Refuse, with a ConfigError that says why, a run whose answers cannot be generated again."""
    inference = config.inference
    if not inference.kind.goes_on or inference.urls:
        engines = "engines by URL" if inference.urls else f"inference.engine = '{inference.engine}'"
        raise ConfigError(f"--live is for runs of the embedded engine, which it starts again, and this one had {engines}; leave --live out")


async def open_live_engines(stack: AsyncExitStack, launcher: Launcher, parts: RunParts) -> LiveEngines:
    """Start one engine with the initial model."""
    config, record, inputs = parts.config, parts.record, parts.inputs
    may_load = asyncio.Event()
    may_load.set()
    engines, addresses = await start_engines(
        launcher, config.for_engines, log_dir=record.log_dir, model=inputs.model, tokenizer=inputs.tokenizer_folder,
        builds=inputs.build is not None, may_load=may_load)
    fleet = await open_fleet(stack, engines, addresses, config.for_engines, record, model=inputs.model)
    policy = await open_policy(stack, fleet, inputs, config, writer=parts.trainers)
    return LiveEngines(policy.publisher, policy.generate)
