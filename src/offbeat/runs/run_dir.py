"""The folder of a run before the run begins: the run goes on there, or an older one is moved aside, or it is refused.

Called by `runs.run` before anything is started. Nothing is deleted but weights that an older run has published.
"""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from offbeat.checkpoint.manifest import MARKER
from offbeat.checkpoint.recover import Checkpoint, none_sound
from offbeat.config.root import Config
from offbeat.controller.checkpoints import FINE_TUNING, PREFERENCE, REWARD_MODEL, TRAINING, WARM_UP, check_heads, index_of, part_of
from offbeat.controller.resume import compare
from offbeat.controller.state import SavedState
from offbeat.controller.supervised import is_finished
from offbeat.data import wire
from offbeat.data.identity import Identity
from offbeat.disk import discard
from offbeat.errors import ConfigError, StorageError
from offbeat.telemetry.jsonl import read_json_lines
from offbeat.telemetry.run_lock import lock_run

_FILES = ("config.toml", "events.jsonl", "metrics.jsonl", "trace.json", "result.json", "lock", "owner.json")
"""Files that a start reads or opens."""


_SAVED = {
    TRAINING: "checkpoint", FINE_TUNING: "sft_checkpoint", PREFERENCE: "preference_checkpoint", REWARD_MODEL: "reward_model_checkpoint"}
"""Events of checkpoints by the first word of their names."""


def prepare_run_dir(config: Config, *, kind: str = TRAINING, fresh: bool = False) -> Path | None:
    """Go on in the run's folder if it has a checkpoint, else move an older run of the same name aside if it has trained or saved anything.
    A `fresh` run always does the latter.

    Args:
        kind: first word of the names of the run's checkpoints; a run goes on only from its own kind's.

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
    return _move_aside(config) if _got_anywhere(run_dir) else None


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


def _last_saved(run_dir: Path, kind: str) -> int:
    """Step of the last checkpoint of this kind in the run's events; 0 if there is none."""
    events = read_json_lines(run_dir / "events.jsonl")
    steps = [event.get("global_step", event.get("step")) for event in events if event.get("kind") == _SAVED[kind]]
    return next((step for step in reversed(steps) if isinstance(step, int)), 0)


def check_resumption(config: Config, identity: Identity, *, kind: str = TRAINING, num_heads: int = 1) -> None:
    """Refuse changes with which the newest checkpoint cannot go on, before anything is started; see `offbeat.controller.resume`.

    Args:
        num_heads: number of processes that draw data.

    Raises:
        ConfigError: names the setting or other input that has changed.
    """
    for each in _goes_on_from(config, kind):
        if newest := index_of(config.run_dir, each).newest():
            check_heads(newest.folder, _saved(newest), num_heads)
            compare(identity, _saved(newest), run_dir=config.run_dir, part=part_of(each))
            return


def remembered_settings(config: Config, *, kind: str = TRAINING) -> Mapping[str, Any]:
    """Return the settings of the checkpoint that the run goes on from, by names such as "train.optimizer.lr"; {} if there are none.

    Raises:
        StorageError: one of the run's files is not a regular file but e.g. a FIFO, which would be waited for.
    """
    _check_kinds(config.run_dir)
    for each in _goes_on_from(config, kind):
        if newest := index_of(config.run_dir, each).newest():
            identity = _saved(newest).identity
            return {} if identity is None else identity.settings
    return {}


def _goes_on_from(config: Config, kind: str) -> tuple[str, ...]:
    """Return the kinds of checkpoints that the run continues from, in order of preference."""
    return (TRAINING, WARM_UP) if kind == TRAINING and config.run.warm_up else (kind,)


def _saved(checkpoint: Checkpoint) -> SavedState:
    return wire.decode_json(SavedState, checkpoint.payload)


def _done_steps(config: Config, kind: str, *, section: str, word: str = "") -> str | None:
    """Say that a run of a kind that ends after `total_steps` of its section is complete, and how to continue; None if it is not."""
    newest = index_of(config.run_dir, kind).newest()
    if newest is None or newest.step < getattr(config, section).total_steps or _saved(newest).unevaluated is not None:
        return None
    return f"is already complete ({newest.step} {word}steps); raise {section}.total_steps to continue"


def _trained(config: Config) -> str | None:
    """Say that a run of `offbeat train` is complete, and how to continue it; None if it is not."""
    newest = index_of(config.run_dir, TRAINING).newest()
    best = None if newest is None else _saved(newest).highlights.best
    if newest is None or best is None or not best.is_final(config.evaluate):
        return _done_steps(config, TRAINING, section="run")
    return (
        f"ended after {newest.step} steps, as {best.metric} had not risen in {best.num_since} evaluations; raise"
        " evaluate.stop_after_no_gain to continue")


def _fine_tuned(config: Config) -> str | None:
    """Say that a run of `offbeat sft` is complete, and how to continue it; None if it is not."""
    newest = index_of(config.run_dir, FINE_TUNING).newest()
    if newest is None or _saved(newest).unevaluated is not None:
        return None
    accuracy = _saved(newest).highlights.heldout_after
    if not is_finished(config.sft, steps=newest.step, accuracy=accuracy):
        return None
    if newest.step >= config.sft.total_steps:
        return f"is already complete ({newest.step} supervised steps); raise sft.total_steps to continue"
    return (
        f"reached a held-out accuracy of {accuracy:.3f} after {newest.step} supervised steps; set sft.stop_at_accuracy ="
        f" {config.sft.stop_at_accuracy:g} above that to continue")


_COMPLETED: dict[str, Callable[[Config], str | None]] = {
    TRAINING: _trained,
    FINE_TUNING: _fine_tuned,
    PREFERENCE: partial(_done_steps, kind=PREFERENCE, section="preference", word="preference "),
    REWARD_MODEL: partial(_done_steps, kind=REWARD_MODEL, section="reward_model", word="reward model "),
}
"""Checks for completed runs by kind."""


def completed(config: Config, kind: str) -> str | None:
    """Return a text that the run is complete as this kind, and how to continue it; None if it is not."""
    return _COMPLETED[kind](config)


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
