"""Rollouts of a process: brings together engines, rewards and data. Torch-free.

Opened by the controller, by rank 0 in SPMD mode, and by every other rank that rolls out on rank 0's engines.
"""

from collections.abc import Awaitable, Hashable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from offbeat.agents.opening import open_workflow
from offbeat.aio import HaltingClock, both
from offbeat.algorithms.experience import sft_batch
from offbeat.config.agent import PLAYS
from offbeat.config.engine_kinds import ENGINE_KINDS
from offbeat.config.root import Config
from offbeat.controller.diagnosis import IdleAdvice
from offbeat.controller.inputs import RunInputs
from offbeat.controller.parts import Rollouts
from offbeat.controller.reward_choice import choose_rewards, devices_per_reward_model, reward_model_of, what_judges
from offbeat.data.batch import Batch
from offbeat.data.mixture import first_rows
from offbeat.data.pieces import Pieces
from offbeat.data.prompt import check_length, render
from offbeat.data.rollout_records import keep_rejected_line
from offbeat.data.row import Row
from offbeat.data.stream import PromptStream
from offbeat.data.trajectory import Group, Trajectory
from offbeat.engine.reward_options import RewardModelOptions
from offbeat.errors import TooLongError
from offbeat.fleet.publishers import OnServed
from offbeat.inference.sampling import Sample, Sampling
from offbeat.journal.records import CallEntry, GroupSettled, PromptDrawn
from offbeat.journal.run_journal import NoJournal
from offbeat.rollout.accounts import Accounts
from offbeat.rollout.dynamic import DynamicSampling
from offbeat.rollout.episode import Episode, Generate, Workflow
from offbeat.rollout.executor import RolloutExecutor
from offbeat.rollout.idle import IdleMeter
from offbeat.rollout.metric import check_metrics
from offbeat.rollout.model_reward import ModelReward, worker_specs
from offbeat.rollout.outcomes import ON_PURPOSE, RolloutListener, Settled
from offbeat.rollout.player import Accept, RolloutParts
from offbeat.rollout.reward_pool import RewardPool, check_call
from offbeat.rollout.staleness import Gate
from offbeat.rollout.trajectory_checks import TrajectoryChecks
from offbeat.telemetry.record import RunRecord
from offbeat.types import Version
from offbeat.user_code.functions import resolve
from offbeat.workers.worker import Launcher

Rewards = RewardPool | ModelReward


@dataclass(frozen=True)
class MixedRewards:
    """The rewards of several data sets, by name; each row is judged by its own set's."""

    of_sets: Mapping[str, "RewardPool | ModelReward"]

    async def score(self, completions: Sequence[str], row: Row) -> list[float]:
        """See `RewardPool.score`."""
        check_call(completions, row)
        return await self.of_sets[row.of_set].score(completions, row)


@dataclass(frozen=True)
class UserCode:
    """Workflow and rewards of a run, with their processes, and the user code of its evaluation sets, by name."""

    rewards: "Rewards | MixedRewards"
    workflow: Workflow
    sets: Mapping[str, "UserCode"] = field(default_factory=dict)


