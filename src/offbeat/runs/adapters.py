"""Many adapters on one base model: each is trained, published and sampled by its name, by the service or by any program.

`open_adapters` starts the ranks and the engines. Any of the adapters train together in one pass, a publish of one never waits for another,
and a fault of one is an error of its own call. When trainers die, all adapters in training are lost, but the engines go on serving:
`restart_trainers`, and then `load` of each adapter, goes on from its last `save`.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from offbeat.aio import beside, both
from offbeat.algorithms.adam import AdamParams
from offbeat.config.root import Config
from offbeat.controller.inputs import base_ends, read_base
from offbeat.data.batch import Batch
from offbeat.data.image_store import is_image
from offbeat.data.model_folder import read_model_config
from offbeat.data.tokenizer import Tokenizer
from offbeat.errors import ConfigError, DataError
from offbeat.fleet.fleet import Fleet, open_fleet
from offbeat.fleet.publication import PublishReport
from offbeat.inference.sampling import Sample, Sampling
from offbeat.ranks.ranks import WorkerRanks
from offbeat.ranks.trainers import Trainers
from offbeat.runs.engine_start import start_engines
from offbeat.runs.plan import make_plan
from offbeat.runs.shared_disk import apart, note_apart, without_shared_disk
from offbeat.telemetry.record import RunRecord
from offbeat.trainer.messages import NewAdapter, Scores
from offbeat.types import Version
from offbeat.weights.adapters import adapter_name, check_adapter, check_many, check_new, find_adapter
from offbeat.weights.protocol import Manifest
from offbeat.workers.worker import make_launcher


@dataclass
class _Versions:
    """The versions of one adapter.

    Attributes:
        newest: the newest version, also of an earlier adapter of this name; -1 before the first.
        publishing: lock held while a version is published, one at a time.
    """

    newest: Version
    publishing: asyncio.Lock = field(default_factory=asyncio.Lock)


@dataclass(frozen=True)
class BaseLimits:
    """Limits of training and sampling on the base model.

    Attributes:
        vocab_size: token IDs are below it.
        context: largest number of tokens in a prompt and its continuation.
        max_length: largest number of tokens in a sequence to train on.
        max_rank: largest rank of an adapter.
        end_token_ids: end tokens of the tokenizer, the model and the chat template; engines by themselves know only the tokenizer's.
        reads_images: whether tokens may be placeholders of stored images.
    """

    vocab_size: int
    context: int
    max_length: int
    max_rank: int
    end_token_ids: tuple[int, ...]
    reads_images: bool = False

    def check_batch(self, batch: Batch, *, model: str = "the base model") -> None:
        """Refuse a batch that would fail in a pass, which would also drop the gradients of all others in that pass.

        Whoever takes a batch from outside calls this, once: `Adapters.forward` and `forward_backward` for programs, and the service when a
        request arrives. Every token and target is then in the vocabulary, and each sequence fits into the context and a micro-batch, also
        after sequences were selected or batches joined; neither ranks nor trainers check that again.

        `model` names the base model in the message.

        Raises:
            DataError: says what does not fit.
        """
        if (longest := int(batch.lengths.max(initial=0))) > self.max_length:
            raise DataError(f"a datum has {longest} tokens, more than the {self.max_length} that fit; cut it")
        tokens = batch.tokens[~is_image(batch.tokens)] if self.reads_images else batch.tokens
        for what, ids in (("token", tokens), ("target", batch.targets)):
            if len(ids) and not 0 <= ids.min() <= ids.max() < self.vocab_size:
                raise DataError(f"a {what} is outside the vocabulary of {self.vocab_size}; use the tokenizer of {model}")


class Adapters:
    """Adds, trains, publishes and samples adapters; `tokenizer` and `limits` are the base model's, `fleet` has the engines."""

    def __init__(
        self, config: Config, ranks: WorkerRanks, trainers: Trainers, fleet: Fleet, *, tokenizer: Tokenizer,
        canary: tuple[int, ...], limits: BaseLimits,
    ) -> None:
        """`trainers` are the `ranks` as one; `canary` are the tokens that prove each publish."""
        self.limits = limits
        self.tokenizer = tokenizer
        self.fleet = fleet
        self._config = config
        self._ranks = ranks
        self._trainers = trainers
        self._canary = canary
        self._versions: dict[str, _Versions] = {}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._versions)

    @property
    def trainers_alive(self) -> bool:
        """Whether the ranks can train; if not, every call that needs them raises until `restart_trainers`."""
        return self._ranks.alive

    async def restart_trainers(self) -> None:
        """End all ranks at once, hanging ones too, and start new ones, while the engines go on serving.

        All adapters in training are gone, so `load` or `add` each. Published versions are sampled as before. Recorded as the events
        "trainers_failed" (dead: names of ranks whose processes have ended) and "trainers_restarted" (seconds).

        Raises:
            WorkerError, DeathError, DeadlineError: they do not start; may be called again.
        """
        start, events = time.monotonic(), self.fleet.record.events
        events.record("trainers_failed", dead=self._ranks.dead)
        await self._ranks.restart(on_gone=self._trainers.steps.clear)
        events.record("trainers_restarted", seconds=round(time.monotonic() - start, 3))

    async def add(
        self, name: str, *, rank: int | None = None, alpha: float | None = None, seed: int = 0, train_attn: bool = True,
        train_mlp: bool = True, folder: str | Path = "",
    ) -> None:
        """Add a fresh adapter, which changes nothing yet, or one from a PEFT folder, with the folder's rank, alpha and layers.

        Args:
            rank: at most `model.lora.rank`, which is the default; alpha likewise from the configuration.
            train_attn, train_mlp: whether the attention's and the MLP's layers in `model.lora.targets` get weights; the head never does.

        Raises:
            ConfigError: the name is taken or cannot be one.
            ModelError: the rank is out of range, the folder is no adapter that fits, or no layer would be trained.
        """
        lora = self._config.model.lora
        rank = lora.rank if rank is None else rank
        check_new(name, self._trainers.steps)
        kinds = tuple(kind for kind, wanted in (("attn", train_attn), ("mlp", train_mlp)) if wanted)
        await self._trainers.add(NewAdapter(name, rank, lora.alpha if alpha is None else alpha, seed, kinds, str(folder)))
        self._enter(name)

    async def remove(self, name: str) -> None:
        """Remove an adapter; its requests in flight finish, and its pinned versions stay."""
        async with self._find(name).publishing:
            del self._versions[name]
            self.fleet.adapters.remove(name)
            if name in self._trainers.steps:
                await self._trainers.remove(name)

    async def forward(self, batches: Mapping[str, Batch]) -> dict[str, Scores]:
        """Score the batches of many adapters in one pass, each under the current weights of its own; raises as `forward_backward`."""
        self._check_batches(batches)
        return await self.run_pass(batches, learn=False)

    async def forward_backward(self, batches: Mapping[str, Batch]) -> dict[str, Scores]:
        """Score the batches of many adapters in one pass, and accumulate the gradients of their losses.

        A loss is the sum over targets of `loss_weights` times loss; the weights hold all denominators.

        Returns:
            By adapter: the log-probabilities [M] float32 of its M targets, and the losses [N] float32 of its N sequences.

        Raises:
            DataError: a batch cannot be used; names its adapter. Nothing was added for any.
            WorkerError: a rank failed. The accumulated gradients of these adapters are gone, also from earlier passes.
        """
        self._check_batches(batches)
        return await self.run_pass(batches, learn=True)

    def _check_batches(self, batches: Mapping[str, Batch]) -> None:
        for name, batch in batches.items():
            self._find_training(name)  # first, as a batch of no adapter has nothing to fit
            try:
                self.limits.check_batch(batch)
            except DataError as exc:
                raise DataError(f"the batch of adapter {name!r} cannot be used: {exc}") from exc

    async def run_pass(self, batches: Mapping[str, Batch], *, learn: bool) -> dict[str, Scores]:
        """Score batches that `limits.check_batch` has accepted, as `forward_backward` does, or as `forward` if not to `learn`."""
        for name in batches:
            self._find_training(name)
        if not batches:
            return {}
        joined = Batch.concatenate([  # every sequence of a batch has its only adapter, with the index 0
            replace(batch, adapters=(name,), sequences={**batch.sequences, "adapter_ids": np.zeros(len(batch), np.int64)})
            for name, batch in batches.items()])
        scores = await (self._trainers.forward_backward if learn else self._trainers.forward)(joined)
        sequences = np.cumsum([0, *(len(batch) for batch in batches.values())])
        targets = joined.target_offsets[sequences]
        return {
            name: Scores(scores.logprobs[targets[i] : targets[i + 1]], scores.losses[sequences[i] : sequences[i + 1]])
            for i, name in enumerate(batches)}

    async def discard(self, names: Sequence[str]) -> None:
        """Drop the gradients that these adapters have accumulated since their last step."""
        for name in names:
            self._find_training(name)
        await self._trainers.discard(names)

    async def optim_step(self, params: Mapping[str, AdamParams]) -> dict[str, float]:
        """Run one optimizer step of each adapter named, even without accumulated gradients: momentum and weight decay act.

        Returns:
            Gradient norms before clipping, by adapter, such as {"alice": 0.8}; not finite where the update was skipped.
        """
        for name in params:
            self._find_training(name)
        return await self._trainers.optim_step(params)

    def step_of(self, name: str) -> int:
        """Return the number of optimizer steps that an adapter has taken, also before its last `load`."""
        self._find_training(name)
        return self._trainers.steps[name]

    async def publish(self, name: str) -> PublishReport:
        """Write the adapter's present weights as its next version, such as folder "v00000012", and bring it to the engines.

        Raises:
            PublishError: no engine serves it; gives each engine's reason. Its older version, and all other adapters, go on.
        """
        versions = self._find_training(name)
        async with versions.publishing:
            version = versions.newest + 1
            return await self.fleet.publisher.publish(await self.write(name, self._folder(name) / f"v{version:08d}", version=version))

    async def write(self, name: str, folder: Path, *, version: Version | None = None) -> Manifest:
        """Write the adapter's present weights to a new PEFT folder, with its proof, for engines to load or for anyone to keep.

        `version` is its number, such as 12; None takes the next. The number is used up even if this fails.

        Raises:
            StorageError: the folder is there already, or cannot be written.
        """
        versions = self._find_training(name)
        version = versions.newest + 1 if version is None else version
        versions.newest = max(versions.newest, version)
        return await self._trainers.write_adapter(name, version, folder.resolve(), canary=self._canary)

    async def sample(
        self, name: str, prompt: Sequence[int], sampling: Sampling, *, n: int = 1, version: Version | None = None, session: str = "",
    ) -> list[Sample]:
        """Sample n continuations by an adapter's newest published version, or by an older one whose folder is still kept.

        Raises:
            RefusedError: there is no such version, or the engine says that the request is wrong.
        """
        self._find(name)
        wanted = name if version is None else adapter_name(name, version)
        return await self.fleet.dispatcher.generate(tuple(prompt), sampling, n=n, session=session, adapter=wanted)

    async def save(self, name: str, folder: Path) -> None:
        """Write the full training state of an adapter, from which it goes on exactly, to a new folder."""
        self._find_training(name)
        await self._trainers.save_adapter(name, folder)

    async def load(self, name: str, folder: Path, *, optimizer: bool = True) -> None:
        """Load a folder of `save`, in place of the adapter of this name if there is one.

        `optimizer` says whether to load its moments and step count; otherwise they are fresh.
        """
        await self._trainers.restore_adapter(check_adapter(name), folder, optimizer=optimizer)
        self._enter(name)

    def _folder(self, name: str) -> Path:
        return self._config.weights_dir.resolve() / name

    def _enter(self, name: str) -> None:
        if name not in self._versions:
            published = (int(folder.name[1:]) for folder in self._folder(name).glob("v????????"))
            self._versions[name] = _Versions(max(published, default=-1))

    def _find_training(self, name: str) -> _Versions:
        versions = self._find(name)
        if name not in self._trainers.steps:
            raise ConfigError(f"the adapter {name!r} was lost with the trainers that have failed; load or add it first")
        return versions

    def _find(self, name: str) -> _Versions:
        return find_adapter(name, self._versions)


