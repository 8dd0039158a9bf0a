"""One rank's trainer: called by the train worker, or in SPMD mode from the loop's own process, with one dataclass per call.

`ModelTrainer` trains a whole model, `BankTrainer` adapters on a frozen one; their common part is here. All ranks call the same
methods, each with its own share of a batch. Loss weights hold global denominators, so gradients are *summed* over ranks, and any split of
a batch over ranks and micro-batches gives the same step. A rank never raises between two collectives because of its data: a loss or
gradient that is not finite is seen by all ranks, which all skip the update and report it.
"""

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from offbeat.algorithms.adam import AdamParams
from offbeat.algorithms.objectives import reads_of
from offbeat.config.for_processes import RankConfig
from offbeat.data.batch import Batch
from offbeat.data.packing import PackedRow, find_prompts
from offbeat.errors import ConfigError, DivergedError
from offbeat.model.logprobs import packs_rows, unscored
from offbeat.pulse import progress, work
from offbeat.sync.mesh import ProcessGroups
from offbeat.sync.platform import current_platform
from offbeat.sync.weight_broadcast import WeightBroadcast
from offbeat.telemetry.tracker import StatsTracker
from offbeat.trainer.effort import Effort
from offbeat.trainer.heap import Heap
from offbeat.trainer.messages import (
    Dtype,
    ExportRequest,
    Folder,
    LoadedStep,
    OptimStep,
    Policy,
    ScoredShare,
    Scores,
    ScoreShare,
    Stepped,
    TargetScores,
    Trained,
    TrainStep,
    WriteRequest,
    Written,
)
from offbeat.trainer.old_routes import OldRoutes
from offbeat.trainer.optim import all_finite
from offbeat.trainer.policy import Predict, autocast, canary_logprobs, predict_logprobs, score_row
from offbeat.trainer.router_loss import router_loss_of
from offbeat.trainer.snapshots import Snapshot
from offbeat.trainer.stats import Update, merge
from offbeat.user_code.functions import at_step

WHOLE = ""
"""The name of everything that a run trains: the whole model, or its only adapter."""


