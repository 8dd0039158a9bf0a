"""Requests to a model, and their progress: the job of each for the schedule, and its outcome, made from turns' results or errors.

Created by `service`, carried out by `training` and `saving`.
"""

import logging
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from offbeat.algorithms.adam import AdamParams
from offbeat.data.batch import Batch
from offbeat.errors import OffbeatError, PublishError, StorageError, UserError
from offbeat.service.checkpoints import CheckpointError
from offbeat.service.cost import cost_of_folder, cost_of_pass, cost_of_step, datum_sizes
from offbeat.service.errors import outside
from offbeat.service.futures import Future
from offbeat.service.ids import CheckpointPath
from offbeat.service.models import Model
from offbeat.service.schedule import Job, JobPart, Lane
from offbeat.service.types import Category, Failed, Layout, PassDone, SparseArray, TrainingData
from offbeat.trainer.messages import Scores

_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Pass:
    """A forward pass, followed by a backward pass if `learn`."""

    data: TrainingData
    learn: bool


@dataclass(frozen=True)
class OptimizerStep:
    params: AdamParams


@dataclass(frozen=True)
class Save:
    """Save a checkpoint of weights and optimizer state."""

    name: str
    ttl_s: float | None
    overwrite: bool
    metadata: Mapping[str, str]


@dataclass(frozen=True)
class SaveSampler:
    """Save weights for sampling, under a name, or without one for the sampler with this number."""

    name: str | None
    sampler_seq: int | None
    ttl_s: float | None
    metadata: Mapping[str, str]


@dataclass(frozen=True)
class Export:
    """Export weights for download, in PEFT's format; encrypted for these recipients of age, or plain if there are none."""

    name: str
    ttl_s: float | None
    recipients: tuple[str, ...] = ()


@dataclass(frozen=True)
class Load:
    """Continue from a checkpoint; `creates` if the model begins with it."""

    path: CheckpointPath
    optimizer: bool
    creates: bool = False


@dataclass(frozen=True)
class Leave:
    """Leave the trainers; for good if the session has ended."""

    ends: bool


Request = Pass | OptimizerStep | Save | SaveSampler | Export | Load | Leave
_LANES: Mapping[type, Lane] = {
    OptimizerStep: Lane.STEP, Save: Lane.ALONE, SaveSampler: Lane.ALONE, Export: Lane.ALONE, Load: Lane.ALONE, Leave: Lane.ALONE}


class Work:
    """A request under way.

    Attributes:
        number: number in the order of arrival, over all models.
        seq: number among the model's requests; 0 for internal work, which has no number.
        future: None if nobody waits.
        charged: amounts charged to its owner, to be released when it ends.
        passes: results of the turns so far.
        has_ended: whether it has an outcome.
    """

    def __init__(
        self, number: int, model: Model, seq: int, request: Request, future: Future | None, *, pass_tokens: int = sys.maxsize,
    ) -> None:
        """`pass_tokens` is the budget of a pass."""
        self.number = number
        self.model = model
        self.seq = seq
        self.request = request
        self.future = future
        self.since = time.monotonic()
        self.passes: list[Scores] = []
        self.has_ended = False
        self.charged: Mapping[str, int] = {}
        if isinstance(request, Pass):
            self._sizes = datum_sizes(request.data)
            self.cost = cost_of_pass(request.data, self._sizes, pass_tokens=pass_tokens)
        else:
            self.cost = cost_of_step() if isinstance(request, OptimizerStep) else cost_of_folder()
            self._sizes = np.array([self.cost.tokens], np.int64)

    @property
    def request_name(self) -> str:
        """Name of the request for clients, or its model's name where nobody waits."""
        return self.future.request_id if self.future else self.model.id

    @property
    def charge(self) -> Mapping[str, int]:
        """Amounts to charge to the owner. Only passes are charged tokens; the price of other requests affects only the order of turns."""
        return self.cost.charge if isinstance(self.request, Pass) else {**self.cost.charge, "queued_tokens": 0}

    @property
    def tokens(self) -> int:
        """Tokens charged to its owner's queue."""
        return self.charged.get("queued_tokens", 0)

    def job(self) -> "Job[Work]":
        request, model = self.request, self.model
        lane = (Lane.LEARN if request.learn else Lane.SCORE) if isinstance(request, Pass) else _LANES[type(request)]
        return Job(model.id, model.row.owner, lane, self, sizes=self._sizes)


def params_of(work: Work) -> AdamParams:
    """Return the optimizer settings of a step."""
    assert isinstance(work.request, OptimizerStep), "of the lane of steps"
    return work.request.params


def _data(work: Work) -> TrainingData:
    assert isinstance(work.request, Pass), "of a lane of passes"
    return work.request.data


def datums_of(part: JobPart[Work]) -> Batch:
    """Return the datums of one part of a pass."""
    batch = _data(part.job.item).batch
    return batch if part.end - part.start == len(batch) else batch.select(np.arange(part.start, part.end))


def split(passed: Scores, batches: Sequence[Batch]) -> list[Scores]:
    """Split the result of a pass over consecutive batches into one result per batch."""
    sequences = np.cumsum([0, *map(len, batches)])
    targets = np.cumsum([0, *(batch.num_targets for batch in batches)])
    bounds = zip(pairwise(targets), pairwise(sequences), strict=True)
    return [Scores(passed.logprobs[start:end], passed.losses[first:last]) for (start, end), (first, last) in bounds]


def pass_done(work: Work) -> PassDone:
    """Join the results of all turns, in the form of the targets."""
    data = _data(work)
    logprobs, losses = (np.concatenate([getattr(passed, name) for passed in work.passes]) for name in ("logprobs", "losses"))
    bounds = data.batch.target_offsets
    told = tuple(_laid_out(logprobs[bounds[i] : bounds[i + 1]], layout) for i, layout in enumerate(data.layouts))
    return PassDone(told, losses, {"loss:sum": float(losses.astype(np.float64).sum())})


def _laid_out(logprobs: np.ndarray, layout: Layout) -> np.ndarray | SparseArray:
    return logprobs.reshape(layout.shape) if layout.cells is None else SparseArray(logprobs, layout.cells, layout.shape)


def category_of(exc: Exception) -> Category:
    """Return the category of an error's fault, such as "user"."""
    return "user" if isinstance(exc, UserError) and not isinstance(exc, StorageError) else "server"


def explain(exc: Exception, *, name: str, lost: str = "") -> Failed:
    """Return one sentence for the client whose request is called `name`, and log the whole error.

    `lost` is a sentence about the model's loss; it is added unless the request itself was at fault.
    """
    if category_of(exc) == "user":
        _log.info("%s failed: %s", name, exc)
        return Failed(outside(str(exc), name=name), "user")
    _log.error("%s failed: %s", name, exc, exc_info=not isinstance(exc, OffbeatError))
    sentence, advice = f"the server failed in a way that it did not expect; its log has the reason under {name}", ""
    if isinstance(exc, CheckpointError):
        sentence = outside(str(exc), name=name)
    elif isinstance(exc, PublishError):  # the engines' reasons are only for the log
        sentence = f"no engine takes these weights, and the server's log has the reason under {name}"
        advice = "send the request again, or if the weights have diverged, go on from an older checkpoint"
    elif isinstance(exc, StorageError):  # clients must not learn the operator's paths
        sentence = f"the server could not keep or read what this request needs; its log has the reason under {name}"
    elif isinstance(exc, OffbeatError):
        sentence, advice = "the trainers failed while they worked on this request", "they are started again, so send it again"
    return Failed("; ".join(filter(None, (sentence, lost or advice))), "server")
