"""The whole configuration, and the rules that span sections: of processes in `process_rules`, of algorithms in `algorithm_rules`."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Literal, Self

from pydantic import ValidationError, model_validator

from offbeat.config import process_rules
from offbeat.config.agent import PLAYS, AgentConfig
from offbeat.config.algorithm_rules import check_algorithm
from offbeat.config.base import field
from offbeat.config.checkpoint import CheckpointConfig
from offbeat.config.cluster import ClusterConfig
from offbeat.config.data_sets import check_sets, errors_in_set, values_of_data_set
from offbeat.config.dist import DistConfig
from offbeat.config.evaluate import EvaluateConfig
from offbeat.config.evaluation_sets import check_best, values_of_set
from offbeat.config.for_processes import EngineConfig, LauncherConfig, PlanConfig, RankConfig
from offbeat.config.inference import InferenceConfig
from offbeat.config.learning import LearningConfig
from offbeat.config.rollout import RolloutConfig
from offbeat.config.service import ServeConfig
from offbeat.config.telemetry import TelemetryConfig
from offbeat.config.training_kinds import TrainingKind
from offbeat.config.weights import WeightsConfig


class Config(LearningConfig):
    """The configuration of one run, with all defaults filled in: how it learns, and how it is run."""

    rollout: RolloutConfig = field(RolloutConfig(), "Rollouts.")
    agent: AgentConfig = field(AgentConfig(), "Agents and environments.")
    inference: InferenceConfig = field(InferenceConfig(), "Engines.")
    weights: WeightsConfig = field(WeightsConfig(), "Publishing.")
    checkpoint: CheckpointConfig = field(CheckpointConfig(), "Checkpoints.")
    evaluate: EvaluateConfig = field(EvaluateConfig(), "Evaluation.")
    cluster: ClusterConfig = field(ClusterConfig(), "Worker processes.")
    dist: DistConfig = field(DistConfig(), "Process groups.")
    telemetry: TelemetryConfig = field(TelemetryConfig(), "Records and display.")
    serve: ServeConfig = field(ServeConfig(), "The service for tenants.")

    @property
    def run_dir(self) -> Path:
        """Folder of the run: `run.dir`/`run.name`."""
        return Path(self.run.dir) / self.run.name

    @property
    def weights_dir(self) -> Path:
        """Folder where versions are published: `weights` in the run, or one of the run's own below `weights.dir`, which runs may share."""
        if not self.weights.dir:
            return self.run_dir / "weights"
        digits = hashlib.blake2b(str(self.run_dir.absolute()).encode(), digest_size=4).hexdigest()
        return Path(self.weights.dir) / f"{self.run.name}-{digits}"

    @property
    def canary_dtype(self) -> Literal["float32", "bfloat16"]:
        """The coarser of the engines' and the trainer's number formats for the canary; mixed precision trains in bfloat16."""
        mixed = self.train.computes_in == "bf16_mixed" and (not self.model.lora.rank or self.train.parallel.divides)
        return "bfloat16" if mixed else self.model.number_format

    @property
    def replays_supports(self) -> bool:
        """Whether engines are asked for the tokens among which each token was drawn, for the trainer to normalise over."""
        possible = self.inference.kind.gives_supports and not self.algorithm.needs_teacher
        return possible and self.model.support_replay != "off"

    @property
    def for_ranks(self) -> RankConfig:
        """The sections that train ranks get."""
        return RankConfig(**{name: getattr(self, name) for name in RankConfig.model_fields})

    @property
    def for_engines(self) -> EngineConfig:
        """The sections by which engines are started."""
        sections = {name: getattr(self, name) for name in EngineConfig.model_fields}
        if self.inference.batch_invariant == "auto" and self.rollout.max_head_offpolicyness:
            sections["inference"] = self.inference.model_copy(update={"batch_invariant": False})
        return EngineConfig(**sections)

    @property
    def for_plan(self) -> PlanConfig:
        """The sections with settings that are chosen by the machine."""
        return PlanConfig(**{name: getattr(self, name) for name in PlanConfig.model_fields})

    def planned(self, sections: PlanConfig) -> Self:
        """The configuration with the sections of `for_plan` after the choices."""
        return self.model_copy(update={name: getattr(sections, name) for name in PlanConfig.model_fields})

    @property
    def for_launcher(self) -> LauncherConfig:
        """The settings of the launcher, with `train.threads` and `inference.threads` chosen."""
        train, inference = self.train, self.inference
        computing = inference.num_engines + self.rollout.reward_workers  # a reward may be a model that computes as engines do
        return LauncherConfig(
            cluster=self.cluster, num_cores=train.num_ranks * train.threads + computing * (inference.threads or 1),
            wants_devices=train.devices_per_rank + inference.devices_per_engine > 0)

    @property
    def timed_rollout(self) -> RolloutConfig:
        """[rollout] with timeouts that allow for the longest answers: an episode contains requests, and a batch contains an episode."""
        num_requests = self.agent.max_turns if self.rollout.workflow in PLAYS else 1
        requests_s = self.inference.token_timeout_s * self.rollout.max_new_tokens * num_requests
        episode_s = max(self.rollout.episode_timeout_s, requests_s + self.rollout.reward_timeout_s)
        return self.rollout.model_copy(update={
            "episode_timeout_s": episode_s, "batch_timeout_s": max(self.rollout.batch_timeout_s, episode_s)})

    @property
    def timed_evaluate(self) -> EvaluateConfig:
        """[evaluate] with a timeout that allows for an episode."""
        return self.evaluate.model_copy(update={"timeout_s": max(self.evaluate.timeout_s, self.timed_rollout.episode_timeout_s)})

    def evaluation_set(self, name: str) -> "Config":
        """The configuration of the evaluation set `name`: this one with the settings of [evaluate.sets.NAME]; it has no sets itself."""
        return type(self).model_validate(values_of_set(name, self.evaluate.sets[name], self.model_dump()))

    def data_set(self, name: str) -> "Config":
        """The configuration for rows of the data set `name`: this one with the settings of [data.sets.NAME]; it has no sets itself."""
        return type(self).model_validate(values_of_data_set(name, self.data.sets[name], self.model_dump()))

    @model_validator(mode="after")
    def _check_across_sections(self) -> Self:
        process_rules.check_engines(self.inference)
        if self.model.tiny.num_heads % self.model.tiny.num_kv_heads:
            raise ValueError(
                f"model.tiny.num_kv_heads must divide num_heads = {self.model.tiny.num_heads}, got {self.model.tiny.num_kv_heads}")
        process_rules.check_quantization(self.inference, model=self.model)
        process_rules.check_routes(
            self.model, inference=self.inference, weights=self.weights, num_minibatches=self.algorithm.num_minibatches)
        process_rules.check_supports(self.model, inference=self.inference, needs_teacher=self.algorithm.needs_teacher)
        process_rules.check_step(self.train, model=self.model)
        process_rules.check_channel(self.weights, model=self.model, inference=self.inference)
        process_rules.check_devices(self.cluster, inference=self.inference)
        process_rules.check_turns(self.cluster, rollout=self.rollout, inference=self.inference, weights=self.weights)
        process_rules.check_adapter(self.model, run=self.run, train=self.train, rollout=self.rollout, inference=self.inference)
        process_rules.check_parallel(self.train, run=self.run, rollout=self.rollout)
        process_rules.check_who_loads(self.rollout, run=self.run)
        self._check_rollouts()
        self.agent.check(workflow=self.rollout.workflow, episode_timeout_s=self.rollout.episode_timeout_s)
        self._check_groups()
        check_algorithm(self.algorithm, rollout=self.rollout, critic=self.critic, teacher=self.teacher, total_steps=self.run.total_steps)
        self.preference.check()
        if self.data.task and self.data.path:
            raise ValueError(f"data.task and data.path exclude each other, got {self.data.task!r} and {self.data.path!r}; give one")
        if self.data.sets:
            check_sets(self.data)
        for section, sets, check in (("data", self.data.sets, self.data_set), ("evaluate", self.evaluate.sets, self.evaluation_set)):
            for name in sets:
                try:
                    check(name)
                except ValidationError as exc:
                    raise errors_in_set(section, name, exc) from exc
        check_best(self.evaluate, holds_out=self.data.heldout_size != 0)
        return self

    def _check_groups(self) -> None:
        curriculum, data = self.curriculum, self.data
        if self.algorithm.dynamic_sampling and self.rollout.group_size == 1:
            raise ValueError(
                "algorithm.dynamic_sampling must be false with rollout.group_size = 1, got true; the rewards of a single sample are always"
                " equal")
        for met, name, why in (
            (bool(data.sets), "data.sets", "sets are drawn by their weights"),
            (bool(data.task), f"data.task = {data.task!r}",
             "a task makes new rows without end, and none comes again; give rows by data.path, or leave it out"),
        ):
            if met and curriculum.is_on:
                what = "pools must be false" if curriculum.pools else "leave_at must be 0"
                raise ValueError(f"curriculum.{what} with {name}, got {'true' if curriculum.pools else f'{curriculum.leave_at:g}'}; {why}")
        if curriculum.hard_up_to > curriculum.normal_up_to:
            raise ValueError(
                f"curriculum.hard_up_to must be at most normal_up_to = {curriculum.normal_up_to:g}, got {curriculum.hard_up_to:g}")

    def _check_rollouts(self) -> None:
        rollout = self.rollout
        if not all(rollout.stop):
            raise ValueError("rollout.stop must not hold an empty string, which every text ends with; leave it out")
        weights = {abs(weight) for weight in rollout.rewards.values()}
        if self.algorithm.separate_rewards and self.algorithm.scale != "none" and len(weights) > 1:
            raise ValueError(
                f"rollout.rewards must have equal weights with algorithm.separate_rewards and algorithm.scale = '{self.algorithm.scale}',"
                f" got {', '.join(f'{weight:g}' for weight in sorted(weights))}; each reward is divided by its own deviation, which undoes"
                " its weight")
        if rollout.reward_timeout_s >= rollout.episode_timeout_s:
            raise ValueError(
                f"rollout.episode_timeout_s must be above rollout.reward_timeout_s = {rollout.reward_timeout_s:g}, got"
                f" {rollout.episode_timeout_s:g}; a group is rejected as a whole at the former, before a slow reward call fails by itself")
        if rollout.batch_timeout_s < rollout.episode_timeout_s:
            raise ValueError(
                f"rollout.batch_timeout_s must be at least rollout.episode_timeout_s = {rollout.episode_timeout_s:g}, got"
                f" {rollout.batch_timeout_s:g}; the run would stop before it gives up a slow group")
        longest_s = self.inference.token_timeout_s * rollout.max_new_tokens
        if self.weights.interrupt == "drain" and not self.model.lora.rank and self.weights.switch_timeout_s < longest_s:
            raise ValueError(
                f"weights.switch_timeout_s must be at least {longest_s:g} with weights.interrupt = 'drain', got"
                f" {self.weights.switch_timeout_s:g}; a switch waits for answers of rollout.max_new_tokens = {rollout.max_new_tokens}, each"
                " token of which is allowed inference.token_timeout_s")


TRAINING_KINDS: Mapping[str, TrainingKind] = MappingProxyType({
    kind.command: kind for info in Config.model_fields.values() if (kind := getattr(info.annotation, "training", None)) is not None})
"""All kinds of training by their commands: "train", which is reinforcement learning, "sft", "dpo" and "reward-model"."""
