"""`offbeat eval`: answers of models, with rewards and scores on each set, without training.

Models are evaluated one after the other. A model in a folder is served by engines that are started for it, and plays and samples as a run
does. An endpoint by URL only gets requests.
"""

import time
from collections.abc import AsyncIterator, Callable, Coroutine, Hashable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from offbeat.aio import both, run_beside, run_interruptible
from offbeat.config.root import Config
from offbeat.controller.evaluate import make_evaluators, score
from offbeat.controller.inputs import choose_canary, read_inputs
from offbeat.controller.parts import SingleProcess
from offbeat.controller.reward_choice import what_judges
from offbeat.controller.template_choice import choose_templates
from offbeat.data.stream import PromptStream
from offbeat.errors import ConfigError
from offbeat.evaluation.result import ModelResult, SetResult, write
from offbeat.evaluation.samples import EvaluatedSet
from offbeat.evaluation.scores import Evaluation
from offbeat.fleet.engine_group import EngineGroup
from offbeat.fleet.fleet import UNPUBLISHED, Fleet, open_engines
from offbeat.hosts import is_this_machine
from offbeat.inference.client import EngineClient, EngineSession
from offbeat.rollout.episode import Generate
from offbeat.rollout.metric import Metric, check_metrics
from offbeat.rollout.reward_pool import Rewards
from offbeat.runs.endpoint import AskedSet, ModelEndpoint, read_sets
from offbeat.runs.evaluated_model import KEY_ENV, EvaluatedModel, find_models
from offbeat.runs.plan import make_plan
from offbeat.runs.rollouts import EngineRollouts
from offbeat.runs.run_code import open_rewards, open_user_code
from offbeat.telemetry.console import Console
from offbeat.telemetry.evaluation_log import RESULT_NAME
from offbeat.telemetry.record import RunRecord
from offbeat.types import Version
from offbeat.weights.adapters import adapter_name
from offbeat.weights.channels import draw_incarnation
from offbeat.weights.protocol import Manifest
from offbeat.workers.worker import make_launcher


@dataclass(frozen=True)
class Progress:
    """Progress of an evaluation.

    Attributes:
        set: title of the set; "" while engines start.
        num_answered, num_prompts: prompts of the set that are scored, and all.
        accuracy: share of right answers to the scored prompts, for example 0.5.
    """

    model: str
    set: str = ""
    num_answered: int = 0
    num_prompts: int = 0
    accuracy: float = 0.0


OnProgress = Callable[[Progress], None]


def evaluate_models(
    config: Config, models: Sequence[str] = (), *, checkpoint: str = "", key_env: str = KEY_ENV, output: Path | None = None,
    on_progress: OnProgress = lambda _progress: None, console: Console | None = None,
) -> list[ModelResult]:
    """Evaluate models on the held-out prompts, if there are some, and on each evaluation set. Logs go to the folder `NAME-eval`.

    Args:
        models: each a model's folder or hub id, the folder of a LoRA adapter, a run's folder, or the URL of an OpenAI-style endpoint, with
            its name of the model after a '#' if it has several; without any, the model at `model.path`.
        checkpoint: the export of a run: "last", "best", or the number of a step, such as "50"; "" is the last.
        key_env: environment variable with the key of endpoints.
        output: JSON file for the scores, beside which the answers go; by default `evaluation.json` in `NAME-eval`.
        on_progress: called when engines start, and after each prompt.
        console: shows notes, such as of engines that fail; by default nothing.

    Raises:
        UserError: there is no model, nothing to evaluate on, or a model, its data or its code cannot be used.
        RunError: engines, endpoints or rewards failed.
        KeyboardInterrupt: it was interrupted.
    """
    if config.run.mode != "controller":
        raise ConfigError(f"run.mode must be 'controller' for an evaluation, which is one process, got {config.run.mode!r}; leave it out")
    if not config.data.heldout_size and not config.evaluate.sets:
        raise ConfigError("data.heldout_size is 0, so there is nothing to evaluate on; set it to the number of held-out prompts")
    found = find_models(tuple(models), config, checkpoint=checkpoint)
    run_dir = config.run_dir.with_name(f"{config.run.name}-eval")
    with RunRecord(run_dir, trace=False, console=console or Console("quiet")) as record:
        results: list[ModelResult] = []
        for model in found:
            on_progress(Progress(model.name))
            evaluate = _ask_endpoint(model, config, record, key_env, on_progress) if model.url else _evaluate(
                model, config, record, on_progress)
            results.append(ModelResult(model.name, tuple(run_interruptible(evaluate))))
            write(results, output or run_dir / RESULT_NAME)  # so that results stay if the next model fails or is interrupted
    return results