@asynccontextmanager
async def open_adapters(config: Config, record: RunRecord) -> AsyncIterator[Adapters]:
    """Start `train.num_ranks` ranks and the engines on one base model; all of them end with the body.

    Raises:
        ConfigError: as `check_many`, or ranks and engines are to take turns.
        ModelError: the folder holds no model or tokenizer.
    """
    parallel = config.train.parallel
    check_many(config.model.lora, config.train, shard=parallel.shard, tp=parallel.tp, ep=parallel.ep)
    if config.cluster.take_turns:
        raise ConfigError(
            "cluster.take_turns must be false to train many adapters, got true; some sample while others train, so leave it out, or set"
            " cluster.share_devices")
    plan = make_plan(config)
    config = config.planned(plan.sections)
    plan.advise(record)
    record.events.record("threads", rank=config.train.threads, engine=config.inference.threads)
    base = read_base(config)
    ends = base_ends(base)
    if base.build is not None:
        base.tokenizer.save(base.model)
    async with AsyncExitStack() as stack:
        launcher = await stack.enter_async_context(make_launcher(config.for_launcher))
        may_load = asyncio.Event()
        ranks, (engines, addresses) = await both(
            WorkerRanks.start(
                launcher, config.for_ranks, model=base.model, build=base.build, log_dir=record.log_dir, trains="adapters",
                may_load=may_load),
            start_engines(
                launcher, config.for_engines, log_dir=record.log_dir, model=base.model, tokenizer=base.tokenizer_folder,
                builds=base.build is not None, may_load=may_load))
        names = note_apart(record, apart((*ranks.workers, *engines.workers)))
        without_shared_disk(config.for_engines, apart=names, builds=base.build is not None)
        trainers = Trainers(ranks, config.for_ranks)
        fleet = await open_fleet(stack, engines, addresses, config.for_engines, record, model=base.model)
        canary = tuple(range(min(base.tokenizer.vocab_size, 16)))
        async with beside(fleet.watch()):
            await fleet.adapters.serve_base(canary, await trainers.score_base(canary))
            model_config = read_model_config(base.model)
            limits = BaseLimits(
                (model_config.get("text_config") or model_config)["vocab_size"], base.context,
                min(base.context, config.train.max_tokens_per_microbatch), config.model.lora.rank, ends.token_ids,
                reads_images=base.tokenizer.images is not None)
            yield Adapters(config, ranks, trainers, fleet, tokenizer=base.tokenizer, canary=canary, limits=limits)
