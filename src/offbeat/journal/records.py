"""The records of a journal, and their bytes: what has happened to each prompt, and which steps were done on which groups.

Called by `journal`; `standing` says what follows from them. A record is one byte for its kind, and the record encoded by `data.wire`; the
trajectories of a group are compressed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import zstandard

from offbeat.data import wire
from offbeat.data.expert_routes import pack_routes, unpack_routes
from offbeat.data.sample_supports import pack_supports, unpack_supports
from offbeat.data.stream import StreamState
from offbeat.data.trajectory import DTYPES, Group, Trajectory, TurnEnd
from offbeat.errors import DataError
from offbeat.types import Version


@dataclass(frozen=True)
class JournalHead:
    """Where a process that draws data stood when its journal was begun.

    Attributes:
        in_flight: ids of prompts drawn and neither trained on nor rejected, oldest first.
        num_flat_rejected: groups of equal rewards rejected for the batch that was being filled.
        num_tries: how often prompts in flight had failed, by id.
    """

    stream: StreamState
    in_flight: tuple[str, ...]
    num_flat_rejected: int = 0
    num_tries: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class JournalBegun:
    """The records that follow continue the checkpoint of this step, or the initial model if it is 0.

    Attributes:
        identity: JSON of the run's `Identity`, with which the records may be used.
        num_held: number of records after this one that belong to it: the groups and answered calls on hand.
    """

    global_step: int
    identity: bytes
    head: "JournalHead"
    num_held: int = 0


@dataclass(frozen=True)
class PromptDrawn:
    """A prompt was drawn and its group admitted under the served `version`; the stream of prompts is now at `epoch` and `position`."""

    prompt_id: str
    version: Version
    epoch: int
    position: int


@dataclass(frozen=True)
class GroupFinished:
    """A group is ready to be trained on; `packed` is the whole group, as `pack` gives it."""

    prompt_id: str
    packed: bytes


@dataclass(frozen=True)
class GroupSettled:
    """A group is not trained on.

    Attributes:
        kind: the reason in two words, such as "timed out".
        again: whether its prompt is drawn again.
        rewards: of its usable samples, if the curriculum has heard of them.
    """

    prompt_id: str
    kind: str
    reason: str
    again: bool
    rewards: tuple[float, ...] = ()


@dataclass(frozen=True)
class BatchTaken:
    """A step trains on these groups, in this order."""

    global_step: int
    prompt_ids: tuple[str, ...]


@dataclass(frozen=True)
class StepComputed:
    """How a step was computed, so that it can be computed again, and what came out.

    Attributes:
        cost: coefficients of the cost model by which its sequences were spread over the ranks; see `data.cost.CostModel`.
        fingerprint: of the weights that it published, as `model.fingerprint` computes it; "" in a process that does not see them.
    """

    global_step: int
    cost: tuple[float, float, float]
    fingerprint: str


@dataclass(frozen=True)
class StepTrained:
    """A step was trained, and its weights are on their way to the engines.

    `state` is JSON of the loop's `SavedState` without heads and identity; with the step's statistics until it has ended.
    """

    global_step: int
    state: bytes


@dataclass(frozen=True)
class StepEnded:
    """A step's evaluations are done and its row of metrics is written; `state` is as in `StepTrained`."""

    global_step: int
    state: bytes


@dataclass(frozen=True)
class CheckpointKept:
    """A checkpoint of this step is complete."""

    global_step: int


@dataclass(frozen=True)
class CallHeard:
    """An engine has answered a call of a group that still runs, or a part of it.

    Attributes:
        version: version at which the group was admitted.
        number: of the call in its group, from 0.
        key: digest of what was asked; equal calls have equal ones.
        packed: what is new of each of its samples, compressed; see `unpack_answers`.
    """

    prompt_id: str
    version: Version
    number: int
    key: bytes
    packed: bytes


Record = (
    JournalBegun | PromptDrawn | GroupFinished | GroupSettled | BatchTaken | StepTrained | StepEnded | CheckpointKept | CallHeard
    | StepComputed)

_KINDS: tuple[type[Record], ...] = (
    JournalBegun, PromptDrawn, GroupFinished, GroupSettled, BatchTaken, StepTrained, StepEnded, CheckpointKept, CallHeard,
    StepComputed)


def encode_record(record: Record) -> bytes:
    """Return a record's bytes."""
    return bytes([_KINDS.index(type(record))]) + wire.encode(record)


def decode_record(data: bytes) -> Record:
    """Return the record of bytes from `encode_record`; raises DataError if they are none."""
    if not data or data[0] >= len(_KINDS):
        raise DataError(f"a record of a journal begins with a byte below {len(_KINDS)}, got {data[:1]!r}")
    return wire.decode(_KINDS[data[0]], memoryview(data)[1:])


@dataclass(frozen=True)
class _Rest:
    """All of a trajectory but its arrays; see `Trajectory`."""

    length: int
    reward: float
    reason: str
    num_retries: int
    named_rewards: dict[str, float]
    episode: int | None
    agent: str
    turns: tuple[TurnEnd, ...]
    malformed_calls: int
    routes: bytes = b""
    supports: bytes = b""


