"""Index of a run's rollouts in SQLite, so that hundreds of thousands of them can be filtered at once. Built by readers, never by the run.

`rollouts/index.sqlite` lies beside its sources, such as `step-000010.jsonl.zst`. `update` adds files that are new or have changed, newest
steps first, one file per transaction, so that readers, and a run that goes on, do not disturb each other. Deleting it costs only time.
"""

import sqlite3
import tempfile
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from itertools import accumulate, compress
from pathlib import Path
from typing import Any

import msgspec

from offbeat.dashboard.rollout_filter import ORDER_BY, Filter, Order
from offbeat.data.stored_rollouts import FOLDER, Address, KeptFile, Numbers, kept_files, read_lines
from offbeat.errors import DataError

_LAYOUT = 1
_BUSY_S = 20.0
_PREVIEW = 240
_TABLES = """
CREATE TABLE files (id INTEGER PRIMARY KEY, step INTEGER, rejected INTEGER, size INTEGER, mtime_ns INTEGER, damage TEXT);
CREATE TABLE prompts (id INTEGER PRIMARY KEY, text TEXT UNIQUE);
CREATE TABLE samples (
    id INTEGER PRIMARY KEY AUTOINCREMENT, file INTEGER, step INTEGER, rejected INTEGER, position INTEGER, place INTEGER, prompt INTEGER,
    status TEXT, reason TEXT, reward REAL, advantage REAL, length INTEGER, version INTEGER);
CREATE TABLE shown (id INTEGER PRIMARY KEY, prompt_id TEXT, agent TEXT, why TEXT, preview TEXT);
CREATE INDEX by_place ON samples (step DESC, rejected, position, place);
CREATE INDEX by_file ON samples (file);
CREATE INDEX by_prompt ON samples (prompt, step);
CREATE INDEX by_reward ON samples (reward, step);
CREATE INDEX by_length ON samples (length, step);
CREATE INDEX by_reason ON samples (reason, status);
CREATE VIRTUAL TABLE words USING fts5(text, content='', tokenize="unicode61 remove_diacritics 2");
"""


class _Trajectory(msgspec.Struct):
    """The fields of a trajectory that the index reads; the rest is passed over."""

    loss_mask: list[bool]
    versions: list[int]
    reward: float | None
    reason: str = "stop"
    agent: str = ""
    text: str = ""
    lengths: list[int] = []
    trained: bool = False
    advantages: Numbers = []


class _Group(msgspec.Struct):
    prompt_id: str
    trajectories: list[_Trajectory] = []
    rejected: str | None = None
    prompt: str = ""
    why: str = ""


@dataclass(frozen=True)
class IndexedRollout:
    """A rollout of the index.

    Attributes:
        reason: how it ended, without details; of a rejected group why it was rejected.
        why: the reason with details, where it was not trained on.
        preview: the beginning of the generated text.
        reward: None if it has none.
        advantage: mean over its tokens; None if it was not trained on.
        length: generated tokens.
        version: oldest of the versions that sampled it; None if nothing was generated.
    """

    address: str
    step: int
    prompt_id: str
    prompt: str
    preview: str
    status: str
    reason: str
    why: str
    agent: str
    reward: float | None
    advantage: float | None
    length: int
    version: int | None


@dataclass(frozen=True)
class IndexProgress:
    num_files: int
    num_indexed: int
    num_rollouts: int
    damage: tuple[str, ...] = ()


