"""One run from its configuration to its result: folder, processes, warm-up, training, report. Called by the command line."""

import asyncio
import logging
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from offbeat import ending
from offbeat.aio import FINISHING, STOPPING, listener
from offbeat.config.agent import PLAYS
from offbeat.config.dump import dump_toml
from offbeat.config.notes import few_rows_note, notes
from offbeat.config.resume import remembered
from offbeat.config.root import TRAINING_KINDS, Config
from offbeat.config.training_kinds import TrainingKind
from offbeat.controller.checkpoints import TRAINING, index_of
from offbeat.controller.inputs import RunInputs, read_inputs
from offbeat.controller.loop import TrainResult, train
from offbeat.controller.own_code import check_own_code
from offbeat.controller.parts import RunParts
from offbeat.controller.state import Best, Highlights, RunState, SetHighlights
from offbeat.controller.supervised import Imitation, lesson_of, teach
from offbeat.controller.template_choice import choose_templates
from offbeat.data import wire
from offbeat.data.identity import Identity
from offbeat.data.model_folder import router_loss_note
from offbeat.data.template_use import replaced_forms, unused_template
from offbeat.disk import write_file
from offbeat.errors import of_disk
from offbeat.loading import load_module
from offbeat.machine import PROMISED_DEVICES
from offbeat.memory import steady_memory
from offbeat.runs.base_model import needs_base, on_base
from offbeat.runs.learning_rates import choose_rates
from offbeat.runs.plan import make_plan
from offbeat.runs.rank_info import RankInfo, read_rank_info, resolve_ranks
from offbeat.runs.run_dir import check_resumption, completed, prepare_run_dir, remembered_settings
from offbeat.telemetry.console import Console
from offbeat.telemetry.log import set_up_logging
from offbeat.telemetry.record import RunRecord, SilentRecord
from offbeat.telemetry.sinks import check_installed
from offbeat.workers.worker import library_environment

# By name, because SPMD mode imports torch.
_MODES = {"controller": ("offbeat.runs.assemble", "open_controller"), "spmd": ("offbeat.spmd.rank", "open_rank")}
_RL = TRAINING_KINDS["train"]

T = TypeVar("T")
Body = Callable[[RunParts, RunState], Awaitable[T]]
R = TypeVar("R", "RunResult", "SupervisedResult")
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunResult:
    """Contents of `result.json` of `offbeat train`.

    Attributes:
        heldout_before, heldout_after: held-out accuracy before reinforcement learning, and at the last evaluation after a step of it; None
            where it was not measured.
        heldout_after_step: steps done at that last evaluation.
        warm_up_steps: supervised steps before it, over all resumptions.
        steps: reinforcement-learning steps.
        train_wall_s: seconds of warm-up and reinforcement learning together, evaluations included.
        startup_wall_s: seconds before that, for processes to start and libraries to load.
        max_staleness_seen: largest number of versions between a trained token's policy and the trainer, such as 1.
        max_logprob_gap: largest difference of trainer's and engines' canary log-probability under the same weights.
        torch_in_controller: whether torch was imported by the process that wrote this; false for a controller, true in SPMD mode.
        controller_memory_bytes: that process's largest resident memory.
        stopped_early: the user asked to stop; the run resumes from its checkpoint.
        heldout_fell: whether held-out accuracy is lower than before by more than chance explains.
        sets: accuracy on each evaluation set, by name; left out without any.
        best: the evaluation whose model is in `best/`, or the one before the first step; left out without `evaluate.keep_best`.
        proofs: versions that engines took, each by each engine, by what they are proven, e.g. {"by_weights": 12, "not_proven": 1}.
    """

    heldout_before: float | None
    heldout_after: float | None
    heldout_after_step: int | None
    warm_up_steps: int
    steps: int
    train_wall_s: float
    startup_wall_s: float
    max_staleness_seen: int
    max_logprob_gap: float
    seed: int
    torch_in_controller: bool
    controller_memory_bytes: int
    stopped_early: bool
    heldout_fell: bool = False
    sets: dict[str, SetHighlights] = field(default_factory=dict)
    best: Best | None = None
    proofs: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class SupervisedResult:
    """Contents of `result.json` of all training on examples; see `SftResult`, `RunResult`. Wall times are of this start."""

    steps: int
    trained_tokens: int
    final_loss: float | None
    accuracy: float | None
    accuracy_step: int | None
    train_wall_s: float
    startup_wall_s: float
    seed: int
    torch_in_controller: bool
    controller_memory_bytes: int
    stopped_early: bool


