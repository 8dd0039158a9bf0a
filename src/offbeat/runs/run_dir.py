"""The folder of a run before the run begins: the run goes on there, or an older one is moved aside, or it is refused.

Called by `runs.run` before anything is started. Nothing is deleted but weights that an older run has published.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from offbeat.checkpoint.manifest import MARKER
from offbeat.checkpoint.recover import Checkpoint, none_sound
from offbeat.config.resume import remembered_in
from offbeat.config.root import TRAINING_KINDS, Config
from offbeat.config.training_kinds import TrainingKind
from offbeat.controller.checkpoints import TRAINING, WARM_UP, check_heads, index_of, part_of
from offbeat.controller.resume import compare
from offbeat.controller.state import SavedState
from offbeat.controller.supervised import lesson_of
from offbeat.data import wire
from offbeat.data.identity import Identity
from offbeat.disk import discard
from offbeat.errors import ConfigError, DataError, StorageError
from offbeat.journal.run_journal import begun_at_start, folder_of
from offbeat.telemetry.jsonl import read_json_lines
from offbeat.telemetry.run_lock import lock_run

_FILES = ("config.toml", "events.jsonl", "metrics.jsonl", "trace.json", "result.json", "lock", "owner.json")
"""Files that a start reads or opens."""

_RL = TRAINING_KINDS["train"]


def prepare_run_dir(
    config: Config, *, kind: TrainingKind = _RL, fresh: bool = False, identity: Identity | None = None, num_heads: int = 1,
) -> Path | None:
    """Go on in the run's folder if it has a checkpoint, or a journal of the same run from its beginning on, else move an older run of the
    same name aside if it has trained or saved anything. A `fresh` run always does the latter.

    Args:
        kind: kind of training; a run goes on only from checkpoints of its own kind.
        identity: of the run as it is now, which must be that of its journal; None goes on from checkpoints alone.

    Returns:
        New folder of the older run, such as `runs/NAME.1`, if it was moved.

    Raises:
        ConfigError: `run.resume` is off and the run exists, it has done all its steps, or another process is running it.
        StorageError: it has checkpoints, and all are damaged; it had some, and they are gone; or one of its files is not a regular file but
            e.g. a FIFO, which would be waited for.
    """
    run_dir = config.run_dir
    _check_kinds(run_dir)
    if not any((run_dir / name).exists() for name in ("config.toml", "checkpoints")):
        return None
    if fresh:
        return _move_aside(config) if _got_anywhere(run_dir) else None
    if not config.run.resume:
        raise ConfigError(f"the run folder {str(run_dir)!r} exists and run.resume is false; give run.name a new name, or set run.resume")
    if done := completed(config, kind):
        raise ConfigError(f"the run {str(run_dir)!r} {done}, or give run.name a new name")
    indexes = [index_of(config.run_dir, each) for each in _goes_on_from(config, kind)]
    if any(index.newest() for index in indexes):
        return None
    if damages := [damage for index in indexes for damage in index.damaged()]:
        raise none_sound(damages)
    if step := _last_saved(run_dir, kind):
        raise StorageError(
            f"the run {str(run_dir)!r} has saved a checkpoint of step {step}, and {str(run_dir / 'checkpoints')!r} has none any more; put"
            " it back, or move the run's folder away or give run.name a new name to begin anew")
    if kind is _RL and config.checkpoint.journal and identity and _is_journaled(run_dir, identity, num_heads=num_heads):
        return None
    if _got_anywhere(run_dir):
        return _move_aside(config)
    if (journal := folder_of(run_dir)).exists():
        with lock_run(run_dir):
            discard(journal)
    return None


def _is_journaled(run_dir: Path, identity: Identity, *, num_heads: int) -> bool:
    """Whether the run can go on from the initial model by its journal, because nothing has changed."""
    try:
        if (begun := begun_at_start(run_dir)) is None or begun[1] != num_heads:
            return False
        was = SavedState(0, 0, (), identity=wire.decode_json(Identity, begun[0]))
    except DataError:  # its records are of another version
        return False
    try:
        return not compare(identity, was, run_dir=run_dir, part=_RL.part)
    except ConfigError:
        return False


def _check_kinds(run_dir: Path) -> None:
    for path in (*(run_dir / name for name in _FILES), *run_dir.glob(f"checkpoints/*/{MARKER}")):
        if path.exists() and not path.is_file():
            raise StorageError(f"{path} must be a regular file, and is not; remove it, or set run.name")


def _got_anywhere(run_dir: Path) -> bool:
    """Whether a run has trained or saved anything; the folder of a start that failed before that is used again."""
    if any((run_dir / name).exists() for name in ("checkpoints", "export", "best", "rollouts", "result.json")):
        return True
    metrics = run_dir / "metrics.jsonl"
    if metrics.exists() and metrics.stat().st_size:
        return True
    return any(str(event.get("kind", "")).endswith("_step") for event in read_json_lines(run_dir / "events.jsonl"))


def _last_saved(run_dir: Path, kind: TrainingKind) -> int:
    """Step of the last checkpoint of this kind in the run's events; 0 if there is none."""
    events = read_json_lines(run_dir / "events.jsonl")
    steps = [event.get("global_step", event.get("step")) for event in events if event.get("kind") == kind.event("checkpoint")]
    return next((step for step in reversed(steps) if isinstance(step, int)), 0)


