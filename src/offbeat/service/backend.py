"""Carries out what the service decides: the only place that knows both its terms and those of `offbeat.cluster.tenants`.

A model is a tenant; the weights that a sampler samples are a pinned version of it. Errors are those of the layers below.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType

from offbeat.algorithms.adam import AdamParams
from offbeat.cluster.sampling_models import SamplingModel
from offbeat.cluster.tenants import Tenants
from offbeat.config.root import Config
from offbeat.data.batch import Batch
from offbeat.errors import DataError, ModelError
from offbeat.inference.pool import EnginePool
from offbeat.inference.sampling import Draws, PromptScore, Sample, Sampling
from offbeat.service.base_models import BaseModels
from offbeat.service.types import EngineStatus, LoraSpec
from offbeat.trainer.messages import Scores
from offbeat.weights.adapters import AdapterManifest

_MAX_FAILURES = 3
"""Engines that a tenant's request may have failed on, whatever became of them: it may itself be what ends them, and others are on them."""


class Backend:
    """Trainers and engines with one base model, and other models that are only sampled.

    Attributes:
        base_model: what clients call it.
        base_models: what they call all of them.
        others: those that are only sampled, by name; they know best how.
        max_rank: of an adapter.
        max_length: tokens of a sequence that is trained on.
    """

    def __init__(
        self, tenants: Tenants, config: Config, *, base_model: str, others: Mapping[str, SamplingModel] = MappingProxyType({}),
        on_event: Callable[..., None] = lambda _kind, **_fields: None,
    ) -> None:
        """`on_event` hears "trainers_failed" (dead: names of ranks) and "trainers_restarted" (seconds)."""
        self.base_model = base_model
        self.base_models = BaseModels.of(base_model, config.serve)
        self.others = others
        self._on_event = on_event
        self.max_rank = config.model.lora.rank
        self.max_length = min(tenants.limits.context, config.train.max_tokens_per_microbatch)
        self._tenants = tenants

    @property
    def context(self) -> int:
        """Tokens of a prompt and its continuation."""
        return self._tenants.limits.context

    @property
    def vocab_size(self) -> int:
        return self._tenants.limits.vocab_size

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a sample."""
        return self._tenants.limits.end_token_ids

    # -- training ----------------------------------------------------------------------------------------------------------------------

    @property
    def trainers_alive(self) -> bool:
        """Whether the trainers can work; if not, they have forgotten every model, and want `restart_trainers`."""
        return self._tenants.trainers_alive

    async def restart_trainers(self) -> None:
        """Start them anew, without any model; raises WorkerError or DeadlineError if they do not start."""
        start = time.monotonic()
        self._on_event("trainers_failed", dead=self._tenants.dead_trainers)
        await self._tenants.restart_trainers()
        self._on_event("trainers_restarted", seconds=round(time.monotonic() - start, 3))

    def check_lora(self, lora: LoraSpec) -> None:
        """Raise ModelError for an adapter that cannot be trained here."""
        if not 1 <= lora.rank <= self.max_rank:
            raise ModelError(f"the rank of an adapter must be 1 to {self.max_rank} on this server, got {lora.rank}")
        if not (lora.train_attn or lora.train_mlp):
            raise ModelError("an adapter needs train_attn or train_mlp; the output head alone cannot be trained here")

    def check_batch(self, batch: Batch) -> None:
        """Raise DataError for one that would fail in a pass, and the work of others with it."""
        if (longest := int(batch.lengths.max(initial=0))) > self.max_length:
            raise DataError(f"a datum has {longest} tokens, more than the {self.max_length} that fit; cut it")
        for what, ids in (("token", batch.tokens), ("target", batch.targets)):
            if len(ids) and not 0 <= ids.min() <= ids.max() < self.vocab_size:
                raise DataError(f"a {what} is outside the vocabulary of {self.vocab_size}; use the tokenizer of {self.base_model}")

    async def create(self, model_id: str, lora: LoraSpec) -> None:
        """Give the trainers a fresh model."""
        await self._tenants.add(
            tenant_of(model_id), rank=lora.rank, alpha=lora.alpha, seed=lora.seed, train_attn=lora.train_attn, train_mlp=lora.train_mlp)

    async def load(self, model_id: str, folder: Path, *, optimizer: bool = True) -> None:
        """Give the trainers a model as `save` wrote it, in place of the one they have of this id; without `optimizer`, with a fresh one."""
        await self._tenants.restore(tenant_of(model_id), folder, optimizer=optimizer)

    async def save(self, model_id: str, folder: Path) -> None:
        """Write all that training needs to go on exactly, into a new folder."""
        await self._tenants.save(tenant_of(model_id), folder)

    async def remove(self, model_id: str) -> None:
        """Make the trainers forget a model; what was pinned of it stays."""
        await self._tenants.remove(tenant_of(model_id))

    async def run(self, batches: Mapping[str, Batch], *, learn: bool) -> Mapping[str, Scores]:
        """One pass over the datums of many models, by model id."""
        run = self._tenants.forward_backward if learn else self._tenants.forward
        scores = await run({tenant_of(model_id): batch for model_id, batch in batches.items()})
        return {model_id: scores[tenant_of(model_id)] for model_id in batches}

    async def discard(self, model_ids: Iterable[str]) -> None:
        """Drop the gradients that models have gathered."""
        await self._tenants.discard([tenant_of(model_id) for model_id in model_ids])

    async def step(self, params: Mapping[str, AdamParams]) -> Mapping[str, float]:
        """One optimizer step of many models; norms of their gradients by model id, not finite where the step was left out."""
        norms = await self._tenants.optim_step({tenant_of(model_id): its for model_id, its in params.items()})
        return {model_id: norms[tenant_of(model_id)] for model_id in params}

    async def export(self, model_id: str, folder: Path, *, version: int) -> AdapterManifest:
        """Write a model's adapter into a new PEFT folder."""
        return await self._tenants.write(tenant_of(model_id), folder, version=version)

    # -- sampling ----------------------------------------------------------------------------------------------------------------------

    async def publish(self, manifest: AdapterManifest) -> None:
        """Bring an adapter to the engines, to stay known until `unpin`; raises PublishError if none takes it."""
        await self._tenants.serving.fleet.publish(manifest, pinned=True)

    def pin(self, manifest: AdapterManifest) -> None:
        """Make an adapter known, which an engine loads when it is first sampled."""
        self._tenants.serving.fleet.pin(manifest)

    def unpin(self, name: str) -> None:
        """Forget an adapter once its last request is done; one that is not known is no error."""
        self._tenants.serving.fleet.unpin(name)

    async def sample(self, adapter: str, prompt: tuple[int, ...], sampling: Sampling, n: int, session: str) -> list[Sample]:
        """n continuations by an adapter, or by the base model for ""; requests of one session share cached prefixes."""
        return await self._tenants.serving.fleet.generate(
            adapter, prompt, sampling, n=n, session=session, max_failures=_MAX_FAILURES)

    async def score(
        self, adapter: str, tokens: tuple[int, ...], top_k: int, targets: tuple[tuple[int, ...], ...] | None,
        draws: Draws | None = None,
    ) -> PromptScore:
        """What an adapter, or the base model for "", says of tokens."""
        return await self._tenants.serving.fleet.score(
            adapter, tokens, top_k=top_k, targets=targets, draws=draws, max_failures=_MAX_FAILURES)

    @property
    def sampled_tokens(self) -> int:
        """That engines have generated."""
        return sum(pool.generated_tokens for pool in self._pools)

    @property
    def engines(self) -> tuple[EngineStatus, ...]:
        """Their standing."""
        held = self._tenants.serving.fleet.held
        return tuple(
            EngineStatus(name, state.value, tuple(held.get(name, ())), pool.outstanding[name])
            for pool in self._pools for name, state in pool.states.items())

    @property
    def _pools(self) -> list[EnginePool]:
        return [self._tenants.serving.pool, *(model.pool for model in self.others.values())]


def tenant_of(model_id: str) -> str:
    """The name by which the layers below know a model."""
    return model_id.replace(":", ".")
