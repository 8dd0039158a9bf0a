"""Many tenants in one process: each trains an adapter of its own on one base model, and samples from what it has published.

`open_tenants` starts the ranks and the engines; services and programs call `Tenants`. Any of the tenants train together in one pass, a
publish of one never waits for another, and a failure of one is an error of its own call. When trainers die, all adapters in training are
lost, but engines go on serving: `restart_trainers`, and then `restore` of each tenant, goes on from what was saved.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from offbeat.aio import beside, both
from offbeat.algorithms.adam import AdamParams
from offbeat.config.root import Config
from offbeat.controller.inputs import base_ends, read_base
from offbeat.data.batch import Batch
from offbeat.data.model_folder import read_model_config
from offbeat.data.tokenizer import Tokenizer
from offbeat.errors import ConfigError, DataError
from offbeat.fleet.engine_group import EngineGroup
from offbeat.fleet.fleet import UNPUBLISHED, Fleet, open_fleet
from offbeat.fleet.publication import PublishReport
from offbeat.inference.sampling import Sample, Sampling
from offbeat.ranks.ranks import WorkerRanks
from offbeat.ranks.trainers import Trainers
from offbeat.runs.threads import choose_threads, usable_cores
from offbeat.telemetry.record import RunRecord
from offbeat.trainer.messages import NewAdapter, Scores
from offbeat.types import Version
from offbeat.weights.adapters import adapter_name, check_adapter
from offbeat.weights.protocol import Manifest
from offbeat.workers.worker import make_launcher


@dataclass
class Tenant:
    """State of one tenant.

    Attributes:
        newest: its newest version, including those of an earlier tenant of this name; -1 before the first.
        publishing: held while it publishes, one version at a time.
    """

    newest: Version = -1
    publishing: asyncio.Lock = field(default_factory=asyncio.Lock)


@dataclass(frozen=True)
class Limits:
    """What the base model accepts, and where its samples end.

    Attributes:
        vocab_size: token ids are below it.
        context: most tokens of a prompt and its continuation.
        end_token_ids: those of the tokenizer, the model and the chat template; engines by themselves know only the first.
    """

    vocab_size: int
    context: int
    end_token_ids: tuple[int, ...]


class Tenants:
    """Adds, trains, publishes and samples tenants' adapters.

    Attributes:
        tokenizer: of the base model.
        limits: of the base model.
        fleet: the engines.
    """

    def __init__(
        self, config: Config, ranks: WorkerRanks, trainers: Trainers, fleet: Fleet, *, tokenizer: Tokenizer,
        canary: tuple[int, ...], limits: Limits,
    ) -> None:
        """`trainers` are the `ranks` as one; `canary` are the tokens that prove each publish."""
        self.limits = limits
        self.tokenizer = tokenizer
        self.fleet = fleet
        self._config = config
        self._ranks = ranks
        self._trainers = trainers
        self._canary = canary
        self._tenants: dict[str, Tenant] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all tenants."""
        return tuple(self._tenants)

    @property
    def trainers_alive(self) -> bool:
        """Whether the ranks can train; if not, every call that needs them raises until `restart_trainers`."""
        return self._ranks.alive

    @property
    def dead_trainers(self) -> tuple[str, ...]:
        """Names of the ranks whose processes have ended."""
        return self._ranks.dead

    async def restart_trainers(self) -> None:
        """End all ranks at once, including those that hang, and start new ones, while the engines go on serving.

        All adapters in training are gone: `restore` or `add` each tenant. What was published is sampled as before.

        Raises:
            WorkerError, DeathError, DeadlineError: they do not start; may be called again.
        """
        await self._ranks.restart(on_gone=self._trainers.steps.clear)

    async def add(
        self, tenant: str, *, rank: int | None = None, alpha: float | None = None, seed: int = 0, train_attn: bool = True,
        train_mlp: bool = True, train_unembed: bool = True, folder: str | Path = "",
    ) -> None:
        """Give a tenant a fresh adapter, which changes nothing yet, or one from a PEFT folder, with its rank, alpha and layers.

        Args:
            rank: at most `model.lora.rank`, which is the default; alpha likewise from the configuration.
            train_attn, train_mlp, train_unembed: for which of the layers in `model.lora.targets` it has weights. The output head is never
                among them, so the last has no effect.

        Raises:
            ConfigError: the name is taken or cannot be one, or the rank is out of range.
            ModelError: the folder is no adapter that fits, or no layer would be trained.
        """
        lora = self._config.model.lora
        rank = lora.rank if rank is None else rank
        if check_adapter(tenant) in self._trainers.steps:
            raise ConfigError(f"there is a tenant {tenant!r} already; choose another name, or remove it first")
        if not 1 <= rank <= lora.rank:
            raise ConfigError(f"the rank of tenant {tenant!r} must be 1 to model.lora.rank = {lora.rank}, got {rank}")
        modules = [kind for kind, wanted in (("attn", train_attn), ("mlp", train_mlp), ("unembed", train_unembed)) if wanted]
        await self._trainers.add(NewAdapter(
            tenant, rank, lora.alpha if alpha is None else alpha, seed, tuple(modules), str(folder)))
        self._enter(tenant)

    async def remove(self, tenant: str) -> None:
        """Remove a tenant; its requests in flight finish."""
        async with self._find(tenant).publishing:
            del self._tenants[tenant]
            self.fleet.adapters.remove(tenant)
            if tenant in self._trainers.steps:
                await self._trainers.remove(tenant)

    async def forward(self, batches: Mapping[str, Batch]) -> dict[str, Scores]:
        """Score the batches of all tenants in one pass, each under its tenant's current adapter; raises as `forward_backward`."""
        return await self._pass(self._trainers.forward, batches)

    async def forward_backward(self, batches: Mapping[str, Batch]) -> dict[str, Scores]:
        """Score the batches of all tenants in one pass, and accumulate the gradients of their losses.

        Args:
            batches: by tenant. The loss is the sum over targets of `loss_weights` times loss; the weights hold all denominators.

        Raises:
            DataError: a batch cannot be used; names its tenant. Nothing was added for any.
            WorkerError: a rank failed. The accumulated gradients of these tenants are gone, including those of earlier passes.
        """
        return await self._pass(self._trainers.forward_backward, batches)

    async def _pass(self, run: Callable[[Batch], Awaitable[Scores]], batches: Mapping[str, Batch]) -> dict[str, Scores]:
        for tenant, batch in batches.items():
            self._check(tenant, batch)
        if not batches:
            return {}
        joined = Batch.concatenate([replace(batch, adapters=(tenant,), sequences=_of_one(batch)) for tenant, batch in batches.items()])
        scores = await run(joined)
        sequences = np.cumsum([0, *(len(batch) for batch in batches.values())])
        targets = joined.target_offsets[sequences]
        return {
            tenant: Scores(scores.logprobs[targets[i] : targets[i + 1]], scores.losses[sequences[i] : sequences[i + 1]])
            for i, tenant in enumerate(batches)}

    async def discard(self, tenants: Sequence[str]) -> None:
        """Drop the gradients that these tenants have accumulated since their last step."""
        for tenant in tenants:
            self._find_training(tenant)
        await self._trainers.discard(tenants)

    async def optim_step(self, params: Mapping[str, AdamParams]) -> dict[str, float]:
        """Run one optimizer step of each tenant named, even without accumulated gradients: momentum and weight decay act.

        Returns:
            Gradient norms before clipping, by tenant; a norm is not finite where the update was skipped.
        """
        for tenant in params:
            self._find_training(tenant)
        return await self._trainers.optim_step(params)

    def step_of(self, tenant: str) -> int:
        """Return the number of optimizer steps that the tenant's adapter has taken, including those before its last `restore`."""
        self._find_training(tenant)
        return self._trainers.steps[tenant]

    async def publish(self, tenant: str) -> PublishReport:
        """Write the tenant's current adapter as its next version, and bring that to the engines.

        Raises:
            PublishError: no engine serves it; gives each engine's reason. Its older version, and all other tenants, go on.
        """
        state = self._find_training(tenant)
        async with state.publishing:
            version = state.newest + 1
            manifest = await self.write(tenant, self._folder(tenant) / f"v{version:08d}", version=version)
            return await self.fleet.publisher.publish(manifest)

    async def write(self, tenant: str, folder: Path, *, version: Version | None = None) -> Manifest:
        """Write the tenant's current adapter to a new PEFT folder, with its proof, for engines to load or for anyone to keep.

        Args:
            version: its number; None takes the next. The number is used up even if this fails.

        Raises:
            StorageError: the folder is there already, or cannot be written.
        """
        state = self._find_training(tenant)
        version = state.newest + 1 if version is None else version
        state.newest = max(state.newest, version)
        return await self._trainers.write_adapter(tenant, version, folder.resolve(), canary=self._canary)

    async def sample(
        self, tenant: str, prompt: Sequence[int], sampling: Sampling, *, n: int = 1, version: Version | None = None, session: str = "",
    ) -> list[Sample]:
        """Sample n continuations by the tenant's newest published version, or by an older one whose folder is still kept.

        Raises:
            RefusedError: there is no such version, or the engine says that the request is wrong.
        """
        self._find(tenant)
        name = tenant if version is None else adapter_name(tenant, version)
        return await self.fleet.dispatcher.generate(tuple(prompt), sampling, n=n, session=session, adapter=name)

    async def save(self, tenant: str, folder: Path) -> None:
        """Write everything that the tenant's training needs to go on exactly."""
        self._find_training(tenant)
        await self._trainers.save_adapter(tenant, folder)

    async def restore(self, tenant: str, folder: Path, *, optimizer: bool = True) -> None:
        """Load what `save` wrote, in place of the tenant's adapter if there is one.

        Args:
            optimizer: whether to load its moments and step count; otherwise they are fresh.
        """
        await self._trainers.load_adapter(check_adapter(tenant), folder, optimizer=optimizer)
        self._enter(tenant)

    def _check(self, tenant: str, batch: Batch) -> None:
        """Check a batch before any rank computes: a pass that fails half-way would drop the others' gradients, too."""
        self._find_training(tenant)
        longest, limit = int(batch.lengths.max(initial=0)), min(self.limits.context, self._config.train.max_tokens_per_microbatch)
        if longest > limit:
            raise DataError(f"a sequence of tenant {tenant!r} has {longest} tokens, more than the {limit} that fit; cut it")
        for what, ids in (("token", batch.tokens), ("target", batch.targets)):
            if len(ids) and not 0 <= ids.min() <= ids.max() < self.limits.vocab_size:
                raise DataError(
                    f"a {what} of tenant {tenant!r} is outside the vocabulary of {self.limits.vocab_size}; use the base model's tokenizer")

    def _folder(self, tenant: str) -> Path:
        return self._config.weights_dir.resolve() / tenant

    def _newest_folder(self, tenant: str) -> Version:
        return max((int(folder.name[1:]) for folder in self._folder(tenant).glob("v????????")), default=-1)

    def _enter(self, tenant: str) -> None:
        self._tenants.setdefault(tenant, Tenant(self._newest_folder(tenant)))

    def _find_training(self, tenant: str) -> Tenant:
        state = self._find(tenant)
        if tenant not in self._trainers.steps:
            raise ConfigError(f"the adapter of tenant {tenant!r} was lost with the trainers that have failed; restore or add it first")
        return state

    def _find(self, tenant: str) -> Tenant:
        if tenant not in self._tenants:
            raise ConfigError(f"there is no tenant {tenant[:120]!r}, only {', '.join(self._tenants) or 'none'}; add it first")
        return self._tenants[tenant]


