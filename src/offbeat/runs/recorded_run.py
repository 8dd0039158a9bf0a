"""Replays a recorded run: its steps are trained again from its journal, without engines, and compared with what the run recorded.

Called by `offbeat replay`. Nothing is written into the run's folder. Torch-free.
"""

import asyncio
import json
import tempfile
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Protocol

from offbeat.aio import run_interruptible
from offbeat.checkpoint.manifest import look
from offbeat.config.load import load_config
from offbeat.config.resume import changes, listed
from offbeat.config.root import TRAINING_KINDS, Config
from offbeat.controller.checkpoints import TRAINING, index_of
from offbeat.controller.inputs import RunInputs, read_inputs
from offbeat.controller.live_replay import LiveEngines, LiveReplay
from offbeat.controller.parts import RunParts, SingleProcess
from offbeat.controller.resume import compare
from offbeat.controller.state import SavedState
from offbeat.controller.step_replay import Beginning, RecordedFiles, Replay, ReplayedStep
from offbeat.data import wire
from offbeat.data.identity import Identity
from offbeat.data.image_store import images_folder, link_images
from offbeat.disk import discard
from offbeat.errors import ConfigError
from offbeat.fleet.fleet import open_fleet
from offbeat.journal.history import JournalHistory, PastStep, read_history
from offbeat.ranks.ranks import WorkerRanks
from offbeat.ranks.trainers import Trainers
from offbeat.runs.assemble import make_critic, open_policy
from offbeat.runs.engine_start import start_engines
from offbeat.runs.plan import changed_versions, read_plan
from offbeat.runs.rollouts import NoEngines
from offbeat.runs.teacher import open_teacher
from offbeat.telemetry.jsonl import read_json_lines
from offbeat.telemetry.record import SilentRecord
from offbeat.workers.worker import Launcher, make_launcher

_PART = TRAINING_KINDS["train"].part
_TO_KEEP = 'checkpoint.journal_keep = "all" keeps the records of all steps'


class ReplayListener(Protocol):
    """Hears how a replay goes on."""

    def compared(self, step: ReplayedStep) -> None:
        """Hear of a step that was trained again and compared."""
        ...

    def remark(self, text: str) -> None:
        """Hear what is missing, or differs from how the run was made, in a sentence."""
        ...


@dataclass(frozen=True)
class ReplayPlan:
    """What is replayed.

    Attributes:
        steps: the steps that are trained again, one after the other; those before `first` are needed to get there.
        first: the first step that is compared.
        missing: sentences on steps that were asked for, or could be expected, and cannot be replayed.
    """

    beginning: Beginning
    steps: tuple[PastStep, ...]
    first: int
    missing: tuple[str, ...]


def replay(
    run_dir: Path, listener: ReplayListener, *, out: Path | None = None, first: int | None = None, last: int | None = None,
    live_groups: int | None = None,
) -> bool:
    """Train the steps of a run again and compare them; returns whether all were equal.

    Args:
        out: a new folder for logs and the initial model; by default a temporary one, which is removed.
        first, last: the steps to compare; by default all that can be replayed.
        live_groups: number of groups of each step to generate again with an engine, 0 for all; None starts no engine.

    Raises:
        ConfigError: there is no such run, or it cannot be replayed; says why.
        DataError: its files cannot be read.
        KeyboardInterrupt: it was interrupted; its processes have ended.
    """
    config = recorded_config(run_dir)
    if config.run.mode == "spmd" and not config.rollout.single_rank_load:
        raise ConfigError(
            f"the run {str(run_dir)!r} cannot be replayed: with rollout.single_rank_load = false each rank has drawn data of its own; only"
            " runs in which one process draws all data can")
    if live_groups is not None:
        check_live(config)
    history = read_history(run_dir / "journal")
    plan = make_replay_plan(run_dir, history, first=first, last=last, num_ranks=config.train.num_ranks)
    for text in (*plan.missing, *changed_versions(read_plan(run_dir).versions)):
        listener.remark(text)
    folder = Path(tempfile.mkdtemp(prefix="offbeat-replay-")) if out is None else _new(out)
    try:
        own = _own_config(config, folder)
        link_images(images_folder(run_dir), into=images_folder(own.run_dir))
        inputs = read_inputs(own)
        _check_inputs(inputs, plan.steps, run_dir)
        files = recorded_files(run_dir)

        async def main() -> bool:
            equal = True
            async with AsyncExitStack() as stack:
                launcher = await stack.enter_async_context(make_launcher(own.for_launcher))
                parts = await _open_parts(stack, launcher, own, inputs)
                live = None
                if live_groups is not None:
                    engines = await open_live_engines(stack, launcher, parts)
                    live = LiveReplay(engines, plan.steps, config=own, sampling=inputs.sampling, num_groups=live_groups)
                async for step in Replay(parts, scratch=folder, live=live).run(plan.beginning, plan.steps, files):
                    if step.global_step >= plan.first:
                        equal = equal and step.is_equal
                        listener.compared(step)
            return equal

        return run_interruptible(main())
    finally:
        if out is None:
            discard(folder)