def evaluate_model(config: Config, console: Console) -> list[Evaluation]:
    """Evaluate the model at `model.path`; returns the scores on each set. Raises as `evaluate_models`."""
    [result] = evaluate_models(config, console=console)
    return result.evaluations


async def _evaluate(model: EvaluatedModel, config: Config, record: RunRecord, on_progress: OnProgress) -> list[SetResult]:
    async with open_rollouts(_configured(config, model), record, adapter=model.adapter) as (source, watch):
        rollouts = source.rollouts(PromptStream(source.inputs.train, seed=0), version=0, last_version=0)
        evaluators = make_evaluators(rollouts, source, source.inputs, source.config, SingleProcess(), log_dir=record.log_dir)

        async def run_all() -> list[SetResult]:
            results = []
            for evaluator in evaluators:
                if evaluator.due(0, last=True):
                    told = _Counter(model.name, evaluator.name, evaluator.num_prompts, on_progress)
                    played = await evaluator.play(told.count)
                    results.append(told.result(played, await evaluator.score(played)))
            return results

        return await run_beside(run_all(), watch())


async def _ask_endpoint(model: EvaluatedModel, config: Config, record: RunRecord, key_env: str, on_progress: OnProgress) -> list[SetResult]:
    asked = read_sets(config)
    async with AsyncExitStack() as stack:
        elsewhere = not is_this_machine(urlsplit(model.url).hostname or "")
        http = await stack.enter_async_context(EngineSession(through_proxies=elsewhere))
        endpoint = await ModelEndpoint.connect(http.session, model, key_env=key_env)
        await check_metrics([(of_set.config.evaluate, of_set.config.rollout) for of_set in asked], log_dir=record.log_dir)
        rewards = await _open_rewards(stack, asked, config, record)
        results = []
        for of_set in asked:
            told = _Counter(model.name, of_set.name, len(of_set.rows), on_progress)
            played = await endpoint.play(of_set, rewards[of_set.name], on_prompt=told.count)
            metric = Metric.of(of_set.config.evaluate, of_set.config.rollout, log_dir=record.log_dir)
            results.append(told.result(played, await score(played, metric)))
        return results


async def _open_rewards(stack: AsyncExitStack, asked: Sequence[AskedSet], config: Config, record: RunRecord) -> dict[str, Rewards]:
    """Start the rewards of each set, by its name; sets with equal rewards share them."""
    launcher = await stack.enter_async_context(make_launcher(config.planned(make_plan(config, trains=False).sections).for_launcher))
    opened: dict[Hashable, Rewards] = {}
    for of_set in asked:
        if (judges := what_judges(of_set.config)) not in opened:
            opened[judges] = await open_rewards(stack, of_set.rows[0], of_set.config, record, launcher=launcher, of_set=of_set.name)
    return {of_set.name: opened[what_judges(of_set.config)] for of_set in asked}


