"""The identity of a run: settings, and digests of data, model, tokenizer and user code. Checkpoints store it; resuming compares it.

The digests are BLAKE2b and detect accidental changes, not attacks. A model's weights are only sampled, since training changes all of them.
"""

import hashlib
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

from offbeat.data import wire
from offbeat.data.reward import JUDGE_PREFIX
from offbeat.user_code.given import source_of

_DIGEST_BYTES = 16
_HEADER_BYTES = 65_536
_SAMPLE_BYTES = 4096
_NUM_SAMPLES = 32
_LARGEST_SCRIPT = 1 << 20


@dataclass(frozen=True)
class Identity:
    """The identity of a run.

    Attributes:
        settings: values by "section.key", such as "data.shuffle", of the settings that `offbeat.config.resume` remembers.
        data: digest of the rows to train on, in order.
        num_rows: number of rows to train on; None for an endless dataset.
        model: digest of the initial model, or of the settings that it is made from.
        tokenizer: digest of the tokenizer's encoding.
        code: digests of the source files of the user's functions, by setting.
    """

    settings: Mapping[str, Any]
    data: str
    num_rows: int | None
    model: str
    tokenizer: str
    code: Mapping[str, str]


def new_digest() -> "hashlib.blake2b":
    """Return an empty digest to which values can be added."""
    return hashlib.blake2b(digest_size=_DIGEST_BYTES)


def add_to_digest(state: "hashlib.blake2b", value: Any) -> None:
    """Add a value that can be written as JSON."""
    state.update(wire.encode_json(_without_no_images(value)) + b"\n")


def digest_of(values: Iterable[Any]) -> str:
    """Return the digest of values in order."""
    state = new_digest()
    for value in values:
        add_to_digest(state, value)
    return state.hexdigest()


def _without_no_images(value: Any) -> Any:
    """Return a row of text without its empty field `images`, which rows did not have at first: runs that began then can go on."""
    if not is_dataclass(value) or getattr(value, "images", None) != ():
        return value
    return {each.name: getattr(value, each.name) for each in fields(value) if each.name != "images"}


def model_digest(folder: Path) -> str:
    """Return the digest of a model folder: of its config.json, and of samples of its weights."""
    state = new_digest()
    for path in [folder / "config.json", *sorted(folder.glob("*.safetensors"))]:
        size = path.stat().st_size
        state.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            state.update(file.read(_HEADER_BYTES))
            for number in range(1, _NUM_SAMPLES + 1):
                file.seek(max(size * number // _NUM_SAMPLES - _SAMPLE_BYTES, 0))
                state.update(file.read(_SAMPLE_BYTES))
    return state.hexdigest()


def command_digest(words: Iterable[str]) -> str:
    """Return the digest of the files among the words of a command, such as a script; empty if none is a file."""
    paths = [Path(word) for word in words if "/" in word or "." in word]
    contents = [path.read_bytes() for path in paths if path.is_file() and path.stat().st_size <= _LARGEST_SCRIPT]
    return hashlib.blake2b(b"\0".join(contents), digest_size=_DIGEST_BYTES).hexdigest() if contents else ""


def code_digest(dotted: str) -> str:
    """Return the digest of the source file of "module:function" or "file.py:function", without importing it, or of a judge's file.

    Empty for a module of Offbeat, whose source changes with its version, and for a module that is no file on the search path. A function
    that was given as an object has the digest of its own source.
    """
    if source := source_of(dotted):
        return digest_of([source])
    module, _, _ = dotted.rpartition(":")
    if not module or module.startswith("offbeat."):
        return ""
    if dotted.startswith(JUDGE_PREFIX):
        candidates = [Path(dotted.removeprefix(JUDGE_PREFIX))]
    elif module.endswith(".py"):
        candidates = [Path(module)]
    else:
        inner = Path(*module.split("."))
        candidates = [Path(root or ".") / file for root in sys.path for file in (inner.with_suffix(".py"), inner / "__init__.py")]
    path = next((path for path in candidates if path.is_file()), None)
    return "" if path is None else hashlib.blake2b(path.read_bytes(), digest_size=_DIGEST_BYTES).hexdigest()