def check_resumption(config: Config, identity: Identity, *, kind: TrainingKind = _RL, num_heads: int = 1) -> None:
    """Refuse changes with which the newest checkpoint cannot go on, before anything is started; see `offbeat.controller.resume`.

    Raises:
        ConfigError: names the setting or other input that has changed.
    """
    for each in _goes_on_from(config, kind):
        if newest := index_of(config.run_dir, each).newest():
            check_heads(newest.folder, _saved(newest), num_heads)
            compare(identity, _saved(newest), run_dir=config.run_dir, part=part_of(each))
            return


def remembered_settings(config: Config, *, kind: TrainingKind = _RL) -> Mapping[str, Any]:
    """Return the settings of the checkpoint that the run goes on from, by names such as "train.optimizer.lr"; {} if there is none.

    An older version's checkpoint has no settings; those of the run's `config.toml` count then, which its last start wrote.

    Raises:
        ConfigError: that file is needed and is not TOML.
        StorageError: one of the run's files is not a regular file but e.g. a FIFO, which would be waited for.
    """
    _check_kinds(config.run_dir)
    for each in _goes_on_from(config, kind):
        if newest := index_of(config.run_dir, each).newest():
            identity = _saved(newest).identity
            return remembered_in(config.run_dir / "config.toml") if identity is None else identity.settings
    return {}


def _goes_on_from(config: Config, kind: TrainingKind) -> tuple[str, ...]:
    """Return the kinds of checkpoints that the run continues from, in order of preference."""
    return (TRAINING, WARM_UP) if kind is _RL and config.run.warm_up else (kind.checkpoints,)


def _saved(checkpoint: Checkpoint) -> SavedState:
    return wire.decode_json(SavedState, checkpoint.payload)


def _trained(config: Config) -> str | None:
    """Say that a run of `offbeat train` is complete, and how to continue it; None if it is not."""
    newest = index_of(config.run_dir, TRAINING).newest()
    if newest is None:
        return None
    saved = _saved(newest)
    best = saved.highlights.best
    if best is None or not best.is_final(config.evaluate):
        is_done = newest.step >= config.run.total_steps and saved.unevaluated is None
        return f"is already complete ({newest.step} steps); raise run.total_steps to continue" if is_done else None
    return (
        f"ended after {newest.step} steps, as {best.metric} had not risen in {best.num_since} evaluations; raise"
        " evaluate.stop_after_no_gain to continue")


def completed(config: Config, kind: TrainingKind) -> str | None:
    """Return a text that the run is complete as this kind, and how to continue it; None if it is not."""
    if not kind.lesson:
        return _trained(config)
    newest = index_of(config.run_dir, kind.checkpoints).newest()
    if newest is None or (saved := _saved(newest)).unevaluated is not None:
        return None
    return lesson_of(kind).completed(config, steps=newest.step, accuracy=saved.highlights.heldout_after)


def _move_aside(config: Config) -> Path:
    """Rename the run's folder to the next free `name.N`, which is returned; nothing is deleted but published weights.

    Raises:
        ConfigError: another process is running it, or the run that is to begin reads from it.
    """
    read = {"model.path": config.model.path, "model.tokenizer": config.model.tokenizer, "data.path": config.data.path,
            "teacher.path": config.teacher.path,
            **{f"data.sets.{name}.path": config.data_set(name).data.path for name in config.data.sets},
            **{f"evaluate.sets.{name}.data.path": config.evaluation_set(name).data.path for name in config.evaluate.sets}}
    for name, path in read.items():
        if path and Path(path).resolve().is_relative_to(config.run_dir.resolve()):
            raise ConfigError(f"{name} = {path!r} lies in the folder of the run itself, which starts over; give run.name a new name")
    number = 1
    while (aside := config.run_dir.with_name(f"{config.run.name}.{number}")).exists():
        number += 1
    with lock_run(config.run_dir):
        config.run_dir.rename(aside)
    discard(aside / "weights")
    return aside
