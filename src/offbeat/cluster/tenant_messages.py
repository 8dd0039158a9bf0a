"""What crosses between a process that serves many tenants and the ranks that train them. Torch-free, so that both ends can import it."""

from dataclasses import dataclass

import numpy as np

from offbeat.algorithms.adam import AdamParams
from offbeat.data.batch import TokenBatch
from offbeat.telemetry.tracker import StatsPart


@dataclass(frozen=True)
class TenantStart:
    """Give a tenant a fresh adapter, or one that goes on from the PEFT folder `folder`; alpha over rank scales its output."""

    tenant: str
    rank: int
    alpha: float
    seed: int
    folder: str = ""


@dataclass(frozen=True)
class TenantName:
    """One tenant."""

    tenant: str


@dataclass(frozen=True, eq=False)
class TenantShard:
    """One rank's sequences of some tenants.

    Attributes:
        tenants: of each sequence of the batch.
        objective: "ppo" or "sft", with the constants in `algorithm`, an `AlgorithmConfig` as JSON.
        learn: add gradients; otherwise only score.
    """

    batch: TokenBatch
    tenants: tuple[str, ...]
    objective: str
    algorithm: str
    learn: bool


@dataclass(frozen=True, eq=False)
class TenantPass:
    """What a forward, or forward and backward, of a shard gave.

    Attributes:
        logprobs: [T] float32, of the shard's tokens, 0 on those not trained on.
        stats: by tenant, this rank's part of the metrics; empty where nothing was learnt.
    """

    logprobs: np.ndarray
    stats: dict[str, StatsPart]


@dataclass(frozen=True)
class TenantsUpdate:
    """Take an optimizer step for these tenants with the gradients that they have gathered."""

    params: dict[str, AdamParams]


@dataclass(frozen=True)
class TenantsDiscard:
    """Drop the gradients that these tenants have gathered."""

    tenants: tuple[str, ...]


@dataclass(frozen=True)
class TenantsUpdated:
    """Norm of each tenant's gradient before clipping; not finite where its update was left out."""

    grad_norms: dict[str, float]


@dataclass(frozen=True)
class TenantFolder:
    """A folder for, or with, all that a tenant's training needs to go on exactly."""

    tenant: str
    path: str


@dataclass(frozen=True)
class TenantPublish:
    """Write a tenant's adapter into a new PEFT folder, and score the canary under it."""

    tenant: str
    folder: str
    canary: tuple[int, ...]


@dataclass(frozen=True)
class TenantPublished:
    """What rank 0 wrote."""

    fingerprint: str
    canary_logprob: float
    num_bytes: int
