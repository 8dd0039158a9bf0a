"""Weights as their changes since an earlier version: their format, encoding and application; lossless in any number format.

A folder of changes holds one file, `changes.safetensors`, or one of each rank that wrote it, `changes-00001-of-00008.safetensors`. They
name the folder beside it that it builds on, its *base*: a whole model, or changes to another one. Of a tensor that has changed they have
either

    at:NAME   [n] uint8, the distance in elements of each changed one from the one before; the first counts from -1
    to:NAME   [n] the values there now

or, where that is not smaller, `whole:NAME`. A distance is at most 255: larger gaps are bridged by naming unchanged elements on the way.
`sum:NAME` is the wrapping sum of the result's bit patterns, which does not match if the changes are applied to anything but the base.

Called by `changes_io` and by engines; needs only torch, safetensors and the standard library, so that it also runs inside another engine's
process.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

FILE = "changes.safetensors"
_FILES = re.compile(r"changes(?:-\d{5}-of-(\d{5}))?\.safetensors")

AT, TO, WHOLE, SUM = "at:", "to:", "whole:", "sum:"
_FARTHEST = 255
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MAX_BASES = 10_000
"""Longest chain of folders that is followed; a damaged one may lead in a circle."""


class ChangesError(ValueError):
    """Changes cannot be read, or belong to another base."""


def encode(old: Tensor, new: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return the changes from one tensor to another of the same shape and number format, bit for bit, as described above.

    They are [N] uint8 distances, such as [3, 3] for elements 2 and 5, and [N] values; both empty where nothing has changed. None if they
    take no fewer bytes than the tensor, or the tensors differ in shape or number format.
    """
    if old.shape != new.shape or old.dtype != new.dtype:
        return None
    values = new.contiguous().view(-1)
    changed = (_bits(values) != _bits(old.contiguous().view(-1))).nonzero().view(-1)
    if len(changed) * (1 + new.element_size()) >= new.nbytes:
        return None
    gaps = changed.diff(prepend=changed.new_tensor([-1]))
    ends = ((gaps - 1) // _FARTHEST + 1).cumsum(0)
    num_steps = int(ends[-1]) if len(ends) else 0
    steps = torch.full((num_steps,), _FARTHEST, dtype=torch.uint8)
    steps[ends - 1] = ((gaps - 1) % _FARTHEST + 1).to(torch.uint8)
    if num_steps * (1 + new.element_size()) >= new.nbytes:
        return None
    return steps, values[_positions(steps)]


def apply(old: Tensor, at: Tensor, to: Tensor) -> Tensor:
    """Return a tensor with N changes, `at` [N] uint8 and `to` [N] of `encode`. Raises ChangesError if they belong to another tensor."""
    new = old.contiguous().clone()
    positions = _positions(at)
    if to.dtype != old.dtype or len(at) != len(to) or (len(positions) and int(positions[-1]) >= new.numel()) or bool((at == 0).any()):
        raise ChangesError(f"changes of {len(at)} elements, {to.dtype}, do not fit a tensor of {new.numel()} elements, {old.dtype}")
    new.view(-1)[positions] = to
    return new


def apply_changes(state: dict[str, Tensor], changes: Mapping[str, Tensor]) -> None:
    """Apply changes, by their keys in a file ("at:NAME" is [N] uint8), to tensors by their published names, which are replaced.

    Raises ChangesError if the changes belong to other tensors.
    """
    _change(state, changes, changes.__getitem__, source="what was received")


def base_of(folder: str | Path) -> Path | None:
    """Return the folder that a folder of changes builds on; None for a folder of whole weights.

    Raises ChangesError if a file is missing or cannot be read, or they name no folder beside it.
    """
    files = _files(folder)
    if not files:
        return None
    bases = set()
    for file in files:
        try:
            with safe_open(file, framework="pt") as tensors:
                bases.add((tensors.metadata() or {}).get("base", ""))
        except (OSError, SafetensorError) as exc:
            raise ChangesError(f"{file} cannot be read as safetensors: {exc}") from exc
    base, *others = sorted(bases)
    if others or not base or Path(base).name != base or base in (".", "..") or base == Path(folder).name:
        raise ChangesError(f"{files[0]} builds on {base[:120]!r}, which is not another folder beside it; publish the weights again")
    return Path(folder).parent / base


def _files(folder: str | Path) -> list[Path]:
    found = {path: match for path in sorted(Path(folder).glob("changes*")) if (match := _FILES.fullmatch(path.name))}
    for path, match in found.items():
        if len(found) != int(match[1] or 1):
            raise ChangesError(
                f"{path.parent} has {len(found)} files of changes, and {path.name} tells of others; publish the weights again")
    return list(found)


def read_weights(
    folder: str | Path, *, read_whole: Callable[[Path], Iterable[tuple[str, Tensor]]],
    held: Callable[[Path], Mapping[str, Tensor] | None] = lambda _folder: None,
) -> dict[str, Tensor]:
    """Read a folder of whole weights, or of changes, which are applied to the weights of their base.

    Args:
        read_whole: yields name and CPU tensor of every weight in a folder of whole weights; its exceptions are not caught.
        held: returns the tensors of a folder if the caller has them already; they are not modified. None if it does not.

    Returns:
        CPU tensors by their published names, such as "lm_head.weight" [V, H], or on the device of those that the caller has.

    Raises:
        ChangesError: a folder is damaged, or holds changes to other weights.
    """
    layers: list[Path] = []
    at: Path | None = Path(folder)
    state: dict[str, Tensor] | None = None
    while at is not None and state is None:
        if len(layers) >= _MAX_BASES:
            raise ChangesError(f"{folder} builds on more than {_MAX_BASES} others; publish the weights again")
        base = base_of(at)
        if base is None:
            state = dict(read_whole(at))
        else:
            layers.append(at)
            if (mine := held(base)) is not None and _names(at) <= mine.keys():
                state = dict(mine)
        at = base
    assert state is not None, "a chain ends with whole weights, or with what the caller has"
    for layer in reversed(layers):
        for file in _files(layer):
            _change_by_file(state, file)
    return state


def _names(folder: Path) -> set[str]:
    names: set[str] = set()
    for file in _files(folder):
        with safe_open(file, framework="pt") as tensors:
            names |= {name.partition(":")[2] for name in tensors.keys()}  # noqa: SIM118
    return names


def _change_by_file(state: dict[str, Tensor], file: Path) -> None:
    try:
        with safe_open(file, framework="pt") as tensors:
            _change(state, tensors.keys(), tensors.get_tensor, source=str(file))
    except (OSError, SafetensorError) as exc:
        raise ChangesError(f"{file} cannot be read as changes of these weights: {exc}") from exc


def _change(state: dict[str, Tensor], keys: Iterable[str], get: Callable[[str], Tensor], *, source: str) -> None:
    """Apply changes that `get` returns one after the other."""
    try:
        for key in keys:
            kind, _, name = key.partition(":")
            if kind + ":" == WHOLE:
                state[name] = get(key)
            elif kind + ":" == AT:
                old = state[name]
                new = apply(old.cpu(), get(key).cpu(), get(TO + name).cpu())
                if not torch.equal(sum_bits(new), get(SUM + name).cpu()):
                    raise ChangesError(f"{source} has changes of {name!r} that do not fit what they were applied to; publish again")
                state[name] = new.to(old.device)
    except KeyError as exc:
        raise ChangesError(f"{source} has changes of a tensor that is not there: {exc}") from exc


def _positions(steps: Tensor) -> Tensor:
    return steps.cumsum(0, dtype=torch.int64) - 1


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view(_BITS[tensor.element_size()])


def sum_bits(tensor: Tensor) -> Tensor:
    """Return [1] int64, the wrapping sum of a tensor's bit patterns."""
    return _bits(tensor.contiguous().view(-1)).sum(dtype=torch.int64).view(1)
