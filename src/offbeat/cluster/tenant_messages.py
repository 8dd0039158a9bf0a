"""What crosses between a process that serves many tenants and the ranks that train them. Torch-free, so that both ends can import it."""

from dataclasses import dataclass

import numpy as np

from offbeat.algorithms.adam import AdamParams
from offbeat.data.batch import TokenBatch
from offbeat.data.datums import DatumBatch
from offbeat.telemetry.tracker import StatsPart


@dataclass(frozen=True)
class TenantStart:
    """Give a tenant a fresh adapter, or one that goes on from the PEFT folder `folder`.

    Attributes:
        alpha: over the rank, what its output is scaled by.
        modules: kinds of layers that a fresh one trains, of `offbeat.model.lora.LAYER_KINDS`.
    """

    tenant: str
    rank: int
    alpha: float
    seed: int
    modules: tuple[str, ...]
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


@dataclass(frozen=True, eq=False)
class DatumShard:
    """One rank's datums of some tenants; answered by a `DatumPass`.

    Attributes:
        tenants: of each datum of the batch.
        learn: add gradients; otherwise only score.
    """

    batch: DatumBatch
    tenants: tuple[str, ...]
    learn: bool


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
    """Of each tenant, the norm of its gradient before clipping, not finite where its update was left out, and the steps it has taken."""

    grad_norms: dict[str, float]
    steps: dict[str, int]


@dataclass(frozen=True)
class TenantFolder:
    """A folder for all that a tenant's training needs to go on exactly."""

    tenant: str
    path: str


@dataclass(frozen=True)
class TenantRestore:
    """Go on from such a folder, with its optimizer or with a fresh one."""

    tenant: str
    path: str
    optimizer: bool


@dataclass(frozen=True)
class TenantRestored:
    """Optimizer steps that the tenant has taken."""

    step: int


@dataclass(frozen=True)
class BaseCanary:
    """Tokens to be scored under the base model alone."""

    tokens: tuple[int, ...]


@dataclass(frozen=True)
class BaseCanaryScored:
    """Log-probability of each of a canary's tokens but the first."""

    logprobs: tuple[float, ...]


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
    canary_logprobs: tuple[float, ...]
    num_bytes: int
