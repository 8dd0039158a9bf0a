"""Identity of a run for engines that it has not started: its name with random digits, and the number of this start of it.

Both lie in `owner.json` in the run's folder, for example {"run": "math-4f1c09", "start": 2}. So a run that is resumed elsewhere takes its
engines over from an earlier start, which may still be alive, and a run that begins anew is another one.
"""

import json
import secrets
from pathlib import Path

from offbeat.disk import make_folder, write_file
from offbeat.errors import StorageError

_FILE = "owner.json"


def begin_start(run_dir: Path, *, exclusive: bool) -> str:
    """Count a start of the run, and return its header `engine.inside.owners.HEADER`, for example "math-4f1c09 2 exclusive".

    The caller holds the folder's lock. An `exclusive` run publishes whole weights, so that no other may use its engines.

    Raises:
        StorageError: the file cannot be read or written.
    """
    path = run_dir / _FILE
    try:
        make_folder(run_dir)
        found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        run, start = str(found.get("run") or f"{run_dir.name}-{secrets.token_hex(3)}"), int(found.get("start", 0)) + 1
        write_file(path, json.dumps({"run": run, "start": start}).encode())
    except (OSError, ValueError, AttributeError, TypeError) as exc:
        raise StorageError(f"{path}, which counts the starts of the run, cannot be read and written: {exc}; remove it") from exc
    return f"{''.join(run.split())} {start} {'exclusive' if exclusive else 'shared'}"


def leaving(owner: str) -> str:
    """Return the header of the last request of a run, for example "math-4f1c09 2 leaves"."""
    run, start, _ = owner.split(" ")
    return f"{run} {start} leaves"