@dataclass(frozen=True)
class RecordedRollouts(RolloutListener):
    """Records what the rollouts of a run tell, in its events, its stored rollouts and on its console.

    Attributes:
        keeps_rejected: whether rejected groups are stored.
        journal: has all of it; that of an evaluation has nothing.
    """

    record: RunRecord
    stream: PromptStream
    pieces: Pieces
    keeps_rejected: bool
    journal: NoJournal

    def on_drawn(self, prompt_id: str, version: Version) -> None:
        """See `RolloutListener`."""
        self.journal.record(PromptDrawn(prompt_id, version, *self.stream.position))

    def on_finished(self, group: Group) -> None:
        """See `RolloutListener`."""
        self.journal.finished(group)

    def on_rejected(self, settled: Settled) -> None:
        """See `RolloutListener`."""
        heard = settled.played.rewards.tolist() if settled.played is not None and settled.kind in ON_PURPOSE else ()
        self.journal.record(GroupSettled(settled.prompt_id, settled.kind, settled.rejected, settled.drawn_again, tuple(heard)))
        self.record.events.record(
            "drawn_again" if settled.drawn_again else "rejected", prompt_id=settled.prompt_id, why=settled.kind, reason=settled.rejected)
        if settled.played is not None and self.keeps_rejected:
            self.record.reject(settled.played.num_tokens, partial(
                keep_rejected_line, group=settled.played, row=self.stream.row(settled.prompt_id), pieces=self.pieces,
                reason=settled.rejected, why=settled.kind, drawn_again=settled.drawn_again))

    def on_unusable(self, prompt_id: str, reasons: Sequence[str]) -> None:
        """See `RolloutListener`."""
        self.record.events.record("unusable_samples", prompt_id=prompt_id, reasons=reasons)

    def on_heard(self, call: CallEntry) -> None:
        """See `RolloutListener`."""
        self.journal.heard(call)

    def on_played_again(self, prompt_id: str, *, num_again: int, num_left: int, num_tokens: int) -> None:
        """See `RolloutListener`."""
        self.record.events.record(
            "played_again", prompt_id=prompt_id, calls_from_journal=num_again, calls_not_asked_again=num_left,
            tokens_from_journal=num_tokens)

    def on_played_anew(self, prompt_id: str, reason: str) -> None:
        """See `RolloutListener`."""
        self.record.events.record("played_anew", prompt_id=prompt_id, reason=reason)

    def warn(self, text: str) -> None:
        """See `RolloutListener`."""
        self.record.console.note(text)


@dataclass(frozen=True)
class EngineRollouts:
    """Plays rollouts on the engines that `generate` routes to.

    Attributes:
        engines: the clock that stands still while the engines sleep.
        journal: hears of the groups that feed training.
        meters: idle meters of the executors that feed training; calls for evaluation sets count, too, as they keep the same engines busy.
    """

    config: Config
    record: RunRecord
    inputs: RunInputs
    generate: Generate
    user_code: UserCode
    engines: HaltingClock = field(default_factory=HaltingClock)
    journal: NoJournal = field(default_factory=NoJournal)
    meters: list[IdleMeter] = field(default_factory=list)

    draws = True

    def rollouts(self, stream: PromptStream, *, version: Version, last_version: Version, num_flat_rejected: int = 0) -> RolloutExecutor:
        """Create an executor that feeds the training steps from `version` to `last_version`; see `RolloutSource.rollouts`."""
        config, record, algorithm = self.config.timed_rollout, self.record, self.config.algorithm
        gate = Gate(
            batch_size=config.consumer_batch_size, max_running=config.max_concurrent_rollouts, eta=config.max_head_offpolicyness,
            version=version, last_version=last_version, on_stale=config.on_stale)
        accept: Accept = resolve(config.should_accept, kind="should_accept") if config.should_accept else lambda _group: True
        dynamic = None
        if algorithm.dynamic_sampling:
            dynamic = DynamicSampling(
                algorithm, batch_size=config.consumer_batch_size, num_rejected=num_flat_rejected,
                warn=partial(record.note, "dynamic_sampling"))

        parts = RolloutParts(
            workflow=self.user_code.workflow, make_episode=self._episode, accept=accept, dynamic=dynamic,
            checks=TrajectoryChecks(self.inputs.vocab_size, lambda trajectory: self._too_long(trajectory.row_tokens)),
            accounts=Accounts(record.tracer.add if self.config.telemetry.trace else None, tell=record.console.note),
            has_places=config.workflow in PLAYS, engines=self.engines,
            seed=self.config.run.seed if self.config.inference.seeded_requests else None, running_s=self._running_s)
        listener = RecordedRollouts(
            record, stream, Pieces(self.inputs.tokenizer), keeps_rejected=bool(self.config.telemetry.rollouts_every_steps),
            journal=self.journal)
        executor = RolloutExecutor(
            gate, stream, parts, config=config, sampling=self.inputs.sampling, listener=listener,
            idle_listener=IdleAdvice(record, self.config))
        self.meters.append(executor.idle)
        return executor

    @property
    def _running_s(self) -> float:
        """Seconds between two records of the tokens of running samples; 0 where they are not recorded."""
        checkpoint, kind = self.config.checkpoint, ENGINE_KINDS[self.config.inference.engine]
        return checkpoint.journal_running_s if checkpoint.journal and kind.goes_on else 0.0

    def rollouts_of_set(self, name: str) -> RolloutExecutor:
        """See `RolloutSource.rollouts_of_set`. A process without user code of the set must not play it."""
        of_set = replace(
            self, generate=self._generate_beside, meters=[], journal=NoJournal(), config=self.config.evaluation_set(name),
            inputs=self.inputs.sets[name], user_code=self.user_code.sets.get(name, self.user_code))
        return of_set.rollouts(PromptStream(of_set.inputs.train, seed=0), version=0, last_version=0)

    async def _generate_beside(self, prompt: tuple[int, ...], sampling: Sampling, *, n: int, session: str = "") -> list[Sample]:
        """Generate samples that are not for training; see `Generate`."""
        with ExitStack() as calls:
            for meter in self.meters:
                calls.enter_context(meter.calling())
            return await self.generate(prompt, sampling, n=n, session=session)

    def sft_batch(self, stream: PromptStream, count: int) -> Batch:
        """See `RolloutSource.sft_batch`."""
        return sft_batch(self.inputs.supervision.draw(stream, count))

    def _episode(self, row: Row, group_size: int, sampling: Sampling) -> Episode:
        inputs = self.inputs
        prompt = tuple(render(row, inputs.tokenizer, self.config.data))
        check_length(
            len(prompt), self.config.data, name=repr(str(row.prompt)[:40]), context=inputs.context,
            max_new_tokens=sampling.max_new_tokens)
        return Episode(
            row=row, prompt=prompt, group_size=group_size, sampling=sampling, generate=self._generate, score=self.user_code.rewards.score,
            tokenizer=inputs.tokenizer, context=inputs.context)

    def _generate(self, prompt: tuple[int, ...], sampling: Sampling, *, n: int, session: str = "") -> Awaitable[list[Sample]]:
        """Generate samples; see `Generate`. Raises TooLongError where an engine would refuse because the context is too short."""
        if len(prompt) + sampling.max_new_tokens > self.inputs.context:
            raise TooLongError(
                f"a prompt of {len(prompt)} tokens and max_new_tokens = {sampling.max_new_tokens} are more than the context of"
                f" {self.inputs.context}; a workflow of several turns has to stop before that")
        return self.generate(prompt, sampling, n=n, session=session)

    def _too_long(self, needed: int) -> str:
        """Return why a row of this many tokens cannot be trained on; empty if it can."""
        most = self.config.train.max_tokens_per_microbatch
        if needed > most:
            return f"a row of {needed} tokens exceeds train.max_tokens_per_microbatch = {most}"
        context = self.inputs.context
        return f"a row of {needed} tokens exceeds the model's context of {context}" if needed > context else ""