class _Counter:
    """Counts the scored prompts of one set, and reports the progress."""

    def __init__(self, model: str, name: str, num_prompts: int, on_progress: OnProgress) -> None:
        self._progress = Progress(model, name or "held-out", 0, num_prompts)
        self._tell = on_progress
        self._start = time.monotonic()
        self._num_answers = self._num_right = 0
        on_progress(self._progress)

    def count(self, num_right: int, num_answers: int) -> None:
        """Count one more prompt; without an answer it is wrong."""
        self._num_answers += max(num_answers, 1)
        self._num_right += num_right
        self._progress = replace(self._progress, num_answered=self._progress.num_answered + 1, accuracy=self._num_right / self._num_answers)
        self._tell(self._progress)

    def result(self, played: EvaluatedSet, scores: Evaluation) -> SetResult:
        """Return the set with its scores, and the seconds since the count began."""
        return SetResult(played, scores, time.monotonic() - self._start)


def _configured(config: Config, model: EvaluatedModel) -> Config:
    """Return the configuration that serves a model, whose engines must take an adapter of its rank."""
    chosen = {"path": model.folder}
    if not model.adapter:
        return config.model_copy(update={"model": config.model.model_copy(update=chosen)})
    lora = config.model.lora.model_copy(update={"rank": model.rank})
    inference = config.inference.model_copy(update={"max_adapter_rank": max(config.inference.max_adapter_rank, model.rank)})
    return config.model_copy(update={"model": config.model.model_copy(update=chosen | {"lora": lora}), "inference": inference})


@asynccontextmanager
async def open_rollouts(
    config: Config, record: RunRecord, *, adapter: str = "",
) -> AsyncIterator[tuple[EngineRollouts, Callable[[], Coroutine[Any, Any, None]]]]:
    """Start engines that serve `model.path`, and rewards, to evaluate without training; also yields the watch over the engines.

    `adapter` is the folder of a LoRA adapter to sample; "" for the model itself.

    Raises:
        ConfigError: `model.path` is empty.
    """
    if not config.model.path:
        raise ConfigError("model.path is empty, so there is no model to evaluate; give a folder or hub id, such as runs/quickstart/export")
    plan = make_plan(config, trains=False)
    plan.advise(record)
    config, templates = choose_templates(config.planned(plan.sections))
    for choice in templates:
        record.console.note(choice)
    inputs = read_inputs(config, trains=False)
    async with AsyncExitStack() as stack:
        launcher = await stack.enter_async_context(make_launcher(config.for_launcher))
        engines, user_code = await both(
            EngineGroup.start(launcher, config.for_engines, log_dir=record.log_dir, publishes=False),
            open_user_code(stack, inputs, config, record, launcher=launcher))
        fleet = await open_engines(stack, engines, config.for_engines, record, model=inputs.model, tokenizer=inputs.tokenizer_folder)

        async def version_of(engine: EngineClient) -> Version:
            """Return the version served: of the initial weights, or of weights that another run left in an engine by URL."""
            return (await engine.health(timeout_s=config.inference.probe_timeout_s)).get("version", UNPUBLISHED)

        for name in fleet.pool.states:
            fleet.pool.admit(name, await version_of(fleet.pool.client(name)))
        generate = await _load_adapter(stack, fleet, choose_canary(inputs, config), adapter) if adapter else fleet.dispatcher.generate
        yield EngineRollouts(config, record, inputs, generate, user_code), partial(fleet.watch, version_of)


async def _load_adapter(stack: AsyncExitStack, fleet: Fleet, canary: tuple[int, ...], folder: str) -> Generate:
    """Load an adapter on an engine, and return a `Generate` that samples it; other engines load it at a request, and must agree with it.

    Raises RefusedError if it is no adapter of this model.
    """
    client, timeout_s = fleet.pool.client(next(iter(fleet.pool.states))), fleet.config.weights.stage_timeout_s
    adapter = f"evaluated.{draw_incarnation()}"
    name = adapter_name(adapter, 0)
    await client.load_adapter(name, folder, timeout_s=timeout_s)
    proof = await client.prove(canary, timeout_s=timeout_s, adapter=name)
    fleet.adapters.pin(Manifest(0, folder, proof.fingerprint or "", canary, proof.canary_logprobs, adapter=adapter))
    stack.callback(fleet.adapters.unpin, name)  # so that an engine by URL forgets it
    return partial(fleet.dispatcher.generate, adapter=name)
