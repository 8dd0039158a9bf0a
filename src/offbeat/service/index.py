"""Indexes of checkpoint rows by path, run, owner and folder. Used by `checkpoints`; a lookup takes time proportional to its result."""

from collections import Counter
from collections.abc import Iterable, Iterator, MutableMapping

from offbeat.service.ids import CheckpointPath
from offbeat.service.tables import CheckpointRow


class CheckpointRows(MutableMapping[CheckpointPath, CheckpointRow]):
    """A dictionary of rows by path, with further indexes."""

    def __init__(self, rows: Iterable[CheckpointRow] = ()) -> None:
        self._rows: dict[CheckpointPath, CheckpointRow] = {}
        self._of_run: dict[str, dict[CheckpointPath, CheckpointRow]] = {}
        self._of_owner: dict[str, dict[CheckpointPath, CheckpointRow]] = {}
        self._public: dict[CheckpointPath, CheckpointRow] = {}
        self._folders: Counter[str] = Counter()
        for row in rows:
            self[path_of(row)] = row

    def __getitem__(self, path: CheckpointPath) -> CheckpointRow:
        return self._rows[path]

    def __setitem__(self, path: CheckpointPath, row: CheckpointRow) -> None:
        if path in self._rows:
            del self[path]
        self._rows[path] = row
        self._of_run.setdefault(row.run_id, {})[path] = row
        self._of_owner.setdefault(row.owner, {})[path] = row
        self._folders[row.folder] += 1
        if row.public:
            self._public[path] = row

    def __delitem__(self, path: CheckpointPath) -> None:
        row = self._rows.pop(path)
        for index, key in ((self._of_run, row.run_id), (self._of_owner, row.owner)):
            del index[key][path]
            if not index[key]:
                del index[key]
        self._folders[row.folder] -= 1
        if not self._folders[row.folder]:
            del self._folders[row.folder]
        self._public.pop(path, None)

    def __iter__(self) -> Iterator[CheckpointPath]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def owners(self) -> set[str]:
        """Names of the owners who have checkpoints."""
        return set(self._of_owner)

    def count_of(self, owner: str) -> int:
        return len(self._of_owner.get(owner, {}))

    @property
    def public(self) -> Iterable[CheckpointRow]:
        return self._public.values()

    def has_folder(self, folder: str) -> bool:
        return folder in self._folders

    def of(self, *, owner: str | None = None, run_id: str | None = None) -> Iterable[CheckpointRow]:
        """Return the rows of an owner, of a run, of an owner within a run, or all rows."""
        if run_id is not None:
            found = self._of_run.get(run_id, {}).values()
            return found if owner is None else [row for row in found if row.owner == owner]
        return (self._rows if owner is None else self._of_owner.get(owner, {})).values()


def path_of(row: CheckpointRow) -> CheckpointPath:
    """Return the path by which clients find a checkpoint."""
    return CheckpointPath(row.run_id, row.kind, row.name)
