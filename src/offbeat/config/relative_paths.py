"""Resolves relative paths in a configuration file: in the working directory, or else in the file's own folder. Called by `load`.

For example, `offbeat train my-task/task.toml` with `data.path = "data.jsonl"` finds `my-task/data.jsonl` from any working directory.
"""

import glob
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_NAMED = {
    "path", "heldout_path", "tokenizer", "chat_template", "template", "reward", "workflow", "should_accept", "metric", "objective",
    "credit", "program", "environment", "keys"}
"""Names of settings that may be a path, or a function in a file, such as "rewards.py:score"."""
_LISTED, _KEYED = {"tools"}, {"rewards"}
"""Names of settings that are lists of such texts, or tables with such keys."""
_LONGEST = 1000
_IN_FILE = re.compile(r"(?P<file>.+\.py)(?P<function>:.*)?", re.DOTALL)


def found_beside(given: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return a file's settings with `folder` put before paths that exist there and not in the working directory."""
    return {name: _setting(name, value, folder) for name, value in given.items()}


def _setting(name: str, value: Any, folder: Path) -> Any:
    if isinstance(value, str):
        return _found(value, folder) if name in _NAMED else value
    if isinstance(value, list) and name in _LISTED:
        return [_found(each, folder) if isinstance(each, str) else each for each in value]
    if isinstance(value, dict):
        return {_found(key, folder): each for key, each in value.items()} if name in _KEYED else found_beside(value, folder)
    return value


def _found(text: str, folder: Path) -> str:
    if not text or "\n" in text or len(text) > _LONGEST:
        return text
    in_file = _IN_FILE.fullmatch(text)
    path, function = (in_file["file"], in_file["function"] or "") if in_file else (text, "")
    if Path(path).is_absolute() or _is_there(path) or not _is_there(str(folder / path)):
        return text
    return f"{folder / path}{function}"


def _is_there(path: str) -> bool:
    """Whether there is a file or a folder of this name, or one that matches it as a pattern."""
    try:
        return Path(path).exists() or (glob.has_magic(path) and any(glob.iglob(path, recursive=True)))  # noqa: PTH207 (absolute patterns)
    except (OSError, ValueError):  # such as a name that is too long
        return False
