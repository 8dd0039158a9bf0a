"""Writing and reading folders of changes in Offbeat's own processes; `changes` describes their format.

Called by the trainer, which writes them, and by the embedded engine.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from offbeat.disk import discard
from offbeat.errors import ModelError, StorageError
from offbeat.model import changes
from offbeat.model.changes import AT, FILE, SUM, TO, WHOLE, ChangesError, encode, sum_bits
from offbeat.model.hf_io import read_safetensors
from offbeat.pulse import progress


def find_changes(state: Mapping[str, Tensor], *, since: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
    """Return the changes between two states by their keys in a file, such as "at:NAME" [N] uint8; None if a tensor was added or is gone."""
    if state.keys() != since.keys():
        return None
    tensors: dict[str, Tensor] = {}
    for name, new in state.items():
        progress("compare_weights")
        found = encode(since[name], new)
        if found is None:
            tensors[WHOLE + name] = new.contiguous()
        elif len(found[0]):
            tensors[AT + name], tensors[TO + name] = found
            tensors[SUM + name] = sum_bits(new)
    return tensors


def smaller_changes(state: Mapping[str, Tensor], *, since: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
    """Return the result of `find_changes`; None, too, if it is not smaller than the weights themselves."""
    found = find_changes(state, since=since)
    if found is None or sum(tensor.nbytes for tensor in found.values()) >= sum(tensor.nbytes for tensor in state.values()):
        return None
    return found


def save_changes(tensors: Mapping[str, Tensor], file: Path, *, base: Path) -> None:
    """Write the result of `find_changes` to a file. Raises OSError or SafetensorError."""
    progress("write_weights")
    save_file(dict(tensors), file, metadata={"base": base.name})


def changes_file(number: int, count: int) -> str:
    """Return the name of file `number` of `count` files of changes, from 1 on, such as "changes-00001-of-00008.safetensors"."""
    return FILE if count == 1 else f"changes-{number:05d}-of-{count:05d}.safetensors"


def write_changes(state: Mapping[str, Tensor], folder: Path, *, since: Mapping[str, Tensor], base: Path) -> int:
    """Write the changes of a state since the weights in `base` as a new folder beside it, which appears complete or not at all.

    Both states are CPU tensors by their published names, such as "lm_head.weight" [V, H]. Returns the size of the tensors in the folder in
    bytes; 0 if nothing was written, because the changes are not smaller than the weights themselves, or a tensor was added or is gone.

    Raises:
        StorageError: the disk is full or the folder cannot be written.
    """
    tensors = smaller_changes(state, since=since)
    if tensors is None:
        return 0
    part = folder.with_name(f".{folder.name}.changes")
    try:
        discard(part)
        part.mkdir(parents=True)
        save_changes(tensors, part / FILE, base=base)
        part.rename(folder)
    except (OSError, SafetensorError) as exc:
        raise StorageError(f"changed weights could not be written to {folder}: {exc}; free space or choose another folder") from exc
    finally:
        discard(part)
    return max(sum(tensor.nbytes for tensor in tensors.values()), 1)


def read_weights(folder: str | Path, *, held: Callable[[Path], Mapping[str, Tensor] | None] = lambda _folder: None) -> dict[str, Tensor]:
    """Read a folder as `changes.read_weights`. Raises ModelError if one is missing, damaged, or holds changes to other weights."""
    try:
        return changes.read_weights(folder, read_whole=read_safetensors, held=held)
    except ChangesError as exc:
        raise ModelError(str(exc)) from exc
