"""`offbeat eval`: engines that serve a model as it is, rewards, and one evaluation of each set; nothing is trained."""

from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

from offbeat.aio import both, run_beside, run_interruptible
from offbeat.config.root import Config
from offbeat.controller.evaluate import Evaluation, make_evaluators
from offbeat.controller.inputs import read_inputs
from offbeat.controller.parts import SingleProcess
from offbeat.data.dataset import PromptStream
from offbeat.errors import ConfigError
from offbeat.fleet.engine_group import EngineGroup
from offbeat.fleet.fleet import UNPUBLISHED, open_fleet
from offbeat.inference.client import EngineClient
from offbeat.runs.devices import choose_devices, usable_devices
from offbeat.runs.rollouts import EngineRollouts, open_user_code
from offbeat.runs.threads import choose_threads, usable_cores
from offbeat.telemetry.console import Console
from offbeat.telemetry.record import RunRecord
from offbeat.types import Version
from offbeat.workers.worker import make_launcher


def evaluate_model(config: Config, console: Console) -> list[Evaluation]:
    """`offbeat eval`: start engines on `model.path`, evaluate, stop them. Logs go to a run folder of their own, `NAME-eval`.

    Returns:
        That of the held-out prompts, if there are some, and that of each evaluation set.

    Raises:
        ConfigError: there is no model, or nothing is held out.
    """
    if config.run.mode != "controller":
        raise ConfigError(f"run.mode must be 'controller' for an evaluation, which is one process, got {config.run.mode!r}; leave it out")
    if not config.data.heldout_size and not config.evaluate.sets:
        raise ConfigError("data.heldout_size is 0, so there is nothing to evaluate on; set it to the number of held-out prompts")
    run_dir = config.run_dir.with_name(f"{config.run.name}-eval")
    with RunRecord(run_dir, trace=False, console=console) as record:
        return run_interruptible(_evaluate_model(config, record))


async def _evaluate_model(config: Config, record: RunRecord) -> list[Evaluation]:
    async with open_rollouts(config, record) as (source, watch):
        rollouts = source.rollouts(PromptStream(source.inputs.train, seed=0), version=0, last_version=0)
        evaluators = make_evaluators(rollouts, source, source.inputs, config, SingleProcess())

        async def run_all() -> list[Evaluation]:
            return [await evaluator.run() for evaluator in evaluators if evaluator.due(0, last=True)]

        return await run_beside(run_all(), watch())


@asynccontextmanager
async def open_rollouts(config: Config, record: RunRecord) -> AsyncIterator[tuple[EngineRollouts, Callable[[], Coroutine[Any, Any, None]]]]:
    """Start engines that serve `model.path` as it is, and rewards, to evaluate without training; also yields the watch over the engines.

    Raises:
        ConfigError: `model.path` is empty.
    """
    if not config.model.path:
        raise ConfigError("model.path is empty, so there is no model to evaluate; give a folder or hub id, such as runs/quickstart/export")
    config = choose_devices(config, devices=usable_devices(), trains=False)
    config = choose_threads(config, cores=usable_cores(), trains=False)
    inputs = read_inputs(config, trains=False)
    async with AsyncExitStack() as stack:
        launcher = await stack.enter_async_context(make_launcher(config))
        engines, user_code = await both(
            EngineGroup.start(launcher, config, log_dir=record.log_dir), open_user_code(stack, inputs, config, record, launcher=launcher))
        addresses = await engines.serve(model=inputs.model, tokenizer=inputs.tokenizer_folder, version=UNPUBLISHED)
        fleet = await open_fleet(stack, engines, addresses, config, record, model=inputs.model)

        async def version_of(engine: EngineClient) -> Version:
            """Return the version served: that of the initial weights, or of those that another run left in an engine by URL."""
            return (await engine.health(timeout_s=config.inference.probe_timeout_s)).get("version", UNPUBLISHED)

        for name in fleet.pool.states:
            fleet.pool.admit(name, await version_of(fleet.pool.client(name)))
        yield EngineRollouts(config, record, inputs, fleet.dispatcher.generate, user_code), partial(fleet.watch, version_of)