class Trainer(ABC):
    """Weights, their gradients and an optimizer; `step` is the number of training steps since the optimizer was fresh."""

    _model: PreTrainedModel
    """The trained model, or the model under the adapters; subclasses set it."""
    _predict: Predict = staticmethod(predict_logprobs)
    _predicts = "logprobs"
    """Name of `_predict`'s result among the columns of `TargetScores`."""

    def __init__(self, module: nn.Module, config: RankConfig, groups: ProcessGroups) -> None:
        """`module` is the model to call in forward passes."""
        self.step = 0
        self.groups = groups
        self._module = module
        self._run = config
        self._config = config.train
        self._keeps_reference = config.algorithm.needs_reference and self._predicts == "logprobs"
        self._refresh_steps = config.algorithm.reference_refresh_steps if self._keeps_reference else 0
        self._heap = Heap()
        self._router_loss = router_loss_of(module, config, groups, is_policy=self._predicts == "logprobs")
        self._old_routes = OldRoutes(module, config, is_policy=self._predicts == "logprobs")
        self._offer: WeightBroadcast | None = None
        self._last: tuple[str, Snapshot] | None = None
        """On rank 0, the folder and snapshot of the newest version; kept only if the next one may be written as its changes."""

    # -- training ----------------------------------------------------------------------------------------------------------------------

    def train_step(self, request: TrainStep) -> Trained:
        """Update everything that a run trains, once per minibatch; collective.

        With one minibatch the proximal policy is the current one and costs nothing; with several, its log-probabilities are computed first.
        Each of K minibatches holds about 1/K of the loss weights, so its loss is scaled by K. Every `algorithm.reference_refresh_steps` the
        policy becomes the reference.
        """
        self._effort.begin_step()
        batch = request.batch
        plan = [self._rows(batch, microbatches) for microbatches in request.minibatches]
        with self.groups.sync.region("train_step"), at_step(self.step + 1):
            if len(plan) > 1:
                batch = self._before_updates(batch, [row for rows in plan for row in rows])
                plan = self._old_routes.replayed(plan)
            updates = [self._update(batch, rows, request.params, scale=len(plan)) for rows in plan]
        self.step += 1
        self._check_finite(request.params)
        if self._refresh_steps and self.step % self._refresh_steps == 0:
            self._refresh_reference()
        return self._effort.trained(merge(updates, lr=request.params.lr))

    def _before_updates(self, batch: Batch, rows: Sequence[PackedRow]) -> Batch:
        """Run the rows of several updates under the policy as it is, if the losses or replayed experts need it."""
        if any("prox_logprobs" in reads_of(loss) for loss in batch.losses):
            scores = self._score(batch, self._old_routes.recording(rows))
            return batch.with_columns(prox_logprobs=scores.columns["logprobs"])
        for row in self._old_routes.recording(rows) if self._old_routes.is_on else ():
            self._run_row(batch, row)
        return batch

    def score(self, request: ScoreShare) -> ScoredShare:
        """Score a batch's targets under the policy or under its reference, without gradients; collective.

        The same micro-batches give the very log-probabilities that the forward passes of a training step do.

        Raises:
            ConfigError: the reference is to score, and the algorithm has no use for one; on all ranks alike, before any waits.
        """
        if request.of == "reference" and not self._keeps_reference:
            raise ConfigError(
                "there is no reference policy here: only algorithm.kl_loss and algorithm.reward_kl, or algorithm.objective_reads, use one")
        start_s, batch = time.time(), request.batch
        rows = self._rows(batch, request.microbatches)
        with self.groups.sync.region("score"):
            scores = self._score(batch, rows, of=request.of, with_entropy=request.with_entropy)
        return ScoredShare(request.sequences, scores, start_s, time.time())

    def forward(self, batch: Batch) -> Scores:
        """Score a batch without gradients. Raises as `forward_backward`."""
        return self._pass(batch, learn=False)

    def forward_backward(self, batch: Batch) -> Scores:
        """Score a batch and accumulate the gradients of its loss.

        `batch` is this rank's share, which may be empty; sequences with equal beginnings share them, whatever their group ids are.

        Raises:
            ConfigError: there is no such adapter.
            DataError: a sequence exceeds the token budget of a micro-batch. In both cases nothing was computed.
        """
        return self._pass(batch, learn=True)

    @torch.no_grad()
    def optim_step(self, request: OptimStep) -> Stepped:
        """Update the named weights with the gradients of all ranks; collective. A gradient of zero is a step like any other.

        If the norm of a gradient, or an adapter's weights after the step, would not be finite, weights, moments and step count stay as
        they are; the gradient is dropped all the same.

        Raises:
            ConfigError: there is no such adapter.
            DivergedError: the weights of a whole model are not finite.
        """
        names = sorted(request.params)
        self._check(names)
        self.groups.sync.arrive("optim_step", keys=names)
        with self.groups.sync.region("optim_step_gradients") if self.groups.world > 1 and names else nullcontext():
            norms = self._gradient_norms(names)
        for name, norm in norms.items():
            if math.isfinite(norm) and not self._try_step(name, request.params[name]):
                norms[name] = math.nan
        self._clear(names)
        return Stepped(norms, {name: self._steps(name) for name in names})

    # -- weights -----------------------------------------------------------------------------------------------------------------------

    def write_weights(self, request: WriteRequest) -> Written:
        """Score the canary, and write or offer the weights on a thread beside; collective. No rank waits in a collective for a disk.

        An offer stands until the next weights are written.

        Raises:
            StorageError: on rank 0, after the last collective: the folder exists already, or could not be written.
            PortBusyError: on rank 0, after the last collective: no port can be served on this host.
        """
        self._check([request.name])
        if self._offer is not None:
            self._offer.close()
        written = self._begin_write(request)
        logprobs = self.canary(request.canary, dtype=request.dtype, name=request.name)
        answer = replace(written(), canary_logprobs=logprobs)
        if self._run.cluster.take_turns:
            current_platform.return_memory()  # the engines need it until the next step
        return answer

    def _begin_write(self, request: WriteRequest) -> Callable[[], Written]:
        """Take the weights, collective, and have rank 0 write or offer them on a thread.

        Meanwhile the canary may be scored: that leaves weights as they are, or rounds those of which the snapshot has rounded copies.

        Returns:
            Waits for the thread; its answer lacks the canary. Ranks call it after the canary.
        """
        with self.groups.sync.region("publish"):
            outlives = not request.is_there and (request.broadcast is not None or self._run.weights.sends_changes)
            snapshot = self.snapshot(request.dtype, name=request.name, copies=outlives)
        if self.groups.rank != 0:
            return partial(Written, "", ())
        thread = ThreadPoolExecutor(1, thread_name_prefix="write_weights")
        writing = thread.submit(self._write, snapshot, request)
        thread.shutdown(wait=False)  # it ends when that is done
        return writing.result

    def _write(self, snapshot: Snapshot, request: WriteRequest) -> Written:
        with work("write_weights"):
            if request.is_there:
                return Written(snapshot.fingerprint(), ())
            folder, broadcast = Path(request.folder), request.broadcast
            last, self._last = self._last, None
            since = last[1] if last is not None and request.base and last[0] == request.base else None
            fingerprint, address, num_bytes = snapshot.fingerprint(), "", 0
            if broadcast is None:
                num_bytes = 0 if since is None else snapshot.write_changes(folder, since=since, base=Path(request.base))
                if not num_bytes:
                    snapshot.write(folder)
            else:
                progress("offer_weights")
                self._offer = snapshot.offer(
                    folder if broadcast.by_folder else None, host=broadcast.host, num_receivers=broadcast.num_receivers,
                    timeout_s=broadcast.timeout_s, since=since, base=request.base)
                if self._offer is not None:
                    address, num_bytes = self._offer.address, self._offer.changes_bytes
            if self._run.weights.sends_changes:
                self._last = request.folder, snapshot
            return Written(fingerprint, (), address, num_bytes or snapshot.num_bytes, base=request.base if num_bytes else "")

    def export(self, request: ExportRequest) -> None:
        """Write a Hugging Face folder for other programs on rank 0, including the tokenizer; collective. Raises as `write_weights`.

        An adapter is merged into the model, and also written separately, as `adapter` in the folder.
        """
        with self.groups.sync.region("save_hf"):
            snapshot = self.snapshot(request.dtype, merges=True, copies=False)
        if self.groups.rank == 0:
            snapshot.export(Path(request.path), tokenizer_folder=Path(request.tokenizer))

    def canary(self, tokens: Sequence[int], *, dtype: Dtype = "float32", name: str = WHOLE) -> tuple[float, ...]:
        """Return the log-probability, at temperature 1 and without autocast, of each token but the first; collective, equal on all ranks.

        `dtype` is the number format of the published weights, under which tokens are scored.
        """
        with self.groups.sync.region("canary"), self._published(name, dtype):
            return canary_logprobs(self._module, tokens)

    @abstractmethod
    def snapshot(self, dtype: Dtype, *, name: str = WHOLE, merges: bool = False, copies: bool = True) -> Snapshot:
        """Return a snapshot of the trainee; only rank 0's is complete. Collective.

        Args:
            merges: whether it will be exported, for which an adapter needs the weights of its model.
            copies: whether it is used after the next step; otherwise a model's may be the weights themselves.
        """

    def restart_optimizer(self, request: None = None) -> None:  # noqa: ARG002
        """Start over with a fresh optimizer, at training step 0; the weights stay, and are the reference if they have been trained."""
        if self._keeps_reference and self.step:
            self._refresh_reference()
        self.step = 0
        self._renew_optimizer()

    @abstractmethod
    def save(self, request: Folder) -> None:
        """Write all that `load` needs to go on exactly, but accumulated gradients; collective. StorageError leaves old contents intact."""

    @abstractmethod
    def load(self, request: Folder) -> LoadedStep:
        """Load a checkpoint of `save`, on any number of ranks; collective.

        Raises:
            StorageError: there is no checkpoint that all ranks can read; nothing has changed.
            ModelError: an adapter does not fit here.
        """

    # -- differences between the two kinds ---------------------------------------------------------------------------------------------

    @abstractmethod
    def _renew_optimizer(self) -> None:
        """Replace the optimizer by a fresh one."""

    @abstractmethod
    def _check(self, names: Collection[str]) -> None:
        """Raise ConfigError for an unknown name, on all ranks alike and before any of them waits for another."""

    @abstractmethod
    def _rows(self, batch: Batch, microbatches: Sequence[np.ndarray]) -> list[PackedRow]:
        """Return the row of each micro-batch, [N] int64 of sequence indices; the dummy row for one that scores nothing."""

    @abstractmethod
    def _own_rows(self, batch: Batch) -> list[PackedRow]:
        """Return the rows of this rank's whole share."""

    @abstractmethod
    def _using(self, batch: Batch, row: PackedRow, *, learn: bool, last: bool = True) -> AbstractContextManager:
        """Return the context of a row's forward pass, and of its backward pass to `learn`; in the `last` one ranks may reduce gradients."""

    @abstractmethod
    def _referring(self) -> AbstractContextManager[nn.Module]:
        """Return the context of a forward pass without gradient under the reference policy, which gives the module to call."""

    @abstractmethod
    def _refresh_reference(self) -> None:
        """Make the present policy the reference, which checkpoints hold from then on; every rank copies its own part."""

    @abstractmethod
    def _published(self, name: str, dtype: Dtype) -> AbstractContextManager:
        """Return the context of forward passes without gradient under the weights as they are published."""

    @abstractmethod
    def _gradient_norms(self, names: Sequence[str]) -> dict[str, float]:
        """Return the norms of the gradients summed over all ranks; sums them if that has not happened yet."""

    @abstractmethod
    def _step(self, name: str, params: AdamParams) -> None:
        """Update with the gradient whose norm was computed last, clipped to `clip_norm`."""

    def _try_step(self, name: str, params: AdamParams) -> bool:
        """Update as `_step` does, or return False and leave everything as it was where the weights would not be finite."""
        self._step(name, params)
        self._check_finite(params)
        return True

    @abstractmethod
    def _weights(self) -> Iterable[Tensor]:
        """Return this rank's part of the trained weights, such as [V / R, H]."""

    def _check_finite(self, params: AdamParams) -> None:
        """Check that weights are finite before they are saved or published; otherwise only the next batch, without a loss, would show it.

        Raises:
            DivergedError: a weight of this rank is NaN or infinite.
        """
        if not all_finite(self._weights()):
            raise DivergedError(
                f"weights are not finite any more after {self.step} updates, with a learning rate of {params.lr:g} and a weight decay of"
                f" {params.weight_decay:g}; lower them, and go on from the last checkpoint, whose weights are finite")

    @abstractmethod
    def _steps(self, name: str) -> int:
        """Return the number of updates so far."""

    @abstractmethod
    def _clear(self, names: Collection[str]) -> None:
        """Drop gradients."""

    @property
    def _gradient_scale(self) -> int:
        """Factor of losses that undoes the division in the reduction over ranks."""
        return 1

    @cached_property
    def _effort(self) -> Effort:
        return Effort(self._model.config.to_dict(), self._run, ranks_per_share=self.groups.shape.ranks_per_share)

    # -- passes ------------------------------------------------------------------------------------------------------------------------

    def _pass(self, batch: Batch, *, learn: bool) -> Scores:
        rows = self._own_rows(batch := find_prompts(batch))
        logprobs, losses = np.zeros(batch.num_targets, np.float32), np.zeros(len(batch), np.float64)
        try:
            for number, row in enumerate(rows):
                progress("forward")
                with self._using(batch, row, learn=learn, last=number == len(rows) - 1), torch.set_grad_enabled(learn):
                    with autocast(self._config, self._module):
                        scored = score_row(self._module, batch, row, predict=self._predict, temperature=self._temperature(batch))
                    if learn:
                        (scored.losses.sum() * self._gradient_scale).backward()
                logprobs[row.batch_index] = scored.predictions.detach().cpu().numpy()
                losses += np.bincount(batch.target_sequences[row.batch_index], scored.losses.detach().cpu().numpy(), minlength=len(batch))
        finally:
            self._heap.return_free()
        return Scores(logprobs, losses.astype(np.float32))

    def _score(self, batch: Batch, rows: Iterable[PackedRow], *, of: Policy = "policy", with_entropy: bool = False) -> TargetScores:
        """Return the scores of the targets in these rows, 0 for others."""
        with_entropy = with_entropy and self._predicts == "logprobs"  # a value has none
        columns = {name: np.zeros(batch.num_targets, np.float32) for name in (self._predicts, *(["entropy"] if with_entropy else []))}
        temperature = self._temperature(batch)
        for row in rows:
            progress("forward")
            self._effort.passes(row, learns=False)
            with self._effort.computing(), self._scoring(batch, row, of) as module, autocast(self._config, module):
                found, entropy = self._predict(module, row, temperature=temperature, with_entropy=with_entropy)
            columns[self._predicts][row.batch_index] = found.cpu().numpy()
            if entropy is not None:
                columns["entropy"][row.batch_index] = entropy.cpu().numpy()
        return TargetScores(columns)

    @contextmanager
    def _scoring(self, batch: Batch, row: PackedRow, of: Policy) -> Iterator[nn.Module]:
        """Surround a row's forward pass without gradient; gives the module to call."""
        if of == "reference":
            with self._referring() as module:
                yield module
        else:
            with self._using(batch, row, learn=False):
                yield self._module

    def _run_row(self, batch: Batch, row: PackedRow) -> None:
        """Run a row without gradients, to record its routers' choices; a model that packs its rows leaves out the head."""
        progress("forward")
        self._effort.passes(row, learns=False)
        bare = unscored(row) if packs_rows(self._module) else row
        with self._effort.computing(), self._scoring(batch, row, "policy") as module, autocast(self._config, module):
            self._predict(module, bare, temperature=1.0)

    def _update(self, batch: Batch, rows: Sequence[PackedRow], params: AdamParams, *, scale: int) -> Update:
        tracker = StatsTracker()
        routers = self._router_loss.of_minibatch(batch, rows, run=partial(self._run_row, batch), wait=self._effort.waiting)
        for number, row in enumerate(rows):
            # With DDP the last micro-batch reduces gradients over ranks; earlier ones only accumulate.
            self._effort.passes(row, learns=True)
            with self._using(batch, row, learn=True, last=number == len(rows) - 1), self._effort.computing():
                progress("forward")
                with routers.recording(row), autocast(self._config, self._module):
                    scored = score_row(self._module, batch, row, predict=self._predict, temperature=self._temperature(batch), report=True)
                with tracker.scope("train"):
                    tracker.denominator(tokens=torch.ones_like(scored.losses))
                    tracker.stat(reduce="sum", loss=scored.losses)
                tracker.stat(scored.report.means, denominator="train/tokens")
                tracker.stat(scored.report.minima, reduce="min")
                tracker.stat(scored.report.maxima, reduce="max")
                for name, (values, where) in scored.report.groups.items():
                    tracker.stat({name: values}, where=where)
                progress("backward")
                self._effort.propagate(routers.added_to(scored.losses.sum() * (scale * self._gradient_scale), scale=self._gradient_scale))
        with torch.no_grad():
            norm = self._gradient_norms([WHOLE])[WHOLE]
            update = Update(tracker.export_all(self.groups.shares, point="train_stats"), grad_norm=norm, routers=routers.metrics)
            # Every rank has the same numbers here, so all take the same branch.
            if update.is_sound:
                progress("optimizer")
                with self._effort.computing():
                    self._step(WHOLE, params)
        # Here rather than before the next step: a checkpoint of an optimizer with pending gradients has no state from which to resume.
        self._clear([WHOLE])
        return update

    def _temperature(self, batch: Batch) -> float:
        """Return the temperature of the log-probabilities that the batch's losses need: of sampling, or 1."""
        sampled = any(loss.own_samples for loss in batch.losses)
        return (self._run.rollout.temperature or 1.0) if sampled else 1.0
