"""One rank's train engine under the configuration of a run, with what crosses between processes as its arguments and answers.

A train worker calls it for the controller, a rank of SPMD mode for its own loop; both therefore train, publish and save alike. Every method
is collective. Torch lives here.
"""

import gc
import time
from pathlib import Path
from typing import Self

from offbeat.cluster.messages import BuildRequest, ExportRequest, Objective, Published, PublishRequest, Shard, Trained
from offbeat.config.model import TinyConfig
from offbeat.config.root import Config
from offbeat.dist.mesh import ProcessGroups
from offbeat.dist.offer import Offer
from offbeat.dist.platform import current_platform
from offbeat.model.tiny import build_tiny
from offbeat.pulse import progress
from offbeat.trainer.engine import TrainEngine


def build_model(request: BuildRequest) -> None:
    """Make the tiny model that all ranks and engines then load; on one rank."""
    build_tiny(
        Path(request.folder), tiny=TinyConfig.model_validate_json(request.tiny), vocab_size=request.vocab_size,
        eos_token_id=request.eos_token_id, pad_token_id=request.pad_token_id, seed=request.seed)


class RankEngine:
    """This rank's share of the model and of every step."""

    def __init__(self, engine: TrainEngine, config: Config) -> None:
        self._engine = engine
        self._config = config
        self._offer: Offer | None = None

    @classmethod
    def build(cls, model: str, config: Config, groups: ProcessGroups) -> Self:
        """Load the model, a folder or hub id."""
        engine = TrainEngine.build(
            Path(model), config=config.train, algorithm=config.algorithm, optimizer=config.train.optimizer,
            total_steps=config.run.total_steps, groups=groups, temperature=config.rollout.temperature or 1.0, lora=config.model.lora,
            frozen_dtype=config.model.dtype, seed=config.run.seed)
        gc.freeze()  # what libraries loaded stays for good; walking it again and again costs 0.1 s each time
        return cls(engine, config)

    @property
    def groups(self) -> ProcessGroups:
        return self._engine.groups

    @property
    def step(self) -> int:
        """Training steps done towards the present objective."""
        return self._engine.step

    def set_objective(self, objective: Objective) -> None:
        """Start over with a fresh optimizer; the weights stay."""
        config = self._config
        optimizer = config.sft.optimizer if objective.name == "sft" else config.train.optimizer
        self._engine.set_objective(objective.name, algorithm=config.algorithm, optimizer=optimizer, total_steps=objective.total_steps)

    def train_step(self, shard: Shard) -> Trained:
        """One training step on this rank's share."""
        start_s, busy_before_s = time.time(), current_platform.busy_clock()
        stats = self._engine.train_step(shard.batch, shard.minibatches)
        return Trained(stats.metrics, start_s, time.time(), current_platform.busy_clock() - busy_before_s)

    def publish(self, request: PublishRequest) -> Published:
        """Score the canary, and write or offer the weights on rank 0: last, so that no peer waits in a collective for a disk.

        An offer stands until the next version is published.
        """
        if self._offer is not None:
            self._offer.close()
        canary_logprobs = self._engine.canary(request.canary, dtype=request.dtype)
        if request.broadcast is None:
            return Published(self._engine.publish(Path(request.folder), dtype=request.dtype), canary_logprobs)
        progress("offer_weights")
        fingerprint, self._offer = self._engine.offer(
            Path(request.folder), dtype=request.dtype, host=request.broadcast.host, num_receivers=request.broadcast.num_receivers,
            timeout_s=request.broadcast.timeout_s)
        return Published(fingerprint, canary_logprobs, self._offer.address if self._offer else "")

    def save(self, folder: Path) -> None:
        """Write a resumable checkpoint."""
        self._engine.save(folder)

    def load(self, folder: Path) -> None:
        """Go on from a checkpoint."""
        self._engine.load(folder)

    def export(self, request: ExportRequest) -> None:
        """Write a Hugging Face folder on rank 0, tokenizer included."""
        self._engine.export(Path(request.path), tokenizer_folder=Path(request.tokenizer), dtype=self._config.model.dtype)