def run_training(config: Config, console: Console, *, debug: bool = False, fresh: bool = False) -> RunResult | None:
    """`offbeat train`: warm-up if configured, then reinforcement learning; writes `result.json`. None on a rank that does not lead.

    A `fresh` run never resumes: an older one of its name is moved aside. An adapter on random weights gets a warmed-up base first.
    """
    start = time.monotonic()
    if read_rank_info(config.run, config.train).leads:
        check_own_code(config.algorithm)
    base_steps, base_wall_s = 0, 0.0
    if needs_base(config):
        config, base_steps, base_wall_s = _make_base(config, console, debug=debug, fresh=fresh)

    async def body(parts: RunParts, state: RunState) -> RunResult:
        ready = time.monotonic()
        warm_up_steps = base_steps

        async def begins() -> bool:
            index = index_of(config.run_dir, TRAINING)
            return index.newest() is None and not index.damaged()

        if config.run.warm_up and await parts.peers.lead("warm_up", begins, bool):
            warm_up_steps = (await teach(parts, state, Imitation(parts, state, standalone=False))).steps
            state.version += 1
        begun = Highlights(warm_up_steps=warm_up_steps)
        interrupted = warm_up_steps > base_steps and state.stopping
        # In SPMD mode this process trains, and garbage in cycles may hold tensors.
        with steady_memory() if config.run.mode == "controller" else nullcontext():
            result = TrainResult(0, begun, stopped_early=True) if interrupted else await train(parts, state, begun)
        marks = result.highlights
        return RunResult(
            heldout_before=marks.heldout_before, heldout_after=marks.heldout_after, heldout_after_step=marks.heldout_after_step,
            warm_up_steps=marks.warm_up_steps, steps=result.steps,
            train_wall_s=round(time.monotonic() - ready + base_wall_s, 3), startup_wall_s=round(ready - start - base_wall_s, 3),
            max_staleness_seen=marks.max_staleness, max_logprob_gap=marks.max_logprob_gap, seed=config.run.seed,
            torch_in_controller="torch" in sys.modules, controller_memory_bytes=peak_memory_bytes(), stopped_early=result.stopped_early,
            heldout_fell=marks.heldout_fell, sets=marks.sets, best=marks.best, proofs=marks.proofs)

    return _finish(execute(config, console, body, debug=debug, fresh=fresh), config, console)


def run_kind(
    kind: TrainingKind, config: Config, console: Console, *, debug: bool = False, fresh: bool = False,
) -> RunResult | SupervisedResult | None:
    """Train as the command of this kind does; see `run_training` and `run_lesson`."""
    if kind.lesson:
        return run_lesson(kind, config, console, debug=debug, fresh=fresh)
    return run_training(config, console, debug=debug, fresh=fresh)


def run_lesson(
    kind: TrainingKind, config: Config, console: Console, *, debug: bool = False, fresh: bool = False,
) -> SupervisedResult | None:
    """Train on examples, such as `offbeat sft`, exported to the run's folder; writes `result.json`. None on a rank that does not lead.

    A `fresh` run never resumes: an older one of its name is moved aside.
    """
    start = time.monotonic()

    async def body(parts: RunParts, state: RunState) -> SupervisedResult:
        ready = time.monotonic()
        result = await teach(parts, state, lesson_of(kind)(parts, state))
        return SupervisedResult(
            steps=result.steps, trained_tokens=result.trained_tokens, final_loss=result.final_loss, accuracy=result.accuracy,
            accuracy_step=result.accuracy_step,
            train_wall_s=round(time.monotonic() - ready, 3), startup_wall_s=round(ready - start, 3), seed=config.run.seed,
            torch_in_controller="torch" in sys.modules, controller_memory_bytes=peak_memory_bytes(), stopped_early=result.stopped_early)

    return _finish(execute(config, console, body, debug=debug, fresh=fresh, kind=kind), config, console)


