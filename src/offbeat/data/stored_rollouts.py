"""Rollouts as a run keeps them in its folder, and the reader of them. Read by the command line, the live page and the Python interface.

`rollouts/step-000010.jsonl.zst` has the groups that step 10 trained on, one per line; `rollouts/rejected-000010.jsonl.zst` those that were
rejected, or drawn again, since the step before. Files written before texts were kept can be read, too.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import accumulate, groupby
from operator import itemgetter
from pathlib import Path

import msgspec
import zstandard

from offbeat.errors import DataError

FOLDER = "rollouts"
_FILE = re.compile(r"(step|rejected)-(\d{6,})\.jsonl\.zst")
_ADDRESS = re.compile(r"(\d{1,12})(r?)\.(\d{1,9})\.(\d{1,9})", re.ASCII)
_CHUNK_BYTES = 1 << 20

Numbers = list[float | None]
"""One number per token; None where there is none that is finite."""


@dataclass(frozen=True)
class KeptTurn:
    """Where a turn ends; see `TurnEnd`. The reward is None if it is not finite, for which the trajectory was left out."""

    end: int
    reward: float | None = 0.0
    state: str = ""
    order: int = 0


@dataclass(frozen=True)
class KeptTrajectory:
    """A trajectory, with the step's columns for it. Arrays have one entry per token, [L]; names are those of `Trajectory`.

    Attributes:
        rollout_logprobs: rounded to five digits, such as -0.69315; 0 where the policy did not generate, None where the engine gave none.
        lengths: characters of `text` of each token, such as [1, 5, 2]; empty in files that have no texts.
        trained: whether the step's loss has a term for it. Others were left out: unusable, or of advantage 0.
        advantages: of generated tokens, 0 elsewhere; empty if `trained` is false.
        prox_logprobs, ref_logprobs: under the policy before the update, and under the reference; empty if the algorithm does not read them.
    """

    tokens: list[int]
    loss_mask: list[bool]
    rollout_logprobs: Numbers
    versions: list[int]
    reward: float | None
    reason: str = "stop"
    num_retries: int = 0
    named_rewards: dict[str, float | None] = field(default_factory=dict)
    episode: int | None = None
    agent: str = ""
    turns: tuple[KeptTurn, ...] = ()
    malformed_calls: int = 0
    text: str = ""
    lengths: list[int] = field(default_factory=list)
    trained: bool = False
    advantages: Numbers = field(default_factory=list)
    prox_logprobs: Numbers = field(default_factory=list)
    ref_logprobs: Numbers = field(default_factory=list)

    @property
    def pieces(self) -> list[str]:
        """[L], the text of each token; where texts were not kept, its id."""
        if len(self.lengths) != len(self.tokens):
            return [f"<{token}>" for token in self.tokens]
        ends = list(accumulate(self.lengths))
        return [self.text[end - length : end] for end, length in zip(ends, self.lengths, strict=True)]

    @property
    def completion(self) -> str:
        """The policy's text, its turns joined by line breaks."""
        runs = groupby(zip(self.pieces, self.loss_mask, strict=True), key=itemgetter(1))
        return "\n".join("".join(piece for piece, _ in run) for generated, run in runs if generated)

    @property
    def num_generated(self) -> int:
        return sum(self.loss_mask)

    @property
    def version(self) -> int | None:
        """Oldest version that sampled one of its tokens; None if nothing was generated."""
        return min((v for v, generated in zip(self.versions, self.loss_mask, strict=True) if generated), default=None)

    @property
    def advantage(self) -> float | None:
        """Mean advantage of the generated tokens; None if it was not trained on."""
        known = [a for a, generated in zip(self.advantages, self.loss_mask, strict=False) if generated and a is not None]
        return sum(known) / len(known) if known else None


@dataclass(frozen=True)
class KeptGroup:
    """The samples of one prompt, as they were played.

    Attributes:
        prompt_id: "epoch:index" with the row's index in the data, e.g. "0:17".
        prompt: the row's prompt as text, messages of a chat one below the other.
        rejected: why none of the group is trained on; None if it is.
        why: the kind of that reason in two words, such as "too long".
        drawn_again: whether a rejected group's prompt came again.
        step: global step that trained on it, or that was stored next after it was rejected.
    """

    prompt_id: str
    admitted_version: int
    trajectories: tuple[KeptTrajectory, ...] = ()
    rejected: str | None = None
    prompt: str = ""
    answer: str = ""
    why: str = ""
    drawn_again: bool = False
    step: int = 0