@dataclass(frozen=True)
class NoEngines:
    """The publisher and the rollout source of a run without engines, such as preference training; publishing does nothing.

    Attributes:
        draws: see `RolloutSource.draws`.
    """

    draws: bool

    async def publish(self, version: Version, *, on_served: OnServed) -> None:
        """See `Publishing.publish`."""

    async def settle(self, *, behind: int = 0) -> None:
        """See `Publishing.settle`."""

    async def watch(self) -> None:
        """Watch nothing; see `Publishing.watch`."""

    def rollouts(
        self, stream: PromptStream, *, version: Version, last_version: Version, num_flat_rejected: int = 0,  # noqa: ARG002
    ) -> Rollouts:
        """Never called: there are no answers."""
        raise AssertionError("a run without engines was asked for rollouts")

    def rollouts_of_set(self, name: str) -> Rollouts:
        """Never called: there are no answers."""
        raise AssertionError(f"a run without engines was asked to play {name}")

    def sft_batch(self, stream: PromptStream, count: int) -> Batch:  # noqa: ARG002
        """Never called: the rows are not prompts with answers."""
        raise AssertionError("a run without engines was asked to imitate")


async def open_user_code(
    stack: AsyncExitStack, inputs: RunInputs, config: Config, record: RunRecord, *, launcher: Launcher,
) -> UserCode:
    """Start rewards and workflow of the run and of its evaluation sets; see `open_rewards` and `open_workflow`.

    A reward or workflow that a set shares with the run, or with a set before it, is started once. The sets' metrics are tried here, too.
    """
    def workflow_of(own: Config, of_set: RunInputs, folder: Path) -> Awaitable[Workflow]:
        return open_workflow(stack, own, tokenizer=of_set.tokenizer, log_dir=folder, notes=record)

    if config.data.sets:
        code = await _open_mixed(stack, inputs, config, record, launcher=launcher)
    else:
        code = UserCode(*await both(
            open_rewards(stack, inputs.train.row(0), config, record, launcher=launcher), workflow_of(config, inputs, record.log_dir)))
    evaluated = [config, *map(config.evaluation_set, inputs.sets)]
    await check_metrics([(each.evaluate, each.rollout) for each in evaluated], log_dir=record.log_dir)
    rewards, workflows = {what_judges(config): code.rewards}, {_what_plays(config): code.workflow}
    sets: dict[str, UserCode] = {}
    for name, of_set in inputs.sets.items():
        own = config.evaluation_set(name)
        judges, plays = what_judges(own), _what_plays(own)
        if judges not in rewards:
            rewards[judges] = await open_rewards(stack, of_set.train.row(0), own, record, launcher=launcher, of_set=name)
        if plays not in workflows:
            workflows[plays] = await workflow_of(own, of_set, _log_dir(record, name))
        sets[name] = UserCode(rewards[judges], workflows[plays])
    return replace(code, sets=sets)