def _finish(result: R | None, config: Config, console: Console) -> R | None:
    """Write and show the result of a run, on the process that leads."""
    if result is not None:
        values = asdict(result)
        sets, best = values.pop("sets", {}), values.pop("best", None)
        written = values | ({"sets": sets} if sets else {}) | ({"best": best} if best else {})
        shown = {f"{name}_{when}": accuracy for name, marks in sets.items() for when, accuracy in marks.items()}
        if best:
            shown["best"] = f"{best['metric']} {best['value']:.4g} after step {best['global_step']}"
        try:
            write_file(config.run_dir / "result.json", wire.encode_json(written) + b"\n")
        except OSError as exc:
            if (told := of_disk(exc)) is None:
                raise
            raise told from exc
        finally:
            console.show_result(values | shown)
    return result


def _make_base(config: Config, console: Console, *, debug: bool, fresh: bool) -> tuple[Config, int, float]:
    """Return the configuration on its base, and the steps and seconds of making the base."""
    results: list[SupervisedResult] = []
    start = time.monotonic()

    def make(base: Config) -> None:
        console.note(f"the adapter needs a base that has learnt something: warming up a whole model as the run {base.run.name}")
        sft = TRAINING_KINDS["sft"]
        result = run_lesson(sft, base, console, debug=debug, fresh=fresh or completed(base, sft) is not None)
        assert result is not None, "a controller leads"
        if result.stopped_early:
            raise KeyboardInterrupt
        results.append(result)

    config = on_base(config, make, fresh=fresh)
    return config, sum(result.steps for result in results), time.monotonic() - start if results else 0.0


def _unused_template(config: Config, inputs: RunInputs) -> str:
    """Return advice where a model of chats gets plain text; "" if it does not, or the workflow makes chats of its own."""
    rows = inputs.train if inputs.pairs is None else inputs.pairs.train
    if config.data.sets or rows.num_rows == 0 or inputs.trains == "rewards" or (inputs.plays and config.rollout.workflow in PLAYS):
        return ""
    return unused_template(inputs.tokenizer, rows.row(0).prompt, config.data, model=config.model.path)


def _replaced_forms(config: Config, inputs: RunInputs, *, kind: TrainingKind) -> str:
    """Return advice on chats that the template does not write in full; "" for workflows that make chats of their own."""
    if kind is _RL and config.rollout.workflow in PLAYS:
        return ""
    rows = inputs.train if inputs.pairs is None else inputs.pairs.train
    return replaced_forms(inputs.tokenizer, rows, config.data, imitated=kind is not _RL or config.run.warm_up)


def execute(
    config: Config, console: Console, body: Body[T], *, debug: bool = False, kind: TrainingKind = _RL, fresh: bool = False,
) -> T | None:
    """Open the run's folder and its processes, and run `body(parts, state)`, which does this kind of training.

    Ctrl-C once asks the body to end after its step and save; twice, or before it begins, ends at once. None if this rank does not lead.
    """
    config, rank_info = anchored(config), read_rank_info(config.run, config.train)
    given = config.model_copy(update={"train": resolve_ranks(config.run, config.train, rank_info)})
    if rank_info.leads:
        console.hint(f"{config.run.name}: reading the model and the data")
    was = {} if fresh else remembered_settings(given, kind=kind)
    sections, rates = choose_rates(given, kind.part, was=was)
    given, templates = choose_templates(given.model_copy(update=sections), was=was)
    inputs = lesson_of(kind).read(given) if kind.lesson else read_inputs(given)
    router = router_loss_note(given.model.path, coefficient=given.train.router_aux_loss_coefficient) if given.model.path else ""
    plan = make_plan(given, rank_info=rank_info, serves=inputs.plays).having(rates)
    config = given.planned(plan.sections)
    # Checkpoints hold the choices for "auto", since they may differ where the run is resumed.
    inputs = replace(inputs, identity=replace(inputs.identity, settings=remembered(config)))
    with _open_record(config, rank_info, console, inputs.identity, kind=kind, fresh=fresh, debug=debug) as record:
        record.console.open(config.run.name)
        for choice in (*rates, *templates):
            record.console.note(str(choice))
        if rank_info.leads:
            plan.write(config)
            for text in filter(None, (*notes(config, kind.part), router)):
                record.note("advice", text)
        for reason in inputs.unusable:
            record.events.record("unusable_row", reason=reason)
        if inputs.unusable:
            record.console.note(
                f"rows that cannot be used and are left out: {len(inputs.unusable)}, with the reasons in events.jsonl; the first:"
                f" {inputs.unusable[0]}")
        few_rows = few_rows_note(config.rollout, num_rows=inputs.train.num_rows) if kind is _RL and inputs.plays else ""
        for advice in filter(
                None, (inputs.unwritable, few_rows, _unused_template(config, inputs), _replaced_forms(config, inputs, kind=kind))):
            record.note("advice", advice)
        plan.tell(record)
        if rank_info.leads:
            record.console.starting("starting processes, which read the model; this may take a minute")
        try:
            main = _with_parts(config, rank_info, inputs, record, body)
            result = ending.run(main, tell=partial(record.note, "left_behind"))
            return result if rank_info.leads else None
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None
        except Exception as exc:
            record.events.record("failed", error=f"{type(exc).__name__}: {exc}", notes=getattr(exc, "__notes__", []))
            log.exception("the run failed")
            if (told := of_disk(exc)) is not None:
                raise told from exc
            raise