_DECODER = msgspec.json.Decoder(KeptGroup)


@dataclass(frozen=True, order=True)
class KeptFile:
    """A file of rollouts; they are ordered by step."""

    step: int
    is_rejected: bool
    path: Path = field(compare=False)


@dataclass(frozen=True, order=True)
class Address:
    """Address of a run's trajectory: "12.3.0" is step 12, group 3 of its file, trajectory 0; "12r.3.0" is in the rejected groups' file."""

    step: int
    is_rejected: bool
    group: int
    place: int

    def __str__(self) -> str:
        return f"{self.step}{'r' if self.is_rejected else ''}.{self.group}.{self.place}"

    @classmethod
    def parse(cls, text: str) -> "Address":
        """Read an address; raises DataError if the text is none."""
        match = _ADDRESS.fullmatch(text)
        if match is None:
            raise DataError(
                f"a rollout is named by step, group and sample, such as 12.3.0, or 12r.3.0 of a rejected group; got {text[:40]!r}")
        return cls(int(match[1]), bool(match[2]), int(match[3]), int(match[4]))


def find_group(run_dir: Path, address: Address) -> KeptGroup:
    """Return the group of a trajectory; raises DataError if the run has not kept it, or its file cannot be read."""
    for file in kept_files(run_dir):
        if (file.step, file.is_rejected) == (address.step, address.is_rejected):
            group = group_at(file, address.group)
            if group is not None and address.place < max(len(group.trajectories), 1):
                return group
    raise DataError(f"{run_dir} has no rollout {address}; steps may have been thinned out (telemetry.rollouts_max_bytes)")


def kept_files(run_dir: Path) -> list[KeptFile]:
    """Return the files of rollouts in a run's folder, by step; empty if there are none."""
    folder = run_dir / FOLDER
    if not folder.is_dir():
        return []
    named = ((path, _FILE.fullmatch(path.name)) for path in folder.iterdir())
    return sorted(KeptFile(int(match[2]), match[1] == "rejected", path) for path, match in named if match is not None)


def read_rollouts(run_dir: Path, *, step: int | None = None, rejected: bool = False) -> Iterator[KeptGroup]:
    """Read the groups that a run has kept, in the order of steps; raises DataError if a file cannot be read.

    Args:
        step: only this global step; None is all that are kept.
        rejected: also those that were not trained on.
    """
    for file in kept_files(run_dir):
        if (step is None or file.step == step) and (rejected or not file.is_rejected):
            yield from read_groups(file)


def read_groups(file: KeptFile) -> Iterator[KeptGroup]:
    """Read the groups of one file, none if it is gone; raises DataError if the file cannot be read."""
    return (parse_group(line, file, position) for position, line in enumerate(read_lines(file)))


def group_at(file: KeptFile, position: int) -> KeptGroup | None:
    """Return one group of a file, None if there is no such line; raises DataError if the file cannot be read."""
    line = next((line for number, line in enumerate(read_lines(file)) if number == position), None)
    return None if line is None else parse_group(line, file, position)


def parse_group(line: bytes, file: KeptFile, position: int) -> KeptGroup:
    """Parse a line of a file; raises DataError if it is no group."""
    try:
        return replace(_DECODER.decode(line), step=file.step)
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise DataError(f"{file.path}: line {position + 1} is not a group of rollouts: {exc}; remove the file") from exc


def read_lines(file: KeptFile) -> Iterator[bytes]:
    """Read the lines of one file, none if it is gone; raises DataError if the file is damaged."""
    rest = b""
    try:
        with file.path.open("rb") as raw, zstandard.ZstdDecompressor().stream_reader(raw) as reader:
            while chunk := reader.read(_CHUNK_BYTES):
                *lines, rest = (rest + chunk).split(b"\n")
                yield from lines
    except FileNotFoundError:
        return
    except (zstandard.ZstdError, OSError) as exc:
        raise DataError(f"{file.path} cannot be read: {exc}; remove the file") from exc
    if rest:
        yield rest
