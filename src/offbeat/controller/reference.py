"""Log-probabilities of preferences under the initial policy: computed once before the first step, kept in the run's folder, reused.

One file of a data set, `reference/NAME.safetensors`, holds arrays and a digest of their inputs. Torch-free.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from offbeat.controller.parts import LoopPeers
from offbeat.data.supervised import Sequence as Encoded
from offbeat.disk import replacing
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


class RowsToScore(Protocol):
    """The sequences of each row of a data set, made when they are asked for, such as a list; none of a row that is dropped."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Sequence[Encoded]: ...


@dataclass(frozen=True)
class ReferenceFile:
    """Where a data set's reference is kept for later starts of the run.

    Attributes:
        key: digest of everything that the log-probabilities depend on.
        resumes: whether the run goes on from a checkpoint that was trained with the file.
    """

    path: Path
    key: str
    resumes: bool

    def read_reference(self, *, num_rows: int) -> Reference | None:
        """Return the reference in the file; None if it has to be computed.

        Raises ConfigError if the run resumes, and the file is of other data or cannot be read.
        """
        if not self.path.exists():
            return None
        try:
            with safe_open(self.path, framework="np") as file:
                kept = (file.metadata() or {}).get("key")
                reference = Reference(file.get_tensor("logprobs"), file.get_tensor("offsets"))
        except (OSError, SafetensorError) as exc:
            if self.resumes:
                raise ConfigError(
                    f"{str(self.path)!r} cannot be read ({exc}); delete it, and it is computed again from the initial weights") from exc
            return None
        if kept == self.key and reference.num_rows == num_rows:
            return reference
        if self.resumes:
            raise ConfigError(
                f"the reference log-probabilities in {str(self.path)!r} are of other preferences: the data, the model, the tokenizer's chat"
                " template or what is too long has changed since the run began; restore it, or start over with another run.name")
        return None

    def write_arrays(self, arrays: dict[str, np.ndarray]) -> None:
        """Write the file, whole or not at all; `arrays` are the arguments of `Reference` by name."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(self.path) as file:
            file.write(save(arrays, metadata={"key": self.key}))


async def open_reference(file: ReferenceFile, rows: RowsToScore, *, chunk: int, score: Score, peers: LoopPeers, draws: bool) -> Reference:
    """Read the reference of an earlier start, or compute it now; every rank calls it, before the initial weights change.

    Raises as `ReferenceFile.read_reference`.

    Args:
        chunk: number of rows that are scored in one call.
        draws: whether this process draws data, and so needs the result.
    """
    nothing = Reference(np.zeros(0, np.float32), np.zeros(1, np.int64))
    found: list[Reference | None] = []

    async def look() -> bool:
        found.append(file.read_reference(num_rows=len(rows)))
        return found[0] is not None

    if await peers.lead("reference_found", look, bool):
        return found[0] if found and found[0] is not None else nothing
    parts, counts = [np.zeros(0, np.float32)], [0]
    for start in range(0, len(rows), chunk):
        of_rows = [rows[index] for index in range(start, min(start + chunk, len(rows)))] if draws else []
        parts.append(await score([sequence for sequences in of_rows for sequence in sequences]))
        counts += [sum(int(mask.sum()) for _, mask in sequences) for sequences in of_rows]
    arrays = {"logprobs": np.concatenate(parts), "offsets": np.cumsum(counts, dtype=np.int64)}

    async def write() -> None:
        file.write_arrays(arrays)

    await peers.lead("reference_written", write, None)
    return Reference(**arrays) if draws else nothing
