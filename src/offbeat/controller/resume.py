"""Whether a checkpoint may be resumed with the present settings, data, model and code, and the lines that tell of changes.

`run` asks before any process is started, `checkpoints` again for the checkpoint that is chosen in the end. Pure; each setting's field says
how a change of it is treated.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

from offbeat.config.base import Part
from offbeat.config.dump import toml_value
from offbeat.config.resume import Change, Changed, changes, listed
from offbeat.controller.state import SavedState
from offbeat.data.identity import Identity
from offbeat.errors import ConfigError

_REMEDY = "restore it, or start over with another run.name"


def compare(now: Identity, saved: SavedState, *, run_dir: Path, part: Part) -> list[str]:
    """Return the lines on changes since the checkpoint, such as "continues with train.optimizer.lr = 1e-05, was 1e-06".

    A checkpoint that an older version wrote remembers nothing, and nothing is compared.

    Raises:
        ConfigError: something has changed with which the checkpoint cannot be resumed from.
    """
    if saved.identity is None:
        return []
    where = f"the run {str(run_dir)!r} cannot resume from step {saved.global_step}"
    found = changes(now.settings, saved.identity.settings, part=part)
    if found[Change.REFUSED]:
        raise ConfigError(f"{where} with {listed(found[Change.REFUSED])}; {_REMEDY}")
    for what, section in _other_contents(now, saved.identity):
        changed = [each for each in (*found[Change.CONTENT], *found[Change.ROWS]) if each.key.startswith(section)]
        raise ConfigError(f"{where} with {what}{f' ({listed(changed)})' if changed else ''}; {_REMEDY}")
    told = [*found[Change.TOLD], *found[Change.ROWS]]
    lines = [f"continues with {listed(told)}"] if told else []
    return lines if part != "rl" else [*lines, *_other_code(found[Change.CODE], now, saved.identity)]


def _other_contents(now: Identity, was: Identity) -> Iterator[tuple[str, str]]:
    """Yield each forbidden difference: in words, and the section of the settings that it comes from, such as "model."."""
    if now.model != was.model:
        path = now.settings.get("model.path")
        yield f"another model: {toml_value(path) if path else 'what [model.tiny] makes'} has other weights or another config.json", "model."
    if now.tokenizer != was.tokenizer:
        yield "another tokenizer, which makes other tokens of the same text", "model.tokenizer"
    if now.data != was.data:
        counts = "" if now.num_rows == was.num_rows else f", of {_count(now.num_rows)} where there were {_count(was.num_rows)}"
        yield f"other data: the rows to train on, or their order, are not those that it has drawn from{counts}", "data."


def _count(num_rows: int | None) -> str:
    return "endlessly many" if num_rows is None else str(num_rows)


def _other_code(renamed: Sequence[Changed], now: Identity, was: Identity) -> Iterator[str]:
    keys = {each.key for each in renamed}
    others = [each for each in renamed if not _is_moved(each, now, was)]
    if others:
        yield f"continues with {listed(others)}"
    for setting, digest in now.code.items():
        if setting not in keys and digest != was.code.get(setting, digest):
            yield f"continues with another {setting}: the file of its code is not as it was at the checkpoint"


def _is_moved(changed: Changed, now: Identity, was: Identity) -> bool:
    """Whether it is the same function of the same file in another place."""
    digest, functions = now.code.get(changed.key), {str(name).rpartition(":")[2] for name in (changed.now, changed.was)}
    return bool(digest) and digest == was.code.get(changed.key) and len(functions) == 1