def recorded_config(run_dir: Path) -> Config:
    """Read the settings of a run's last start, with everything that was chosen for it; raises ConfigError in another folder."""
    file = run_dir / "config.toml"
    if not file.is_file():
        raise ConfigError(f"{run_dir} has no config.toml, so it is not the folder of a run; give one, such as runs/my-run")
    return load_config(str(file))


def recorded_files(run_dir: Path) -> RecordedFiles:
    """Find what a run still has of what it wrote."""
    rows = {row["global_step"]: row for row in read_json_lines(run_dir / "metrics.jsonl") if isinstance(row.get("global_step"), int)}
    exports = {int(path.name[5:]): path for path in (run_dir / "exports").glob("step-????????")}
    result = run_dir / "result.json"
    if result.is_file() and (run_dir / "export").is_dir():
        exports[json.loads(result.read_bytes())["steps"]] = run_dir / "export"
    return RecordedFiles(rows, {step: index_of(run_dir, TRAINING).folder(step) for step in _complete(run_dir)}, exports)


def make_replay_plan(
    run_dir: Path, history: JournalHistory, *, first: int | None = None, last: int | None = None, num_ranks: int = 1,
) -> ReplayPlan:
    """Choose what is replayed; see `replay`.

    `num_ranks` are the run's. How a warm-up was spread over several is not recorded, so a replay cannot begin before it.

    Raises:
        ConfigError: no step can be replayed, or a step that was asked for cannot; says which records are missing.
    """
    steps = history.steps
    if not steps:
        raise ConfigError(
            f"the run {str(run_dir)!r} has no journal with steps in it, so there is nothing to replay; {_TO_KEEP}, and checkpoint.journal"
            " must not be off")
    begins = _beginnings(run_dir, steps, num_ranks=num_ranks)
    wanted = first if first is not None else min((step for step in steps if _reach(step, steps, begins) is not None), default=min(steps))
    base = _reach(wanted, steps, begins)
    if base is None:
        raise ConfigError(
            f"step {wanted} cannot be replayed: there is no checkpoint before it from which the journal has all steps; it has"
            f" {_ranges(steps)}, and {_checkpoints(begins)}; {_TO_KEEP}")
    end = wanted
    while end + 1 in steps:
        end += 1
    if last is not None and last > end:
        raise ConfigError(f"step {last} cannot be replayed: the journal has {_ranges(steps)}; {_TO_KEEP}")
    chosen = tuple(steps[number] for number in range(base + 1, (last or end) + 1))
    missing = [*history.cuts]
    if first is None and wanted > 1:
        missing.append(f"steps 1 to {wanted - 1} are not replayed, as the journal has no records of them any more; {_TO_KEEP}")
    if last is None and end < max(steps):
        missing.append(f"the replay ends with step {end}: the journal has {_ranges(steps)}; --from-step goes on from a later checkpoint")
    if changed := _changes(chosen):
        raise ConfigError(
            f"the settings changed after step {changed[0]} ({changed[1]}), so steps before and after it cannot be replayed together; use"
            f" --from-step {changed[0] + 1}, or --to-step {changed[0]} with the settings of then in the run's config.toml")
    return ReplayPlan(begins[base], chosen, wanted, tuple(missing))