class RolloutIndex:
    """The index of one run. Methods may be called on any thread; each opens the file for itself."""

    def __init__(self, run_dir: Path) -> None:
        """Open the index, or create an empty one; in a temporary folder where the run's cannot be written."""
        self.run_dir = run_dir
        self._updating = threading.Lock()
        self._placing = threading.Lock()
        self._totals: _Counted | None = None
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self._path = run_dir / FOLDER / "index.sqlite"
        self._place()

    def close(self) -> None:
        """Remove the index if it is temporary."""
        if self._temporary is not None:
            self._temporary.cleanup()

    def update(self, *, stop: threading.Event | None = None, most_files: int | None = None) -> IndexProgress:
        """Add new or changed files, newest steps first, and drop those gone; `stop` ends it after a file, `most_files` after so many."""
        with self._updating, self._connection() as db:
            known = {(step, bool(rejected)): (number, size, mtime) for number, step, rejected, size, mtime in db.execute(
                "SELECT id, step, rejected, size, mtime_ns FROM files")}
            files = kept_files(self.run_dir)
            present = {(file.step, file.is_rejected) for file in files}
            for key in known.keys() - present:
                with _transaction(db):
                    _drop(db, known[key][0])
            num_added = 0
            for file in reversed(files):
                if (stop is not None and stop.is_set()) or num_added == most_files:
                    break
                before = known.get((file.step, file.is_rejected))
                with suppress(FileNotFoundError):
                    stat = file.path.stat()
                    if before is None or before[1:] != (stat.st_size, stat.st_mtime_ns):
                        self._add(db, file, stat.st_size, stat.st_mtime_ns)
                        num_added += 1
            return self._progress(db, len(files))

    def progress(self) -> IndexProgress:
        """Return how much is in the index."""
        with self._connection() as db:
            return self._progress(db, len(kept_files(self.run_dir)))

    def find_rollouts(self, wanted: Filter, *, order: Order = "newest", limit: int = 50, offset: int = 0) -> list[IndexedRollout]:
        """Return the rollouts that a filter lets pass, in an order; raises ConfigError if the filter cannot be asked."""
        condition, values = wanted.condition()
        with self._connection() as db:
            chosen = f"SELECT * FROM samples WHERE {condition} ORDER BY {ORDER_BY[order]} LIMIT ? OFFSET ?"
            rows = db.execute(
                "SELECT step, rejected, position, place, prompt_id, prompts.text, preview, status, reason, why, agent, reward,"
                f" advantage, length, version FROM ({chosen}) AS chosen JOIN shown ON shown.id = chosen.id"
                f" LEFT JOIN prompts ON prompts.id = chosen.prompt ORDER BY {ORDER_BY[order]}",
                [*values, limit, offset])
            return [
                IndexedRollout(str(Address(step, bool(rejected), position, place)), step, prompt_id, prompt or "", *rest)
                for step, rejected, position, place, prompt_id, prompt, *rest in rows]

    def num_found(self, wanted: Filter) -> int:
        """Return how many rollouts a filter lets pass; raises ConfigError if the filter cannot be asked."""
        condition, values = wanted.condition()
        with self._connection() as db:
            return db.execute(f"SELECT count(*) FROM samples WHERE {condition}", values).fetchone()[0]

    def reasons(self) -> list[tuple[str, str, int]]:
        """Return each reason that occurs with its status and number of rollouts, the most frequent first."""
        with self._connection() as db:
            return self._counted(db).reasons

    def _place(self) -> None:
        """Find or create the index in the run's folder, or else in a temporary one."""
        self.close()
        self._totals, self._temporary, self._path = None, None, self.run_dir / FOLDER / "index.sqlite"
        try:
            try:
                self._prepare()
            except sqlite3.OperationalError:
                raise  # it cannot be opened or written, or somebody else holds it
            except sqlite3.DatabaseError:
                self._path.unlink(missing_ok=True)  # damaged, or of another layout
                self._prepare()
        except (sqlite3.DatabaseError, OSError):
            self._temporary = tempfile.TemporaryDirectory(prefix="offbeat-rollouts-")
            self._path = Path(self._temporary.name) / "index.sqlite"
            self._prepare()

    def _is_gone(self) -> bool:
        """Whether the index was deleted, which is allowed at any time, or moved aside with a run that begins anew."""
        try:
            return not self._path.stat().st_size  # connecting to a file that is not there creates an empty one
        except OSError:
            return True

    def _prepare(self) -> None:
        with self._connect() as db, _transaction(db):  # of two readers that begin at once, the second finds the tables
            if db.execute("PRAGMA user_version").fetchone()[0] == _LAYOUT:
                db.execute("SELECT count(*) FROM files")
            elif db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                raise sqlite3.DatabaseError("the index has another layout")
            else:
                for statement in _TABLES.strip().split(";\n"):
                    db.execute(statement.rstrip(";"))
                db.execute(f"PRAGMA user_version = {_LAYOUT}")

    @contextmanager
    def _connection(self) -> Iterator[sqlite3.Connection]:
        with self._placing:
            if self._is_gone():
                self._place()
        with self._connect() as db:
            yield db

    @contextmanager
    def _connect(self) -> Iterator[sqlite3.Connection]:
        with closing(sqlite3.connect(self._path, timeout=_BUSY_S, isolation_level=None)) as db:
            db.execute("PRAGMA synchronous = OFF")  # an index that a power cut damages is made again
            db.execute("PRAGMA mmap_size = 1073741824")
            db.create_function("folded", 1, str.casefold, deterministic=True)
            yield db

    def _add(self, db: sqlite3.Connection, file: KeptFile, size: int, mtime_ns: int) -> None:
        """Put a file into the index, replacing its earlier rollouts."""
        groups, damage = [], ""
        try:
            groups = [_DECODER.decode(line) for line in read_lines(file)]
        except (DataError, msgspec.DecodeError, UnicodeDecodeError) as exc:
            damage = str(exc) if isinstance(exc, DataError) else f"{file.path} holds lines that are no rollouts: {exc}"
        with _transaction(db):
            for (number,) in db.execute("SELECT id FROM files WHERE step = ? AND rejected = ?", (file.step, file.is_rejected)).fetchall():
                _drop(db, number)
            number = db.execute(
                "INSERT INTO files (step, rejected, size, mtime_ns, damage) VALUES (?, ?, ?, ?, ?)",
                (file.step, file.is_rejected, size, mtime_ns, damage)).lastrowid
            first = 1 + (db.execute("SELECT max(seq) FROM sqlite_sequence WHERE name = 'samples'").fetchone()[0] or 0)
            samples, shown, words = [], [], []
            for position, group in enumerate(groups):
                prompt = _prompt(db, group.prompt)
                for place, t in enumerate(group.trajectories or [_NOTHING]):
                    sample = first + len(samples)
                    written, after_prompt = _texts(t)
                    samples.append((sample, number, file.step, file.is_rejected, position, place, prompt, *_facts(group, t)))
                    why = group.rejected if group.rejected is not None else t.reason if ": " in t.reason else ""
                    shown.append((sample, group.prompt_id, t.agent, why, written[:_PREVIEW]))
                    words.append((sample, after_prompt))
            db.executemany("INSERT INTO samples VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", samples)
            db.executemany("INSERT INTO shown VALUES (?, ?, ?, ?, ?)", shown)
            db.executemany("INSERT INTO words (rowid, text) VALUES (?, ?)", words)

    def _progress(self, db: sqlite3.Connection, num_files: int) -> IndexProgress:
        counted = self._counted(db)
        damage = tuple(text for (text,) in db.execute("SELECT damage FROM files WHERE damage != '' ORDER BY step"))
        return IndexProgress(num_files, counted.num_files, counted.num_rollouts, damage)

    def _counted(self, db: sqlite3.Connection) -> "_Counted":
        """Return totals, which are counted anew only when a file has been added or dropped since."""
        key = db.execute("SELECT count(*), max(id), (SELECT max(seq) FROM sqlite_sequence) FROM files").fetchone()
        if self._totals is None or self._totals.key != key:
            reasons = db.execute("SELECT reason, status, count(*) AS n FROM samples GROUP BY reason, status ORDER BY n DESC").fetchall()
            self._totals = _Counted(key, key[0], sum(n for _, _, n in reasons), reasons)
        return self._totals