def anchored(config: Config) -> Config:
    """Make the folders that a run writes to absolute, since user code may change the working directory."""
    run = config.run.model_copy(update={"dir": str(Path(config.run.dir).absolute())})
    weights = config.weights.model_copy(update={"dir": config.weights.dir and str(Path(config.weights.dir).absolute())})
    return config.model_copy(update={"run": run, "weights": weights})


def _open_record(
    config: Config, rank_info: RankInfo, console: Console, identity: Identity, *, kind: TrainingKind, fresh: bool, debug: bool,
) -> RunRecord:
    if not rank_info.leads:
        # Its log is opened when it has met the leader, who may first move an older run of this name out of the way.
        return SilentRecord(config.run_dir)
    check_installed(config.telemetry.sinks)  # before an older run is moved out of the way
    num_heads = 1 if config.rollout.single_rank_load else rank_info.world
    aside = prepare_run_dir(config, kind=kind, fresh=fresh, identity=identity, num_heads=num_heads)
    check_resumption(config, identity, kind=kind, num_heads=num_heads)
    record = RunRecord(
        config.run_dir, trace=config.telemetry.trace, console=console, sinks=config.telemetry.sinks,
        settings=config.model_dump(mode="json"), rollouts_max_bytes=config.telemetry.rollouts_max_bytes or None)
    set_up_logging(record.log_dir / ("controller.log" if rank_info.world == 1 else "rank-0.log"), debug=debug)
    if aside is not None and not fresh:
        record.note("begun_anew", f"there was no checkpoint to resume from, so the run starts over; its old folder is kept as {aside}")
    (config.run_dir / "config.toml").write_text(dump_toml(config))
    return record


def open_run(config: Config, rank_info: RankInfo, inputs: RunInputs, record: RunRecord) -> AbstractAsyncContextManager[RunParts]:
    """Open this process's part of a training run; everything it has started is gone when the body ends, also by an error."""
    for variable, value in library_environment(config.train.threads).items():
        os.environ.setdefault(variable, value)  # a rank of SPMD mode is about to import torch
    if config.run.mode == "spmd":
        os.environ[PROMISED_DEVICES] = str(config.train.devices_per_rank)
    module, name = _MODES[config.run.mode]
    return getattr(load_module(module), name)(config, rank_info, inputs, record)


async def _with_parts(config: Config, rank_info: RankInfo, inputs: RunInputs, record: RunRecord, body: Body[T]) -> T:
    state = RunState(total_steps=config.run.total_steps)
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None, "runs inside a task"

    begun = False

    def interrupted(how: str) -> None:
        if state.asked.is_set() or not begun:
            task.cancel()
            return
        state.asked.set()
        record.console.note(how.replace(STOPPING, FINISHING) if state.finishing else how)

    listener.get()(loop, interrupted)
    if threading.current_thread() is threading.main_thread():  # no other can have signal handlers
        loop.add_signal_handler(signal.SIGUSR1, record.console.show_samples)
    async with open_run(config, rank_info, inputs, record) as parts:
        begun = True
        return await body(parts, state)


def peak_memory_bytes() -> int:
    """Largest resident memory of this process so far."""
    status = Path("/proc/self/status")
    if status.exists():  # Linux: getrusage would count the parent's memory, which a process has until it executes its program
        return next(int(line.split()[1]) * 1024 for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
