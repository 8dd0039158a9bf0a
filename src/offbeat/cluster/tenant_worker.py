"""The process of one rank that trains many tenants' adapters on one base model. Torch lives here; started by name, imported by nobody else.

`tenant_group` calls every method on all ranks at once, in one order. What a user got wrong is raised with no peer left in a collective.
"""

from pathlib import Path

from offbeat.cluster.group import Nothing
from offbeat.cluster.rank_worker import RankWorker
from offbeat.cluster.tenant_messages import (
    BaseCanary,
    BaseCanaryScored,
    DatumShard,
    TenantFolder,
    TenantName,
    TenantPass,
    TenantPublish,
    TenantPublished,
    TenantRestore,
    TenantRestored,
    TenantsDiscard,
    TenantShard,
    TenantStart,
    TenantsUpdate,
    TenantsUpdated,
)
from offbeat.config.algorithms import AlgorithmConfig
from offbeat.config.root import Config
from offbeat.dist.mesh import ProcessGroups
from offbeat.trainer.adapter_types import DatumPass
from offbeat.trainer.adapters import AdapterEngine


class TenantWorker(RankWorker):
    """One rank of all tenants."""

    _engine: AdapterEngine

    def _load(self, model: str, config: Config, groups: ProcessGroups) -> None:
        self._engine = AdapterEngine.build(Path(model), config=config, groups=groups)

    def add(self, request: TenantStart) -> Nothing:
        """Make room for a tenant."""
        if request.folder:
            self._engine.load(request.tenant, Path(request.folder))
        else:
            self._engine.add(request.tenant, rank=request.rank, alpha=request.alpha, seed=request.seed, modules=request.modules)
        return Nothing()

    def remove(self, request: TenantName) -> Nothing:
        """Forget a tenant."""
        self._engine.remove(request.tenant)
        return Nothing()

    def run(self, shard: TenantShard) -> TenantPass:
        """Score this rank's sequences, and add their gradients if they are to be learnt."""
        if not shard.learn:
            return TenantPass(self._engine.forward(shard.batch, shard.tenants), {})
        algorithm = AlgorithmConfig.model_validate_json(shard.algorithm)
        passed = self._engine.forward_backward(shard.batch, shard.tenants, objective_name=shard.objective, algorithm=algorithm)
        return TenantPass(passed.logprobs, passed.stats)

    def run_datums(self, shard: DatumShard) -> DatumPass:
        """Score this rank's datums, and add their gradients if they are to be learnt."""
        return self._engine.run_datums(shard.batch, shard.tenants, learn=shard.learn)

    def discard(self, request: TenantsDiscard) -> Nothing:
        """Drop gradients that wait for a step."""
        self._engine.discard(request.tenants)
        return Nothing()

    def update(self, request: TenantsUpdate) -> TenantsUpdated:
        """One optimizer step for each tenant named."""
        grad_norms = self._engine.optim_step(request.params)
        return TenantsUpdated(grad_norms, {tenant: self._engine.step_of(tenant) for tenant in grad_norms})

    def score_base(self, request: BaseCanary) -> BaseCanaryScored:
        """Score the canary under the base model alone."""
        return BaseCanaryScored(self._engine.canary("", request.tokens))

    def publish(self, request: TenantPublish) -> TenantPublished:
        """Score the canary, and write the adapter on rank 0."""
        canary_logprobs = self._engine.canary(request.tenant, request.canary)
        written = self._engine.write(request.tenant, Path(request.folder))
        return TenantPublished(written.fingerprint, canary_logprobs, written.num_bytes)

    def save(self, request: TenantFolder) -> Nothing:
        """Write all that a tenant's training needs to go on exactly."""
        self._engine.save(request.tenant, Path(request.path))
        return Nothing()

    def restore(self, request: TenantRestore) -> TenantRestored:
        """Go on from what `save` wrote."""
        self._engine.restore(request.tenant, Path(request.path), optimizer=request.optimizer)
        return TenantRestored(self._engine.step_of(request.tenant))