@dataclass(frozen=True)
class _Counted:
    """Totals of the index at the state `key`."""

    key: tuple[int | None, ...]
    num_files: int
    num_rollouts: int
    reasons: list[tuple[str, str, int]]


_DECODER = msgspec.json.Decoder(_Group)
_NOTHING = _Trajectory([], [], None, reason="")
"""Placeholder for the samples of a group without any, so that the group can be found."""

def _drop(db: sqlite3.Connection, file: int) -> None:
    """Remove a file's rollouts. Their words stay behind under numbers that are never given again."""
    db.execute("DELETE FROM shown WHERE id IN (SELECT id FROM samples WHERE file = ?)", (file,))
    db.execute("DELETE FROM samples WHERE file = ?", (file,))
    db.execute("DELETE FROM files WHERE id = ?", (file,))


def _prompt(db: sqlite3.Connection, text: str) -> int:
    """Return the number of a prompt; a new prompt gets one."""
    db.execute("INSERT OR IGNORE INTO prompts (text) VALUES (?)", (text,))
    return db.execute("SELECT id FROM prompts WHERE text = ?", (text,)).fetchone()[0]


def _facts(group: _Group, t: _Trajectory) -> tuple[Any, ...]:
    """Return status, reason, reward, advantage, length and version of a trajectory."""
    status = "rejected" if group.rejected is not None else "trained" if t.trained else "left out"
    reason = group.why if group.rejected is not None else t.reason.partition(": ")[0]
    versions = list(compress(t.versions, t.loss_mask))
    known = [advantage for advantage in compress(t.advantages, t.loss_mask) if advantage is not None]
    return status, reason, t.reward, sum(known) / len(known) if known else None, len(versions), min(versions, default=None)


def _texts(t: _Trajectory) -> tuple[str, str]:
    """Return the generated text, and the whole text from the first generated token on."""
    mask = t.loss_mask
    if not t.text or len(t.lengths) != len(mask) or True not in mask:
        return "", ""
    bounds = [0, *accumulate(t.lengths)]
    parts, first, start = [], mask.index(True), mask.index(True)
    while start < len(mask):
        end = mask.index(False, start) if False in mask[start:] else len(mask)
        parts.append(t.text[bounds[start] : bounds[end]])
        start = mask.index(True, end) if True in mask[end:] else len(mask)
    return "\n".join(parts), t.text[bounds[first] :]


@contextmanager
def _transaction(db: sqlite3.Connection) -> Iterator[None]:
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        db.execute("ROLLBACK")
        raise
    db.execute("COMMIT")
