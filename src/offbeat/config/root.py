"""The whole configuration, and the rules that span sections."""

from pathlib import Path
from typing import Literal, Self

from pydantic import ValidationError, model_validator

from offbeat.config.agent import AgentConfig
from offbeat.config.algorithms import TOP_K_OBJECTIVES, AlgorithmConfig
from offbeat.config.base import Section, field
from offbeat.config.checkpoint import CheckpointConfig
from offbeat.config.cluster import ClusterConfig
from offbeat.config.controller import EvaluateConfig
from offbeat.config.critic import CriticConfig
from offbeat.config.curriculum import CurriculumConfig
from offbeat.config.data import DataConfig
from offbeat.config.data_sets import check_sets, errors_in_data_set, values_of_data_set
from offbeat.config.dist import DistConfig
from offbeat.config.evaluation_sets import check_best, errors_in_set, values_of_set
from offbeat.config.inference import InferenceConfig
from offbeat.config.model import ModelConfig
from offbeat.config.preference import USUAL_GAMMA, PreferenceConfig
from offbeat.config.reward_model import RewardModelConfig
from offbeat.config.rollout import RolloutConfig
from offbeat.config.run import RunConfig
from offbeat.config.service import ServeConfig
from offbeat.config.teacher import TeacherConfig
from offbeat.config.telemetry import TelemetryConfig
from offbeat.config.train import SftConfig, TrainConfig
from offbeat.config.weights import WeightsConfig