@dataclass(frozen=True, eq=False)
class _PackedGroup:
    """A group whose trajectories lie back to back: T tokens in each of `columns`, as in `DTYPES`."""

    prompt_id: str
    admitted_version: Version
    columns: tuple[np.ndarray, ...]
    rest: tuple[_Rest, ...]
    metrics: dict[str, float]


_COMPRESSOR = zstandard.ZstdCompressor(level=1)
"""One at a time may use it: the thread of the only writer of a process."""


def pack(group: Group) -> bytes:
    """Return a group with all its trajectories as bytes, compressed. Not to be called by several threads."""
    own = group.trajectories
    columns = tuple(np.concatenate([np.zeros(0, dtype), *(getattr(t, name) for t in own)], dtype=dtype) for name, dtype in DTYPES.items())
    rest = tuple(
        _Rest(len(t), t.reward, t.reason, t.num_retries, t.named_rewards, t.episode, t.agent, t.turns, t.malformed_calls,
              b"" if t.routes is None else pack_routes(t.routes), b"" if t.supports is None else pack_supports(t.supports)) for t in own)
    return _COMPRESSOR.compress(wire.encode(_PackedGroup(group.prompt_id, group.admitted_version, columns, rest, group.metrics)))


def unpack(packed: bytes) -> Group:
    """Return the group of bytes from `pack`."""
    whole = wire.decode(_PackedGroup, zstandard.ZstdDecompressor().decompress(packed))
    ends = np.cumsum([rest.length for rest in whole.rest]).tolist()
    trajectories = tuple(
        _trajectory([column[end - rest.length : end] for column in whole.columns], rest)
        for rest, end in zip(whole.rest, ends, strict=True))
    return Group(whole.prompt_id, whole.admitted_version, trajectories, metrics=whole.metrics)


def _trajectory(columns: Sequence[np.ndarray], rest: _Rest) -> Trajectory:
    tokens, loss_mask, logprobs, versions = columns
    return Trajectory(
        tokens, loss_mask, logprobs, versions, rest.reward, rest.reason, rest.num_retries, rest.named_rewards, rest.episode, rest.agent,
        rest.turns, rest.malformed_calls, unpack_routes(rest.routes) if rest.routes else None,
        unpack_supports(rest.supports) if rest.supports else None)


@dataclass(frozen=True, eq=False)
class HeardSample:
    """L tokens of a sample, from its token `start` on; see `inference.sampling.Sample`.

    Attributes:
        finish_reason: "" while the sample is generated.
        text: of the whole sample, once it is finished.
        routes: as of a `Sample`, once it is finished; of no elements where there are none.
        supports: bytes of those of a `Sample`, once it is finished; b"" where there are none.
    """

    tokens: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    start: int = 0
    finish_reason: str = ""
    text: str = ""
    routes: np.ndarray = field(default_factory=partial(np.zeros, (0, 0), np.uint8))
    supports: bytes = b""

    def followed_by(self, more: "HeardSample") -> "HeardSample":
        """Return this with the tokens that follow; those of `more` count where both have some."""
        tokens, logprobs, versions = (
            np.concatenate([old[: more.start - self.start], new])
            for old, new in ((self.tokens, more.tokens), (self.logprobs, more.logprobs), (self.versions, more.versions)))
        return HeardSample(tokens, logprobs, versions, self.start, more.finish_reason, more.text, more.routes, more.supports)


@dataclass(frozen=True, eq=False)
class CallEntry:
    """An answered call of a group that still runs, which is packed when it is written; see `CallHeard`."""

    prompt_id: str
    version: Version
    number: int
    key: bytes
    answers: tuple[HeardSample, ...]

    @property
    def num_bytes(self) -> int:
        return 500 + sum(200 + 12 * len(each.tokens) for each in self.answers)

    def to_bytes(self) -> bytes:
        packed = _COMPRESSOR.compress(wire.encode(self.answers))
        return encode_record(CallHeard(self.prompt_id, self.version, self.number, self.key, packed))


def unpack_answers(packed: bytes) -> tuple[HeardSample, ...]:
    """Return the answers of a `CallHeard`."""
    return wire.decode(tuple[HeardSample, ...], zstandard.ZstdDecompressor().decompress(packed))


@dataclass(frozen=True)
class RecordEntry:
    """A record that is encoded when it is written."""

    record: Record

    @property
    def num_bytes(self) -> int:
        return 500

    def to_bytes(self) -> bytes:
        return encode_record(self.record)


@dataclass(frozen=True, eq=False)
class GroupEntry:
    """A finished group, which is packed when it is written."""

    group: Group

    @property
    def num_bytes(self) -> int:
        supports = sum(t.supports.words.nbytes for t in self.group.trajectories if t.supports is not None)
        return 500 + 13 * self.group.num_tokens + supports

    def to_bytes(self) -> bytes:
        group = self.group
        return encode_record(GroupFinished(group.prompt_id, pack(group)))