def _beginnings(run_dir: Path, steps: Mapping[int, PastStep], *, num_ranks: int) -> dict[int, Beginning]:
    """Return where a replay can begin, by the number of steps that are done there."""
    found: dict[int, Beginning] = {}
    if 1 in steps:
        warm_up_steps = wire.decode_json(SavedState, steps[1].state).highlights.warm_up_steps
        if num_ranks == 1 or not warm_up_steps:
            found[0] = Beginning(warm_up_steps=warm_up_steps)
    index = index_of(run_dir, TRAINING)
    for step in _complete(run_dir):
        marker = (index.folder(step) / "complete.json").read_bytes()
        found[step] = Beginning(index.folder(step), wire.decode_json(SavedState, marker))
    return found


def _complete(run_dir: Path) -> list[int]:
    index = index_of(run_dir, TRAINING)
    return [step for step in sorted(index.complete_steps()) if not look(index.folder(step), step)]


def _reach(step: int, steps: Mapping[int, PastStep], begins: Mapping[int, Beginning]) -> int | None:
    """Return the latest beginning from which the journal has all steps up to this one; None if there is none."""
    base = step - 1
    while base not in begins:
        if base not in steps:
            return None
        base -= 1
    return base if step in steps else None


def _ranges(steps: Mapping[int, PastStep]) -> str:
    """Format the numbers of steps, such as "steps 1 to 4, 7 to 9"."""
    parts: list[list[int]] = []
    for number in sorted(steps):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return "steps " + ", ".join(f"{first} to {last}" if last > first else str(first) for first, last in parts)


def _checkpoints(begins: Mapping[int, Beginning]) -> str:
    kept = [str(step) for step in sorted(begins) if step]
    return f"there are checkpoints of steps {', '.join(kept)}" if kept else "there is no checkpoint"


def _changes(steps: tuple[PastStep, ...]) -> tuple[int, str] | None:
    """Return the last step before the settings changed, and how; None if they did not."""
    for before, after in pairwise(steps):
        if before.identity != after.identity:
            was, now = (wire.decode_json(Identity, each.identity) for each in (before, after))
            found = changes(now.settings, was.settings, part=_PART)
            if changed := [each for group in found.values() for each in group]:
                return before.global_step, listed(changed)
    return None


def _check_inputs(inputs: RunInputs, steps: tuple[PastStep, ...], run_dir: Path) -> None:
    """Refuse a model, tokenizer or data that are not those of the run, with a ConfigError that names what has changed."""
    saved = SavedState(steps[-1].global_step, 0, (), identity=wire.decode_json(Identity, steps[-1].identity))
    try:
        lines = compare(inputs.identity, saved, run_dir=run_dir, part=_PART)
    except ConfigError as exc:
        raise ConfigError(str(exc).replace("cannot resume from", "cannot be replayed to").rpartition(";")[0] + "; restore it") from None
    if lines:
        raise ConfigError(f"the run {str(run_dir)!r} cannot be replayed: its last start {'; '.join(lines)}; restore it")


def _new(out: Path) -> Path:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"--out {str(out)!r} exists and is not an empty folder; give a new one")
    out.mkdir(parents=True, exist_ok=True)
    return out


def _own_config(config: Config, folder: Path) -> Config:
    """Return the settings of a run for its replay below another folder, with one engine, which takes each version whole."""
    return load_config(None, [], values=config.model_dump() | {
        "run": config.run.model_dump() | {"dir": str(folder.absolute()), "name": "replay", "mode": "controller"},
        "weights": config.weights.model_dump() | {"dir": "", "whole_every_versions": 1},
        "inference": config.inference.model_dump() | {"num_engines": 1, "min_engines": 1},
        "cluster": config.cluster.model_dump() | {"take_turns": False}})


async def _open_parts(stack: AsyncExitStack, launcher: Launcher, config: Config, inputs: RunInputs) -> RunParts:
    """Start the train ranks of a run, and nothing else."""
    record = SilentRecord(config.run_dir)
    await asyncio.to_thread(partial(record.log_dir.mkdir, parents=True, exist_ok=True))
    if inputs.build is not None:
        inputs.tokenizer.save(inputs.model)
    teacher = await open_teacher(stack, config.for_ranks, inputs, data=config.data)
    ranks = await WorkerRanks.start(launcher, config.for_ranks, model=inputs.model, build=inputs.build, log_dir=record.log_dir)
    none = NoEngines(draws=True)
    return RunParts(
        config, record, inputs, Trainers(ranks, config.for_ranks), none, none, SingleProcess(), none.watch,
        critic=make_critic(ranks, config, record), teacher=teacher(ranks, record.on_span))


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
