"""Raw records by index, from files, patterns of files, folders, datasets saved to disk, and the hub. `dataset` makes rows of them.

Every record is passed through a `Sieve` once, when the source is opened, so that a bad row stops a run at its start and not midway.
"""

import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from glob import glob, has_magic
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

from offbeat.data.files import Sieve, Source, import_extra, is_data_file, name_of, open_file, table_source
from offbeat.errors import DataError, first_line

_SPLITS = (("train", "training"), ("test",), ("validation", "valid", "val", "dev", "eval"))
"""Names that files and folders of a split have."""
_DESCRIBING = ("dataset_info.json", "dataset_infos.json", "state.json")
"""JSON files in folders of data that hold no rows."""
_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?(:[^/]+)?")
_SOURCES = (
    ".jsonl, .json, .csv, .tsv or .parquet, a pattern such as 'data/*.jsonl', a folder of such files or of save_to_disk, or a hub id")


@dataclass(frozen=True, eq=False)
class Several:
    """The records of several sources, one after the other."""

    sources: tuple[Source, ...]

    @cached_property
    def _starts(self) -> tuple[int, ...]:
        return tuple(accumulate((len(source) for source in self.sources), initial=0))

    def __len__(self) -> int:
        return self._starts[-1]

    def record(self, index: int) -> dict[str, Any]:
        which = bisect_right(self._starts, index) - 1
        return self.sources[which].record(index - self._starts[which])

    def where(self, index: int) -> str:
        which = bisect_right(self._starts, index) - 1
        return self.sources[which].where(index - self._starts[which])


def has_splits(path: str) -> bool:
    """Whether a path may have splits: a folder or a hub id such as "openai/gsm8k", but no file and no pattern."""
    return not (has_magic(path) or Path(path).is_file() or is_data_file(Path(path)))


def open_source(path: str, *, split: str, sieve: Sieve) -> Source:
    """Open the records of a path.

    Args:
        path: a file; a pattern of files, which are read in the order of their names; a folder of such files, or one that `save_to_disk` of
            `datasets` has written; or a hub id (`org/name`, or `org/name:config` for one of several configurations).
        split: split of a hub dataset or a folder; files have none.

    Raises:
        DataError: it does not exist, cannot be read, has no rows that can be used, or more that cannot than the sieve allows.
        MissingExtraError: `datasets` or `pyarrow` is needed and not installed.
    """
    source = _open(path, split=split, sieve=sieve)
    if not len(source):
        first = f"; the first: {sieve.refused[0]}" if sieve.refused else ""
        raise DataError(f"dataset {name_of(path)} has no rows{f' that can be used{first}' if first else ''}")
    return source


def _open(path: str, *, split: str, sieve: Sieve) -> Source:
    found = Path(path)
    if found.is_dir():
        if (found / "state.json").is_file() or (found / "dataset_dict.json").is_file():
            return _open_saved(path, split=split, sieve=sieve)
        return _open_files(_files_of_split(found, split), sieve)
    if found.is_file():
        return open_file(found, sieve)
    if has_magic(path):
        names = glob(path, recursive=True)  # noqa: PTH207 - `Path.glob` takes no absolute pattern
        files = sorted(Path(name) for name in names if Path(name).is_file())
        if not files:
            raise DataError(f"no data file matches the pattern {path!r}; a pattern is relative to the working directory")
        return _open_files(files, sieve)
    if not has_splits(path) or not _HUB_ID.fullmatch(path):
        advice = f"did you mean {near!r}? A path is" if (near := _nearest(found)) else f"give {_SOURCES}; a path is"
        raise DataError(f"data file {path!r} does not exist; {advice} relative to the working directory")
    return _open_hub(path, split=split, sieve=sieve)


def _nearest(path: Path) -> str:
    """Return the data file beside this path whose name is spelt most nearly so; empty if there is none."""
    try:
        names = [file.name for file in path.parent.iterdir() if is_data_file(file)]
    except OSError:  # there is no such folder, or it cannot be read
        return ""
    near = get_close_matches(path.name, names, n=1, cutoff=0.8)
    return str(path.with_name(near[0])) if near else ""


def _open_files(files: Sequence[Path], sieve: Sieve) -> Source:
    sources = tuple(open_file(file, sieve) for file in files if not sieve.is_full)
    return sources[0] if len(sources) == 1 else Several(sources)


def _files_of_split(folder: Path, split: str) -> list[Path]:
    """Return the data files in a folder and those below it that belong to a split by the words of their names.

    Where no file names a split, all belong to "train". Raises DataError if none does.
    """
    below = sorted(path for path in folder.rglob("*") if path.is_file())
    files = [
        path for path in below if is_data_file(path) and path.name not in _DESCRIBING
        and not any(part.startswith((".", "_")) for part in path.relative_to(folder).parts)]
    if not files:
        raise DataError(f"the folder {str(folder)!r} has no data files; give {_SOURCES}")
    same = next((names for names in _SPLITS if split in names), (split,))
    chosen = [file for file in files if _names(file.relative_to(folder), same)]
    if chosen:
        return chosen
    if split in _SPLITS[0] and not any(_names(file.relative_to(folder), names) for file in files for names in _SPLITS):
        return files
    listed = ", ".join(str(file.relative_to(folder)) for file in files[:5]) + (", ..." if len(files) > 5 else "")
    raise DataError(
        f"the folder {str(folder)!r} has no files of split {split!r}; it has {listed}. Name files or folders after their split, or give a"
        " pattern of files")


def _names(path: Path, words: Sequence[str]) -> bool:
    """Whether the first word of a path that names a split is one of these, so that `train/test_cases.jsonl` is of one split alone."""
    known = "|".join(re.escape(word.lower()) for word in {*words, *chain.from_iterable(_SPLITS)})
    first = re.search(rf"(?<![a-z0-9])({known})(?![a-z0-9])", str(path).lower())
    return first is not None and first[1] in [word.lower() for word in words]


def _open_saved(path: str, *, split: str, sieve: Sieve) -> Source:
    datasets = import_extra("datasets", f"read {path!r}, which `save_to_disk` has written")
    try:
        dataset = datasets.load_from_disk(path)
    except (OSError, ValueError) as exc:
        raise DataError(f"dataset {path!r}, which `save_to_disk` has written, could not be loaded: {first_line(exc)}") from exc
    if isinstance(dataset, dict):
        if split not in dataset:
            raise DataError(f"dataset {path!r} has no split {split!r}; it has {', '.join(dataset)}; set data.split")
        dataset = dataset[split]
    return table_source(dataset.with_format("arrow")[:], path, sieve)


def _open_hub(path: str, *, split: str, sieve: Sieve) -> Source:
    datasets = import_extra("datasets", "read a hub dataset")
    name, _, config_name = path.partition(":")
    try:
        dataset = datasets.load_dataset(name, config_name or None, split=split)
    except (OSError, ValueError) as exc:
        raise DataError(
            f"dataset {path!r}, split {split!r}, could not be loaded: {first_line(exc)}; check the name (org/name, or org/name:config),"
            " the split and the connection, or give a file") from exc
    return table_source(dataset.with_format("arrow")[:], f"{path} ({split})", sieve)
