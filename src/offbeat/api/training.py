"""`offbeat.train`, `sft`, `dpo` and `reward_model`: the commands of these names, from a Python program or a notebook."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from textwrap import indent
from types import MappingProxyType
from typing import Any, Protocol

from offbeat.api.rows import Rows, Sets, sets_of
from offbeat.api.run import Run
from offbeat.api.sentence import short_errors
from offbeat.api.session import Callback, run_alone, telling_how_to_go_on
from offbeat.api.settings import Settings, Source, configured
from offbeat.config.root import TRAINING_KINDS, Config
from offbeat.config.training_kinds import TrainingKind
from offbeat.dashboard.report import write_report
from offbeat.errors import RunError
from offbeat.runs.run import run_lesson, run_training
from offbeat.telemetry.console import Console

Code = str | Callable[..., Any]
"""A function, or the name of one: module:function or path/to/file.py:function."""

Several = Sequence[Code] | Mapping[Any, float]
"""Rewards that count alike, or each with its weight."""

_RL_HOMES = ("run", "rollout", "train", "train.optimizer", "algorithm", "data", "model", "evaluate")


@short_errors
def train(
    *, model: str | os.PathLike[str] | None = None, data: Rows | None = None, reward: Code | Several | None = None,
    workflow: Code | None = None, tools: Sequence[Code] = (), evaluate: Sets | None = None, config: Source | None = None,
    settings: Settings | None = None, callbacks: Iterable[Callback] = (), fresh: bool = False, progress: bool = True,
    dashboard: bool = False, **keywords: Any,
) -> Run:
    """Train a model with asynchronous reinforcement learning, as `offbeat train` does, and return the run when it has ended.

        def reward(completion: str, row: offbeat.Row) -> float:
            return float(completion.strip() == row.answer)

        run = offbeat.train(model="models/small", data="words.jsonl", reward=reward, total_steps=60, lr=1e-5)
        print(run.heldout_before, run.heldout_after, run.model)

    It blocks until the run ends, also in a notebook. Ctrl-C, SIGTERM, or interrupting the cell ends it after its step: the model is saved
    and exported, and the run is returned, with `stopped_early`. A second one ends it at once. The same call again goes on from there.

    Args:
        model: folder or hub id; without one, a tiny model of random weights.
        data: a .jsonl or .parquet file, a hub id, a built-in task such as "sort_digits", or rows in memory: a list or generator of dicts or
            of `offbeat.Row`, a data frame, or a data set of `datasets`. Rows in memory are written below `run.dir` first. Unless
            `heldout_size` says otherwise, a fifth of the rows, at most 256, is held out.
        reward: `(completion, row) -> float`. Functions of a script or a notebook are sent to the processes that call them, with the names
            they refer to; several are a list, or a mapping with weights such as `{f: 0.3, "math": 1}`; docs/rewards-and-workflows.md has
            the default.
        workflow: how an episode is played: "single_turn", "agent", "tool_loop" or "gym", or an async function `(episode) -> trajectories`.
        tools: typed functions, or one class whose public methods are tools; the workflow is then "tool_loop".
        evaluate: held-out rows, in any form that `data` has; or evaluation sets by name.
        config: a configuration to begin with: a TOML file, or `Run.config`.
        settings: any settings, such as {"train.optimizer.lr": 1e-5}.
        callbacks: called after each step with an `offbeat.Step`, on the thread that has called this; may stop the run.
        fresh: begin anew, and move an older run of the same name aside; otherwise a run goes on from its newest checkpoint.
        progress: whether to show it on stdout.
        dashboard: whether to serve the run's live page on this machine while it goes on; its address is printed.
        keywords: further settings by the last part of their names, such as `name`, `total_steps`, `lr`, `group_size`, `max_new_tokens`,
            `preset`: those of [run], [rollout], [train], [train.optimizer], [algorithm], [data], [model] and [evaluate], in this order,
            then any name that is the only one of its kind.

    Raises:
        UserError: an argument cannot work: a `ConfigError`, `DataError`, `ModelError` or `CodeError` names it in a sentence.
        RunError: the run was begun and failed.
        KeyboardInterrupt: it was interrupted before there was anything to keep, or twice.
        Exception: an error of a callback, raised when the step is done and the model is saved.
    """
    sets = sets_of(evaluate, unnamed="")
    given = {
        "model.path": model, "rollout.reward": reward, "rollout.workflow": "tool_loop" if tools and workflow is None else workflow,
        "agent.tools": list(tools) or None}
    rows = {"data": data, **{f"evaluate.sets.{name}.data" if name else "data.heldout_path": each for name, each in sets.items()}}
    with configured(config, settings, keywords, homes=_RL_HOMES, given=given, rows=rows) as chosen:
        return _train(run_training, chosen, callbacks=callbacks, fresh=fresh, progress=progress, dashboard=dashboard)


class TrainOnExamples(Protocol):
    """A function that trains a model on examples, such as `offbeat.sft`."""

    def __call__(
        self, *, model: str | os.PathLike[str] | None = None, data: Rows | None = None, evaluate: Rows | None = None,
        config: Source | None = None, settings: Settings | None = None, callbacks: Iterable[Callback] = (), fresh: bool = False,
        progress: bool = True, dashboard: bool = False, **keywords: Any,
    ) -> Run:
        """Train, as the command of the same name does; arguments and errors are those of `train`."""
        ...


def _function_of(kind: TrainingKind) -> TrainOnExamples:
    """Return the function of a kind of training, under its name and with its own docstring."""

    def train_on_examples(
        *, model: str | os.PathLike[str] | None = None, data: Rows | None = None, evaluate: Rows | None = None,
        config: Source | None = None, settings: Settings | None = None, callbacks: Iterable[Callback] = (), fresh: bool = False,
        progress: bool = True, dashboard: bool = False, **keywords: Any,
    ) -> Run:
        homes = (kind.section, f"{kind.section}.optimizer", "run", "train", "data", "model")
        rows = {"data": data, "data.heldout_path": evaluate}
        with configured(config, settings, keywords, homes=homes, given={"model.path": model}, rows=rows) as chosen:
            return _train(partial(run_lesson, kind), chosen, callbacks=callbacks, fresh=fresh, progress=progress, dashboard=dashboard)

    first, example = kind.python
    train_on_examples.__name__ = train_on_examples.__qualname__ = kind.function
    train_on_examples.__doc__ = (
        f"{first}, as `offbeat {kind.command}` does; arguments and errors are those of `train`.\n\n{indent(example, '    ')}\n"
        f"Keywords are settings of [{kind.section}], [{kind.section}.optimizer] and [run] first.\n")
    return short_errors(train_on_examples)


ON_EXAMPLES: Mapping[str, TrainOnExamples] = MappingProxyType({
    kind.function: _function_of(kind) for kind in TRAINING_KINDS.values() if kind.lesson})
"""The function of each kind of training on examples, by its name."""

sft, dpo, reward_model = ON_EXAMPLES["sft"], ON_EXAMPLES["dpo"], ON_EXAMPLES["reward_model"]


def _train(
    learn: Callable[..., object], config: Config, *, callbacks: Iterable[Callback], fresh: bool, progress: bool, dashboard: bool,
) -> Run:
    shows = progress and config.telemetry.console

    def work(console: Console) -> None:
        if learn(config, console, fresh=fresh) is None:
            raise RunError("this process does not lead the run, so it has no result")
        report = write_report(config.run_dir)
        if shows:
            print(f"report: {report}")

    changes = [*([] if config.run.resume else ["with run.resume = true"]), *(["without fresh"] if fresh else [])]
    again = ", ".join(["make the same call again", *changes])
    with telling_how_to_go_on(config, again if shows else "") as stopped:
        run_alone(work, config, callbacks=tuple(callbacks), progress=progress, dashboard=dashboard)
        run = Run(config.run_dir)
        if run.stopped_early:
            stopped()
    return run