async def _open_mixed(
    stack: AsyncExitStack, inputs: RunInputs, config: Config, record: RunRecord, *, launcher: Launcher,
) -> UserCode:
    """Start rewards and workflow of each data set; one that a set shares with a set before it is started once."""
    rewards: dict[Hashable, Rewards] = {}
    workflows: dict[Hashable, Workflow] = {}
    judges: dict[str, Rewards] = {}
    plays: dict[str, Workflow] = {}
    for name, row in first_rows(inputs.train).items():
        own, folder = config.data_set(name), f"data-{name}"
        judging, playing = what_judges(own), _what_plays(own)
        if judging not in rewards:
            rewards[judging] = await open_rewards(stack, row, own, record, launcher=launcher, of_set=folder)
        if playing not in workflows:
            tokenizer = inputs.tokenizer.giving(own.data.chat_template_kwargs)
            workflows[playing] = await open_workflow(
                stack, own, tokenizer=tokenizer, log_dir=_log_dir(record, folder), notes=record)
        judges[name], plays[name] = rewards[judging], workflows[playing]

    async def play_of_set(episode: Episode) -> Sequence[Trajectory]:
        return await plays[episode.row.of_set](episode)

    return UserCode(MixedRewards(judges), play_of_set)


def _what_plays(config: Config) -> Hashable:
    """Return the settings of `open_workflow` that may differ between a run and its evaluation sets."""
    data = config.data
    return bool(data.sets), config.rollout.workflow, config.agent, data.system_prompt, tuple(data.chat_template_kwargs.items())


def _log_dir(record: RunRecord, of_set: str) -> Path:
    """Return the folder of logs of an evaluation set's processes; "" is the run itself."""
    folder = record.log_dir / of_set
    folder.mkdir(parents=True, exist_ok=True)
    return folder


async def open_rewards(
    stack: AsyncExitStack, row: Row, config: Config, record: RunRecord, *, launcher: Launcher, of_set: str = "",
) -> Rewards:
    """Start the reward processes, by the launcher if they compute with a model, and try the reward on one row.

    Args:
        row: row whose answer is scored, so that a broken reward is found before any episode.
        of_set: name of the evaluation set that they judge; "" for the run.
    """
    rollout, log_dir = config.rollout, _log_dir(record, of_set)
    if model := reward_model_of(config):
        options = RewardModelOptions(
            model, config.model.number_format, config.data.system_prompt, config.train.max_tokens_per_microbatch)
        rewards = await stack.enter_async_context(ModelReward(
            launcher, options, worker_specs(
                rollout.reward_workers, log_dir=log_dir, threads=config.inference.threads or 1,
                num_devices=devices_per_reward_model(config), of_set=of_set),
            timeout_s=rollout.reward_timeout_s, start_timeout_s=config.cluster.start_timeout_s))
    else:
        weights = choose_rewards(config)
        rewards = await stack.enter_async_context(RewardPool(
            weights if rollout.rewards else next(iter(weights)), num_workers=rollout.reward_workers, timeout_s=rollout.reward_timeout_s,
            log_dir=log_dir, memory_bytes=rollout.reward_memory_bytes, allowed=rollout.reward_env,
            start_timeout_s=config.cluster.start_timeout_s))
    await rewards.check(row)
    return rewards