def _of_one(batch: Batch) -> dict[str, np.ndarray]:
    """Return the per-sequence columns of a batch, with every sequence assigned to its only adapter."""
    return {**batch.sequences, "adapter_ids": np.zeros(len(batch), np.int64)}


@asynccontextmanager
async def open_tenants(config: Config, record: RunRecord) -> AsyncIterator[Tenants]:
    """Start `train.num_ranks` ranks and the engines on one base model; all of them end with the body.

    Raises:
        ConfigError: `model.lora.rank` is 0, or `model.lora.dropout` is not.
        ModelError: the folder holds no model or tokenizer.
    """
    if not config.model.lora.rank:
        raise ConfigError("model.lora.rank must be at least 1 to serve tenants, got 0; give the largest rank of any of them")
    if config.model.lora.dropout:
        raise ConfigError(
            f"model.lora.dropout must be 0 to serve tenants, got {config.model.lora.dropout}; what one drops would depend on the others")
    config = choose_threads(config, cores=usable_cores())
    record.events.record("threads", rank=config.train.threads, engine=config.inference.threads)
    base = read_base(config)
    ends = base_ends(base)
    if base.build is not None:
        base.tokenizer.save(base.model)
    async with AsyncExitStack() as stack:
        launcher = await stack.enter_async_context(make_launcher(config))
        ranks, engines = await both(
            WorkerRanks.start(launcher, config, model=base.model, build=base.build, log_dir=record.log_dir, many=True),
            EngineGroup.start(launcher, config, log_dir=record.log_dir))
        trainers = Trainers(ranks, config)
        addresses = await engines.serve(model=base.model, tokenizer=base.tokenizer_folder, version=UNPUBLISHED)
        fleet = await open_fleet(stack, engines, addresses, config, record, model=base.model)
        canary = tuple(range(min(base.tokenizer.vocab_size, 16)))
        async with beside(fleet.watch()):
            await fleet.adapters.serve_base(canary, await trainers.score_base(canary))
            model_config = read_model_config(base.model)
            limits = Limits((model_config.get("text_config") or model_config)["vocab_size"], base.context, ends.token_ids)
            yield Tenants(config, ranks, trainers, fleet, tokenizer=base.tokenizer, canary=canary, limits=limits)
