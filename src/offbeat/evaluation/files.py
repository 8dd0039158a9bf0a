"""Answers of evaluations on disk: JSON lines, one for each prompt, plain or compressed, and where evaluations of a run are.

A line has `set`, `index` (the prompt's place in it), `key`, `num_samples`, `prompt`, `answer` and `samples`, each with `reward`, `reason`,
`num_tokens` and `text`. `model` is there where a file holds answers of several models, `images` where the prompt has some (the SHA-256 of
their files, in the places of "<image>"), other fields where they are not empty.
"""

import io
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import zstandard

from offbeat.data.row import Prompt, Row
from offbeat.disk import replacing
from offbeat.errors import DataError, StorageError
from offbeat.evaluation.samples import EvaluatedPrompt, EvaluatedSample, EvaluatedSet
from offbeat.telemetry.evaluation_log import stored_evaluations

_COMPRESSED = ".zst"


@dataclass(frozen=True)
class _Line:
    """One prompt of one set, as it is read."""

    set: str
    index: int
    num_samples: int
    prompt: Prompt
    answer: str
    model: str = ""
    pass_at: tuple[int, ...] = ()
    extra: dict[str, str] = field(default_factory=dict)
    solution: str = ""
    failure: str = ""
    images: tuple[str, ...] = ()
    samples: tuple[EvaluatedSample, ...] = ()


def encode_lines(played: EvaluatedSet, *, model: str = "") -> Iterator[bytes]:
    """Return one line of JSON for each prompt, without its line break; a file with answers of several models names the `model`."""
    for index, prompt in enumerate(played.prompts):
        row = prompt.row
        line = {"model": model, "set": played.name, "index": index, "key": prompt.key, "num_samples": played.num_samples,
                "pass_at": played.pass_at, "prompt": row.shown_prompt, "answer": row.answer, "extra": row.extra, "solution": row.solution,
                "failure": prompt.failure, "images": prompt.images, "samples": [_full(asdict(sample)) for sample in prompt.samples]}
        kept = _full(line) | {"set": played.name, "index": index}
        # A lone surrogate, which UTF-8 has no bytes for, becomes the escape that JSON has for it.
        yield json.dumps(kept, ensure_ascii=False).encode(errors="backslashreplace")


def _full(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that hold something, and `text` and `reward` in any case."""
    return {name: value for name, value in fields.items() if name in ("text", "reward") or value not in ("", (), {}, [])}


def samples_beside(result: Path) -> Path:
    """Return the file of answers that belongs to a result, such as before.samples.jsonl to before.json."""
    return result.with_name(f"{result.name.removesuffix('.json')}.samples.jsonl")


def write_lines(path: Path, lines: Iterable[bytes]) -> None:
    """Write lines to a file that is not compressed, replacing an existing one; raises StorageError if it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            file.writelines(line + b"\n" for line in lines)
    except OSError as exc:
        raise StorageError(f"cannot write {path}: {exc.strerror}; free space, or choose another file with --output") from exc


def read_samples(path: Path, *, most: int | None = None) -> dict[str, dict[str, EvaluatedSet]]:
    """Return the sets of a file of answers, by model and then by name; the model is "" where the file names none.

    Args:
        most: lines to read; None reads all.

    Raises:
        DataError: there is no such file, or `encode_lines` cannot have written a line.
    """
    lines: dict[tuple[str, str], list[_Line]] = {}
    for number, text in enumerate(islice(_lines(path), most), 1):
        try:
            line = msgspec.convert(json.loads(text), _Line)
        except (ValueError, RecursionError) as exc:
            raise DataError(f"{path}, line {number}, is not a prompt of an evaluation: {exc}") from exc
        lines.setdefault((line.model, line.set), []).append(line)
    found: dict[str, dict[str, EvaluatedSet]] = {}
    for (model, name), of_set in lines.items():
        first = of_set[0]
        prompts = tuple(
            EvaluatedPrompt(Row(each.prompt, each.answer, each.extra, each.solution), each.samples, each.failure, each.images)
            for each in sorted(of_set, key=lambda each: each.index))
        found.setdefault(model, {})[name] = EvaluatedSet(name, first.num_samples, prompts, first.pass_at)
    if not found:
        raise DataError(f"{path} holds no answers of an evaluation")
    return found


def newest_evaluation(run_dir: Path) -> dict[str, Path]:
    """Return, by name, the file of the last evaluation of each set that a run has stored; empty if it has stored none."""
    return {name: path for path, (_, name) in stored_evaluations(run_dir).items()}


def _lines(path: Path) -> Iterator[str]:
    try:
        with path.open("rb") as file:
            reader = zstandard.ZstdDecompressor().stream_reader(file) if path.suffix == _COMPRESSED else file
            yield from io.TextIOWrapper(io.BufferedReader(reader), encoding="utf-8")  # type: ignore[arg-type]
    except FileNotFoundError as exc:
        raise DataError(f"there is no file {path}; give a file of answers that an evaluation has written") from exc
    except (OSError, UnicodeDecodeError, zstandard.ZstdError) as exc:
        raise DataError(f"{path} cannot be read: {exc}") from exc