class Config(Section):
    """The configuration of one run, with all defaults filled in."""

    run: RunConfig = field(RunConfig(), "The run as a whole.")
    model: ModelConfig = field(ModelConfig(), "The model.")
    data: DataConfig = field(DataConfig(), "Prompts and answers.")
    curriculum: CurriculumConfig = field(CurriculumConfig(), "Which prompts come again.")
    algorithm: AlgorithmConfig = field(AlgorithmConfig(), "The objective.")
    teacher: TeacherConfig = field(TeacherConfig(), "Distillation.")
    train: TrainConfig = field(TrainConfig(), "The ranks that learn.")
    sft: SftConfig = field(SftConfig(), "Supervised fine-tuning.")
    critic: CriticConfig = field(CriticConfig(), "The critic.")
    preference: PreferenceConfig = field(PreferenceConfig(), "Preference training.")
    reward_model: RewardModelConfig = field(RewardModelConfig(), "Reward models.")
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
        """Folder where versions are published: `weights.dir`, or `weights` in the run."""
        return Path(self.weights.dir) if self.weights.dir else self.run_dir / "weights"

    @property
    def canary_dtype(self) -> Literal["float32", "bfloat16"]:
        """Coarser one of the number formats in which engines and the trainer compute the canary; mixed precision trains in bfloat16."""
        divided = self.train.parallel.shard > 1 or self.train.parallel.tp > 1
        mixed = self.train.computes_in == "bf16_mixed" and (not self.model.lora.rank or divided)
        return "bfloat16" if mixed else self.model.dtype

    @property
    def timed_rollout(self) -> RolloutConfig:
        """[rollout] with timeouts that allow for the longest answer: an episode contains a request, and a batch contains an episode."""
        request_s = self.inference.token_timeout_s * self.rollout.max_new_tokens
        episode_s = max(self.rollout.episode_timeout_s, request_s + self.rollout.reward_timeout_s)
        return self.rollout.model_copy(update={
            "episode_timeout_s": episode_s, "batch_timeout_s": max(self.rollout.batch_timeout_s, episode_s)})

    @property
    def timed_evaluate(self) -> EvaluateConfig:
        """[evaluate] with a timeout that allows for an episode."""
        return self.evaluate.model_copy(update={
            "timeout_s": max(self.evaluate.timeout_s, self.timed_rollout.episode_timeout_s)})

    def evaluation_set(self, name: str) -> "Config":
        """The configuration of the evaluation set `name`: this one, but with what [evaluate.sets.NAME] gives; it has no sets itself."""
        return type(self).model_validate(values_of_set(name, self.evaluate.sets[name], self.model_dump()))

    def data_set(self, name: str) -> "Config":
        """The configuration for rows of the data set `name`: this one, but with what [data.sets.NAME] gives; it has no sets itself."""
        return type(self).model_validate(values_of_data_set(name, self.data.sets[name], self.model_dump()))

    @model_validator(mode="after")
    def _check_across_sections(self) -> Self:
        name, num_engines = ("urls", len(self.inference.urls)) if self.inference.urls else ("num_engines", self.inference.num_engines)
        if self.inference.min_engines > num_engines:
            raise ValueError(
                f"inference.min_engines must be <= the {num_engines} of inference.{name}, got {self.inference.min_engines}")
        if self.model.tiny.num_heads % self.model.tiny.num_kv_heads:
            raise ValueError(
                f"model.tiny.num_kv_heads must divide num_heads = {self.model.tiny.num_heads}, got {self.model.tiny.num_kv_heads}")
        if self.model.lora.rank and self.train.recomputes == "selective":
            raise ValueError(
                "train.gradient_checkpointing must be 'off' or 'full' with model.lora.rank > 0, got 'selective'; adapters add to the"
                " results of matrix products in place, so none can be kept")
        if self.train.compile and self.train.recomputes != "off":
            raise ValueError(
                f"train.gradient_checkpointing must be 'off' with train.compile, got '{self.train.recomputes}'; torch leaves"
                " layers that it computes again uncompiled")
        if self.model.lora.rank and self.train.compile:
            raise ValueError(
                "train.compile must be false with model.lora.rank > 0, got true; layers with adapters cannot be compiled, so leave it out")
        if self.weights.whole_every_versions > 1:
            for name, value, wanted in (
                ("model.lora.rank", self.model.lora.rank, 0), ("inference.engine", self.inference.engine, "embedded"),
            ):
                if value != wanted:
                    raise ValueError(
                        f"weights.whole_every_versions must be 1 with {name} = {_shown(value)}, got {self.weights.whole_every_versions};"
                        " only the embedded engine takes changed weights, and adapters are small")
        if self.weights.channel == "collective" and self.inference.engine == "sglang":
            raise ValueError(
                "weights.channel must be 'disk' with inference.engine = 'sglang', got 'collective'; a folder in /dev/shm (weights.dir) is"
                " the fast way on one machine")
        if self.inference.devices_per_engine > 1 and self.inference.engine == "embedded":
            raise ValueError(
                "inference.devices_per_engine must be at most 1 with inference.engine = 'embedded', got"
                f" {self.inference.devices_per_engine}; use vllm or sglang, which split a model over devices, or more engines")
        if self.cluster.share_devices and self.cluster.launcher == "ray":
            raise ValueError(
                "cluster.share_devices must be false with cluster.launcher = 'ray', got true; Ray gives every process devices of its own")
        if self.cluster.take_turns:
            self._check_turns_on_devices()
        if self.model.lora.rank and self.train.offload_optimizer:
            raise ValueError(
                "train.offload_optimizer must be false with model.lora.rank > 0, got true; an adapter's moments are small, so leave it out")
        if self.model.lora.rank and not self.rollout.single_rank_load:
            raise ValueError(
                "rollout.single_rank_load must be true with model.lora.rank > 0, got false; one process routes to the engines that hold an"
                " adapter, so leave it out")
        if self.model.lora.rank and self.run.warm_up and not self.model.path and self.run.mode == "spmd":
            raise ValueError(
                "run.warm_up must be false with model.lora.rank > 0, no model.path and run.mode = 'spmd', got true; make the base with"
                " `offbeat sft` first, and give its export as model.path")
        if self.model.lora.rank > self.inference.max_adapter_rank:
            raise ValueError(
                f"model.lora.rank must be <= inference.max_adapter_rank = {self.inference.max_adapter_rank}, got {self.model.lora.rank}")
        self._check_parallel()
        self._check_who_loads()
        self._check_rollouts()
        self.agent.check(workflow=self.rollout.workflow, episode_timeout_s=self.rollout.episode_timeout_s)
        self._check_groups()
        self._check_credit()
        self._check_loss()
        self._check_own_code()
        self._check_control()
        self._check_teacher()
        self._check_preference()
        if self.data.task and self.data.path:
            raise ValueError(f"data.task and data.path exclude each other, got {self.data.task!r} and {self.data.path!r}; give one")
        if self.data.sets:
            check_sets(self.data)
        for name in self.data.sets:
            try:
                self.data_set(name)
            except ValidationError as exc:
                raise errors_in_data_set(name, exc) from exc
        for name in self.evaluate.sets:
            try:
                self.evaluation_set(name)
            except ValidationError as exc:
                raise errors_in_set(name, exc) from exc
        check_best(self.evaluate, heldout_size=self.data.heldout_size)
        return self

    def _check_turns_on_devices(self) -> None:
        for met, name, why in (
            (self.cluster.launcher == "ray", "cluster.launcher = 'ray'", "Ray gives every process devices of its own"),
            (bool(self.inference.urls), "inference.urls", "only engines that the run has started share its devices"),
            (self.inference.engine == "sglang", "inference.engine = 'sglang'", "the embedded engine and vLLM can be put to sleep"),
            (not self.rollout.single_rank_load, "rollout.single_rank_load = false", "ranks would wait for rollouts of sleeping engines"),
            (self.weights.interrupt != "recompute", f"weights.interrupt = '{self.weights.interrupt}'",
             "an engine that has slept has no cache to go on with, so leave it at 'recompute'"),
        ):
            if met:
                raise ValueError(f"cluster.take_turns must be false with {name}, got true; {why}")

    def _check_groups(self) -> None:
        curriculum = self.curriculum
        if self.algorithm.dynamic_sampling and self.rollout.group_size == 1:
            raise ValueError(
                "algorithm.dynamic_sampling must be false with rollout.group_size = 1, got true; the rewards of a single sample are always"
                " equal")
        if curriculum.is_on and self.data.sets:
            name, value = ("pools", "true") if curriculum.pools else ("leave_at", f"{curriculum.leave_at:g}")
            raise ValueError(
                f"curriculum.{name} must be {'false' if curriculum.pools else '0'} with data.sets, got {value}; sets are drawn by their"
                " weights")
        if curriculum.is_on and self.data.task:
            name, value = ("pools", "true") if curriculum.pools else ("leave_at", f"{curriculum.leave_at:g}")
            raise ValueError(
                f"curriculum.{name} must be {'false' if curriculum.pools else '0'} with data.task = {self.data.task!r}, got {value}; a task"
                " makes new rows without end, and none comes again; give rows by data.path, or leave it out")
        if curriculum.hard_up_to > curriculum.normal_up_to:
            raise ValueError(
                f"curriculum.hard_up_to must be at most normal_up_to = {curriculum.normal_up_to:g}, got {curriculum.hard_up_to:g}")

    def _check_credit(self) -> None:
        algorithm, rollout = self.algorithm, self.rollout
        if rollout.group_size == 1 and algorithm.centre not in ("none", "critic") and not algorithm.credit:
            raise ValueError(
                f"rollout.group_size must be at least 2 with algorithm.centre = '{algorithm.centre}', got 1; the mean of a group is its"
                " baseline, so one sample alone learns nothing")
        if algorithm.centre == "none" and algorithm.scale != "none":
            raise ValueError(
                f"algorithm.scale must be 'none' with algorithm.centre = 'none', got '{algorithm.scale}'; equal rewards have no deviation"
                " to divide by")
        if algorithm.needs_critic:
            self._check_critic()
        self._check_turns()
        if algorithm.scale == "group_mean" and algorithm.has_penalties:
            raise ValueError(
                "algorithm.length_penalty, algorithm.malformed_penalty and algorithm.overlong_buffer_share must be 0 with algorithm.scale ="
                " 'group_mean', which needs rewards of at least 0")
        if algorithm.batch_statistics and not rollout.single_rank_load:
            name = algorithm.batch_statistics[0]
            raise ValueError(
                f"rollout.single_rank_load must be true with algorithm.{name} = '{getattr(algorithm, name)}', got false; no rank has the"
                " whole batch to compute it over")
        if algorithm.compares_targets and not rollout.single_rank_load:
            what = "a filter m2" if algorithm.cov_control == "none" else f"algorithm.cov_control = '{algorithm.cov_control}'"
            raise ValueError(
                f"rollout.single_rank_load must be true with {what}, got false; no rank has the whole batch to choose tokens from")
        if algorithm.objective == "cross_entropy" and algorithm.reward_kl:
            raise ValueError(
                f"algorithm.reward_kl must be 0 with algorithm.objective = 'cross_entropy', which reads no advantages, got"
                f" {algorithm.reward_kl:g}; use algorithm.kl_loss")

    def _check_turns(self) -> None:
        algorithm = self.algorithm
        if algorithm.agent_baselines and algorithm.centre in ("none", "critic"):
            raise ValueError(
                f"algorithm.agent_baselines must be false with algorithm.centre = '{algorithm.centre}', got true; no rewards are compared"
                " there")
        credit = algorithm.turn_credit
        if credit == "episode":
            if algorithm.turn_gamma != 1:
                raise ValueError(
                    f"algorithm.turn_gamma must be 1 with algorithm.turn_credit = 'episode', got {algorithm.turn_gamma:g}; choose how turns"
                    " are credited, or discount tokens by algorithm.gamma")
            return
        if algorithm.centre == "critic" or (algorithm.centre == "none" and credit != "return"):
            raise ValueError(
                f"algorithm.turn_credit must be 'episode' with algorithm.centre = '{algorithm.centre}', got '{credit}'; "
                + ("a critic credits rewards of turns by itself" if algorithm.centre == "critic" else "no rewards are compared there"))
        if algorithm.objective == "cross_entropy":
            raise ValueError(
                f"algorithm.turn_credit must be 'episode' with algorithm.objective = 'cross_entropy', which reads no advantages, got"
                f" '{credit}'")
        for name, neutral in (("gamma", 1.0), ("reward_kl", 0.0), ("separate_rewards", False)):
            if (value := getattr(algorithm, name)) != neutral:
                raise ValueError(
                    f"algorithm.{name} must be {_shown(neutral)} with algorithm.turn_credit = '{credit}', got {_shown(value)}; a turn has"
                    " one advantage, of one reward")
        if algorithm.whiten == "sequences":
            raise ValueError(
                f"algorithm.whiten must be 'none' or 'tokens' with algorithm.turn_credit = '{credit}', got 'sequences'; turns of an episode"
                " have advantages of their own")

    def _check_critic(self) -> None:
        algorithm = self.algorithm
        if algorithm.scale != "none":
            raise ValueError(
                f"algorithm.scale must be 'none' with algorithm.centre = 'critic', got '{algorithm.scale}'; algorithm.whiten = 'tokens' can"
                " scale its advantages")
        if algorithm.credit:
            raise ValueError(
                f"algorithm.credit must be empty with algorithm.centre = 'critic', got '{algorithm.credit}'; both give advantages")
        for name, why in (
            ("separate_rewards", "a critic learns the sum of the rewards"), ("drop_zero_advantage", "the critic learns from all tokens"),
        ):
            if getattr(algorithm, name):
                raise ValueError(f"algorithm.{name} must be false with algorithm.centre = 'critic', got true; {why}")
        if algorithm.whiten == "sequences":
            raise ValueError(
                "algorithm.whiten must be 'none' or 'tokens' with algorithm.centre = 'critic', got 'sequences'; each token has an advantage"
                " of its own")
        if algorithm.objective == "cross_entropy":
            raise ValueError(
                "algorithm.objective must be one that reads advantages with algorithm.centre = 'critic', got 'cross_entropy'; use another"
                " centre")
        if self.critic.warmup_steps >= self.run.total_steps:
            raise ValueError(
                f"critic.warmup_steps must be below run.total_steps = {self.run.total_steps}, got {self.critic.warmup_steps}; the policy"
                " would never be trained")

    def _check_loss(self) -> None:
        algorithm = self.algorithm
        if 0 < algorithm.dual_clip <= 1:
            raise ValueError(f"algorithm.dual_clip must be 0 (off) or > 1, got {algorithm.dual_clip:g}")
        if algorithm.dual_clip and algorithm.objective != "ppo":
            raise ValueError(
                f"algorithm.dual_clip must be 0 with algorithm.objective = '{algorithm.objective}', got {algorithm.dual_clip:g}; only ppo"
                " has that bound")
        if algorithm.anchor == "rollout" and algorithm.weight != "none":
            raise ValueError(
                f"algorithm.weight must be 'none' with algorithm.anchor = 'rollout', got '{algorithm.weight}'; the ratio to the policy that"
                " sampled already corrects for it, and would count twice")
        if algorithm.weight_low > algorithm.weight_high:
            raise ValueError(
                f"algorithm.weight_low must be at most weight_high = {algorithm.weight_high:g}, got {algorithm.weight_low:g}")
        for rule in algorithm.filters:
            if rule.low > rule.high:
                raise ValueError(f"algorithm.filters: low of {rule.metric} must be at most high = {rule.high:g}, got {rule.low:g}")
        if algorithm.drop_zero_advantage and (terms := algorithm.terms_on_all_tokens):
            raise ValueError(
                f"algorithm.drop_zero_advantage must be false with algorithm.{terms[0]}, which acts on sequences of advantage 0, too; leave"
                " it out")

    def _check_own_code(self) -> None:
        algorithm = self.algorithm
        if algorithm.objective_reads and not algorithm.has_own_objective:
            raise ValueError(
                f"algorithm.objective_reads must be empty with algorithm.objective = '{algorithm.objective}', which reads what it needs; it"
                " is for an objective of your own")
        if not algorithm.credit:
            return
        for name, neutral in (
            ("whiten", "none"), ("separate_rewards", False), ("gamma", 1.0), ("reward_kl", 0.0), ("turn_credit", "episode"),
            ("agent_baselines", False),
        ):
            if (value := getattr(algorithm, name)) != neutral:
                raise ValueError(
                    f"algorithm.{name} must be {_shown(neutral)} with algorithm.credit, got {_shown(value)}; your function gives the"
                    " advantages, so do it there")
        if not self.rollout.single_rank_load:
            raise ValueError(
                "rollout.single_rank_load must be true with algorithm.credit, got false; no rank has the whole batch to give your function")

    def _check_control(self) -> None:
        algorithm = self.algorithm
        if algorithm.kl_target and algorithm.kl_loss == "none" and not algorithm.reward_kl:
            raise ValueError(
                f"algorithm.kl_target must be 0 without algorithm.kl_loss and algorithm.reward_kl, got {algorithm.kl_target:g}; there is no"
                " coefficient to adapt")
        wanted = {"clip": "ppo", "kl": "importance_sampling"}.get(algorithm.cov_control, algorithm.objective)
        if algorithm.objective != wanted:
            raise ValueError(
                f"algorithm.objective must be '{wanted}' with algorithm.cov_control = '{algorithm.cov_control}', got"
                f" '{algorithm.objective}'; the method is defined for that loss")
        if algorithm.cov_control == "clip" and algorithm.cov_low >= algorithm.cov_high:
            raise ValueError(f"algorithm.cov_low must be below cov_high = {algorithm.cov_high:g}, got {algorithm.cov_low:g}")
        if algorithm.cov_control == "kl" and algorithm.num_minibatches == 1:
            raise ValueError(
                "algorithm.num_minibatches must be at least 2 with algorithm.cov_control = 'kl', got 1; the only update starts at the"
                " proximal policy, so the term cannot act")

    def _check_teacher(self) -> None:
        algorithm, teacher = self.algorithm, self.teacher
        if teacher.path and teacher.url:
            raise ValueError(f"teacher.path and teacher.url exclude each other, got {teacher.path!r} and {teacher.url!r}; give one")
        given = [name for name in ("path", "url") if getattr(teacher, name)]
        if algorithm.teacher == "model" and not given:
            raise ValueError(
                "teacher.path or teacher.url must be given with algorithm.teacher = 'model'; name a model with the policy's tokenizer")
        if algorithm.teacher != "model" and given:
            raise ValueError(
                f"teacher.{given[0]} must be empty with algorithm.teacher = '{algorithm.teacher}', which asks no other model, got"
                f" {getattr(teacher, given[0])!r}; use algorithm.preset = 'opd' to learn from it")
        if teacher.url and not teacher.url.startswith(("http://", "https://")):
            raise ValueError(f"teacher.url must begin with http:// or https://, got {teacher.url!r}")
        if teacher.url and self.rollout.temperature != 1:
            raise ValueError(
                f"rollout.temperature must be 1 with teacher.url, got {self.rollout.temperature:g}; an engine scores at temperature 1, and"
                " only equal temperatures can be compared, so use teacher.path")
        self._check_top_k()
        if algorithm.needs_teacher and algorithm.objective == "cross_entropy":
            raise ValueError(
                f"algorithm.teacher must be 'none' with algorithm.objective = 'cross_entropy', which reads no advantages, got"
                f" '{algorithm.teacher}'; use importance_sampling, or forward_kl with teacher.top_k")

    def _check_top_k(self) -> None:
        algorithm, top_k = self.algorithm, self.teacher.top_k
        if algorithm.objective not in TOP_K_OBJECTIVES:
            if top_k:
                raise ValueError(
                    f"teacher.top_k must be 0 with algorithm.objective = '{algorithm.objective}', got {top_k}; forward_kl and reverse_kl"
                    " learn the teacher's likeliest tokens")
            return
        name = f"algorithm.objective = '{algorithm.objective}'"
        if algorithm.teacher != "model":
            raise ValueError(
                f"algorithm.teacher must be 'model' with {name}, got '{algorithm.teacher}'; the likeliest tokens are those of the model of"
                " [teacher]")
        if not top_k:
            raise ValueError(f"teacher.top_k must be at least 1 with {name}, got 0; 20 is usual")
        if algorithm.teacher_credit == "added":
            raise ValueError(f"algorithm.teacher_credit must be 'alone' with {name}, which reads no advantages, got 'added'")
        samples = {"weight": algorithm.weight != "none", "filters": bool(algorithm.filters)}
        samples |= dict.fromkeys(set(algorithm.terms_on_all_tokens) - {"teacher"}, True)
        if acting := sorted(name for name, acts in samples.items() if acts):
            raise ValueError(
                f"algorithm.{acting[0]} must be off with {name}, which compares no sampled tokens; set it to"
                f" {'[]' if acting[0] == 'filters' else '0' if acting[0] not in ('weight', 'kl_loss') else repr('none')}")

    def _check_preference(self) -> None:
        preference = self.preference
        if preference.label_smoothing and preference.loss != "dpo":
            raise ValueError(
                f"preference.label_smoothing must be 0 with preference.loss = '{preference.loss}', got {preference.label_smoothing:g}; only"
                " dpo smooths labels")
        if preference.gamma != USUAL_GAMMA and preference.loss != "simpo":
            raise ValueError(
                f"preference.gamma must be left out with preference.loss = '{preference.loss}', got {preference.gamma:g}; only simpo has a"
                " margin to reach")

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

    def _check_parallel(self) -> None:
        parallel = self.train.parallel
        if self.run.mode == "controller" or self.train.num_ranks > 1:  # in SPMD mode, torchrun says how many there are
            parallel.num_replicas(self.train.num_ranks)
        if parallel.ep not in (1, parallel.tp):
            raise ValueError(
                f"train.parallel.ep must be 1 or equal train.parallel.tp = {parallel.tp}, got {parallel.ep}; experts are divided among the"
                " ranks that compute the same rows")
        if self.train.compile and parallel.tp > 1:
            raise ValueError(
                f"train.compile must be false with train.parallel.tp = {parallel.tp}, got true; layers that ranks compute together have not"
                " been compiled so far, so leave it out")
        if parallel.ranks_per_share > 1 and not self.rollout.single_rank_load:
            raise ValueError(
                "rollout.single_rank_load must be true with train.parallel.tp or train.parallel.cp above 1, got false; the ranks of such a"
                " group need the same rows, so leave it out")

    def _check_who_loads(self) -> None:
        if self.rollout.single_rank_load:
            return
        if self.run.mode == "controller":
            raise ValueError(
                "rollout.single_rank_load must be true with run.mode = 'controller', got false; the controller is the one process that"
                " draws data, so leave it out, or run in SPMD mode")
        if self.rollout.balance_batch:
            raise ValueError(
                "rollout.balance_batch must be false with rollout.single_rank_load = false, got true; no rank has the whole batch then,"
                " so set rollout.balance_batch to false, or let one rank load")


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)
