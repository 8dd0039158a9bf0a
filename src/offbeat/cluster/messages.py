"""What crosses between the controller and its workers. Torch-free, so that both ends can import it."""

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from offbeat.data.batch import TokenBatch
from offbeat.dist.peers import Card
from offbeat.types import Version


@dataclass(frozen=True)
class StoreAddress:
    """Where rank 0 serves the store that ranks meet through, and its process; None in the question where."""

    host: str
    port: int
    server: Card | None = None


@dataclass(frozen=True)
class BuildRequest:
    """Write a tiny model with random weights into `folder`, beside the tokenizer that is there; `tiny` is a `TinyConfig` as JSON."""

    folder: str
    tiny: str
    vocab_size: int
    eos_token_id: int
    pad_token_id: int | None
    seed: int

    @property
    def origin(self) -> list[str | int | None]:
        """All that the weights depend on."""
        return [self.tiny, self.vocab_size, self.eos_token_id, self.pad_token_id, self.seed]


@dataclass(frozen=True)
class JoinRequest:
    """A rank's place among its peers, and what it trains.

    Attributes:
        config: the whole configuration as JSON.
        model: folder or hub id of the initial weights.
    """

    rank: int
    world: int
    store: StoreAddress
    config: str
    model: str


@dataclass(frozen=True)
class Objective:
    """What to optimise from now on, with a fresh optimizer: "ppo" with [train.optimizer], or "sft" with [sft.optimizer]."""

    name: str
    total_steps: int


@dataclass(frozen=True, eq=False)
class Shard:
    """One rank's share of one training step.

    Attributes:
        batch: the rank's sequences.
        minibatches: per optimizer step, its micro-batches: arrays [n] int64 of indices into `batch`. Counts are equal on all ranks.
    """

    batch: TokenBatch
    minibatches: tuple[tuple[np.ndarray, ...], ...]


@dataclass(frozen=True)
class Trained:
    """A finished training step.

    Attributes:
        metrics: over all ranks.
        start_s, end_s: wall-clock seconds of its begin and end on this rank.
        busy_s: seconds that this rank computed, without waiting for its peers.
    """

    metrics: dict[str, float]
    start_s: float
    end_s: float
    busy_s: float


@dataclass(frozen=True)
class BroadcastRequest:
    """Offer a version to so many engines.

    Attributes:
        host: of rank 0's machine, as engines reach it.
        timeout_s: for one engine to get the version.
    """

    host: str
    num_receivers: int
    timeout_s: float


@dataclass(frozen=True)
class PublishRequest:
    """Write the weights as `version` into `folder`, or offer them by broadcast, and score the canary under them."""

    version: Version
    folder: str
    dtype: Literal["float32", "bfloat16"]
    canary: tuple[int, ...]
    broadcast: BroadcastRequest | None = None


@dataclass(frozen=True)
class Published:
    """What rank 0 wrote, or offers at the address `broadcast`; `fingerprint` is empty on other ranks."""

    fingerprint: str
    canary_logprobs: tuple[float, ...]
    broadcast: str = ""


@dataclass(frozen=True)
class Folder:
    """A folder to save to or load from."""

    path: str


@dataclass(frozen=True)
class ExportRequest:
    """Write the model as a Hugging Face folder, with the tokenizer of another."""

    path: str
    tokenizer: str


@dataclass(frozen=True)
class Loaded:
    """The training step at which a loaded checkpoint stands."""

    step: int


@dataclass(frozen=True)
class EngineStart:
    """Serve an embedded engine: its options as JSON, the key among them, and where to listen; port 0 takes a free one."""

    options: str = field(repr=False)
    host: str = "127.0.0.1"
    port: int = 0


@dataclass(frozen=True)
class ServerStart:
    """Start a server process that takes --host and --port, and wait until its /health answers.

    Attributes:
        command: program and arguments.
        env: environment variables added to the worker's, the key among them.
        timeout_s: until it must answer.
        key: that the server wants; empty for none.
    """

    command: tuple[str, ...]
    env: dict[str, str] = field(repr=False)
    host: str
    timeout_s: float
    key: str = field(default="", repr=False)


@dataclass(frozen=True)
class EngineAddress:
    """Where an engine listens."""

    url: str


@dataclass(frozen=True)
class EngineAddresses:
    """Where a run's engines listen, by name, and the key that all of them want; empty for none."""

    urls: dict[str, str]
    key: str = field(repr=False)
