"""Log-probabilities of preferences under the initial policy: computed once before the first step, kept in the run's folder, reused.

One file of a data set, `reference/NAME.safetensors`, holds arrays and a digest of their inputs. Torch-free.
"""

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from offbeat.controller.parts import LoopPeers
from offbeat.data.supervised import Sequence as Encoded
from offbeat.errors import ConfigError

Score = Callable[[Sequence[Encoded]], Awaitable[np.ndarray]]
"""Returns the log-probabilities, [M] float32, of the tokens in the masks of some sequences; every rank calls it."""


class Reference:
    """Log-probabilities of N rows; empty on ranks that do not draw."""

    def __init__(self, logprobs: np.ndarray, offsets: np.ndarray) -> None:
        """`logprobs` are [M] float32; row i begins at entry offsets[i]. `offsets` are [N + 1] int64, such as [0, 12, 31] for two rows."""
        self._logprobs = logprobs
        self._offsets = offsets

    @property
    def num_rows(self) -> int:
        return len(self._offsets) - 1

    def row(self, index: int) -> np.ndarray:
        """Return the log-probabilities of a row's M tokens in order, [M] float32."""
        return self._logprobs[self._offsets[index] : self._offsets[index + 1]]


async def open_reference(
    path: Path, *, key: str, rows: Callable[[int], Sequence[Encoded]], num_rows: int, chunk: int, score: Score, peers: LoopPeers,
    draws: bool, resumes: Callable[[], bool],
) -> Reference:
    """Read the reference of an earlier start, or compute it now; every rank calls it, before the initial weights change.

    Args:
        key: digest of everything that the log-probabilities depend on.
        rows: gives the sequences of a row; none of a row that is dropped.
        chunk: number of rows that are scored in one call.
        draws: whether this process draws data, and so needs the result.
        resumes: returns whether the run goes on from a checkpoint that was trained with the file; called where the file is.

    Raises:
        ConfigError: the run resumes, and the file is of other data or cannot be read.
    """
    nothing = Reference(np.zeros(0, np.float32), np.zeros(1, np.int64))
    found: list[Reference] = []

    async def look() -> bool:
        found.extend(_read(path, key, num_rows=num_rows, resumes=resumes()))
        return bool(found)

    if await peers.lead("reference_found", look, bool):
        return found[0] if found else nothing
    parts, counts = [np.zeros(0, np.float32)], [0]
    for start in range(0, num_rows, chunk):
        of_rows = [rows(index) for index in range(start, min(start + chunk, num_rows))] if draws else []
        parts.append(await score([sequence for sequences in of_rows for sequence in sequences]))
        counts += [sum(int(mask.sum()) for _, mask in sequences) for sequences in of_rows]
    arrays = {"logprobs": np.concatenate(parts), "offsets": np.cumsum(counts, dtype=np.int64)}

    async def write() -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".tmp")
        save_file(arrays, part, metadata={"key": key})
        part.replace(path)

    await peers.lead("reference_written", write, None)
    return Reference(**arrays) if draws else nothing


def _read(path: Path, key: str, *, num_rows: int, resumes: bool) -> list[Reference]:
    """Return the reference in a file; an empty list if it has to be computed."""
    if not path.exists():
        return []
    try:
        with safe_open(path, framework="np") as file:
            kept = (file.metadata() or {}).get("key")
            reference = Reference(file.get_tensor("logprobs"), file.get_tensor("offsets"))
    except (OSError, SafetensorError) as exc:
        if resumes:
            raise ConfigError(
                f"{str(path)!r} cannot be read ({exc}); delete it, and it is computed again from the initial weights") from exc
        return []
    if kept == key and reference.num_rows == num_rows:
        return [reference]
    if resumes:
        raise ConfigError(
            f"the reference log-probabilities in {str(path)!r} are of other preferences: the data, the model, the tokenizer's chat template"
            " or what is too long has changed since the run began; restore it, or start over with another run.name")
    return []
