"""Carries out what the service decides. This is the only module that knows both its terms and those of `offbeat.runs.tenants`.

A model of the service is a tenant there; a sampler samples a pinned version of it. Errors are those of the layers below.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType

from offbeat.algorithms.adam import AdamParams
from offbeat.config.root import Config
from offbeat.data.batch import Batch
from offbeat.errors import DataError, ModelError
from offbeat.fleet.dispatch import Dispatcher
from offbeat.fleet.sampling_models import SamplingModel
from offbeat.inference.sampling import Draws, PromptScore, Sample, Sampling
from offbeat.runs.tenants import Tenants
from offbeat.service.base_models import BaseModels
from offbeat.service.types import EngineStatus, LoraSpec
from offbeat.trainer.messages import Scores
from offbeat.weights.protocol import Manifest

_MAX_FAILURES = 3
"""Number of engines on which one tenant's request may fail, whether or not they survived.

The request may itself be what crashes engines, and other tenants' requests run on them.
"""


class Backend:
    """Trainers and engines of one base model, and other models that are only sampled.

    Attributes:
        base_model: name by which clients call the trained model.
        base_models: names by which clients call all models.
        others: models that are only sampled, by name.
        max_rank: largest rank of an adapter.
        max_length: largest number of tokens in a sequence to train on.
    """

    def __init__(
        self, tenants: Tenants, config: Config, *, base_model: str, others: Mapping[str, SamplingModel] = MappingProxyType({}),
        on_event: Callable[..., None] = lambda _kind, **_fields: None,
    ) -> None:
        """`on_event` receives "trainers_failed" (dead: names of ranks) and "trainers_restarted" (seconds)."""
        self.base_model = base_model
        self.base_models = BaseModels.of(base_model, config.serve)
        self.others = others
        self._on_event = on_event
        self.max_rank = config.model.lora.rank
        self.max_length = min(tenants.limits.context, config.train.max_tokens_per_microbatch)
        self._tenants = tenants

    @property
    def context(self) -> int:
        """Largest number of tokens in a prompt and its continuation."""
        return self._tenants.limits.context

    @property
    def vocab_size(self) -> int:
        return self._tenants.limits.vocab_size

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """Token IDs that end a sample."""
        return self._tenants.limits.end_token_ids

    # -- training ----------------------------------------------------------------------------------------------------------------------

    @property
    def trainers_alive(self) -> bool:
        """Whether the trainers can work. If not, they have lost every model and need `restart_trainers`."""
        return self._tenants.trainers_alive

    async def restart_trainers(self) -> None:
        """Restart the trainers, which then hold no models; raises WorkerError or DeadlineError if they do not start."""
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
        """Raise DataError for a batch that would fail in a pass, and would make other models' work fail with it."""
        if (longest := int(batch.lengths.max(initial=0))) > self.max_length:
            raise DataError(f"a datum has {longest} tokens, more than the {self.max_length} that fit; cut it")
        for what, ids in (("token", batch.tokens), ("target", batch.targets)):
            if len(ids) and not 0 <= ids.min() <= ids.max() < self.vocab_size:
                raise DataError(f"a {what} is outside the vocabulary of {self.vocab_size}; use the tokenizer of {self.base_model}")

    async def create(self, model_id: str, lora: LoraSpec) -> None:
        """Create a fresh model in the trainers."""
        await self._tenants.add(
            tenant_of(model_id), rank=lora.rank, alpha=lora.alpha, seed=lora.seed, train_attn=lora.train_attn, train_mlp=lora.train_mlp)

    async def load(self, model_id: str, folder: Path, *, optimizer: bool = True) -> None:
        """Load a model that `save` wrote, replacing the trainers' model of this ID; without `optimizer`, its optimizer state is fresh."""
        await self._tenants.restore(tenant_of(model_id), folder, optimizer=optimizer)

    async def save(self, model_id: str, folder: Path) -> None:
        """Write everything that is needed to resume training exactly into a new folder."""
        await self._tenants.save(tenant_of(model_id), folder)

    async def remove(self, model_id: str) -> None:
        """Remove a model from the trainers; its pinned versions stay."""
        await self._tenants.remove(tenant_of(model_id))

    async def run(self, batches: Mapping[str, Batch], *, learn: bool) -> Mapping[str, Scores]:
        """Run one pass over the datums of many models, given and returned by model ID."""
        run = self._tenants.forward_backward if learn else self._tenants.forward
        scores = await run({tenant_of(model_id): batch for model_id, batch in batches.items()})
        return {model_id: scores[tenant_of(model_id)] for model_id in batches}

    async def discard(self, model_ids: Iterable[str]) -> None:
        """Drop the accumulated gradients of these models."""
        await self._tenants.discard([tenant_of(model_id) for model_id in model_ids])

    async def step(self, params: Mapping[str, AdamParams]) -> Mapping[str, float]:
        """Run one optimizer step of many models. Returns gradient norms by model ID; a norm is not finite where the step was skipped."""
        norms = await self._tenants.optim_step({tenant_of(model_id): its for model_id, its in params.items()})
        return {model_id: norms[tenant_of(model_id)] for model_id in params}

    async def export(self, model_id: str, folder: Path, *, version: int) -> Manifest:
        """Write a model's adapter to a new PEFT folder."""
        return await self._tenants.write(tenant_of(model_id), folder, version=version)

    # -- sampling ----------------------------------------------------------------------------------------------------------------------

    async def publish(self, manifest: Manifest) -> None:
        """Load an adapter into the engines and keep it known until `unpin`; raises PublishError if no engine accepts it."""
        await self._tenants.fleet.publisher.publish(manifest, pinned=True)

    def pin(self, manifest: Manifest) -> None:
        """Make an adapter known; an engine loads it when it is first sampled."""
        self._tenants.fleet.adapters.pin(manifest)

    def unpin(self, name: str) -> None:
        """Forget an adapter once its last request is done; does nothing for an unknown one."""
        self._tenants.fleet.adapters.unpin(name)

    async def sample(self, adapter: str, prompt: tuple[int, ...], sampling: Sampling, n: int, session: str) -> list[Sample]:
        """Generate n continuations with an adapter, or with the base model for ""; requests of one session share cached prefixes."""
        return await self._tenants.fleet.dispatcher.generate(
            prompt, sampling, n=n, session=session, adapter=adapter, max_failures=_MAX_FAILURES)

    async def score(
        self, adapter: str, tokens: tuple[int, ...], top_k: int, targets: tuple[tuple[int, ...], ...] | None,
        draws: Draws | None = None,
    ) -> PromptScore:
        """Score tokens with an adapter, or with the base model for ""."""
        return await self._tenants.fleet.dispatcher.score(
            tokens, top_k=top_k, targets=targets, draws=draws, adapter=adapter, max_failures=_MAX_FAILURES)

    @property
    def sampled_tokens(self) -> int:
        """Number of tokens that engines have generated."""
        return sum(dispatcher.generated_tokens for dispatcher in self._dispatchers)

    @property
    def engines(self) -> tuple[EngineStatus, ...]:
        """Status of every engine."""
        held = self._tenants.fleet.adapters.held
        return tuple(
            EngineStatus(name, state.value, tuple(held.get(name, ())), pool.outstanding[name])
            for pool in (dispatcher.pool for dispatcher in self._dispatchers) for name, state in pool.states.items())

    @property
    def _dispatchers(self) -> list[Dispatcher]:
        return [self._tenants.fleet.dispatcher, *(model.dispatcher for model in self.others.values())]


def tenant_of(model_id: str) -> str:
    """Return the name by which the layers below know a model."""
    return model_id.replace(":", ".")
