"""Rules of [algorithm]: combinations of its settings, and with [rollout], [critic] and [teacher]. Called by `config.root`."""

from offbeat.config.algorithms import AlgorithmConfig
from offbeat.config.base import shown
from offbeat.config.critic import CriticConfig
from offbeat.config.objectives import OBJECTIVES, names_with, objective_of
from offbeat.config.rollout import RolloutConfig
from offbeat.config.teacher import TeacherConfig


def check_algorithm(
    algorithm: AlgorithmConfig, *, rollout: RolloutConfig, critic: CriticConfig, teacher: TeacherConfig, total_steps: int,
) -> None:
    """Raise ValueError for an algorithm whose parts contradict each other or other sections; `total_steps` is the run's."""
    _check_credit(algorithm, rollout=rollout, critic=critic, total_steps=total_steps)
    _check_loss(algorithm)
    _check_own_code(algorithm, rollout=rollout)
    _check_control(algorithm)
    _check_teacher(algorithm, teacher=teacher, rollout=rollout)


def _check_credit(algorithm: AlgorithmConfig, *, rollout: RolloutConfig, critic: CriticConfig, total_steps: int) -> None:
    if rollout.group_size == 1 and algorithm.centre not in ("none", "critic") and not algorithm.credit:
        raise ValueError(
            f"rollout.group_size must be at least 2 with algorithm.centre = '{algorithm.centre}', got 1; the mean of a group is its"
            " baseline, so one sample alone learns nothing")
    if algorithm.centre == "none" and algorithm.scale != "none":
        raise ValueError(
            f"algorithm.scale must be 'none' with algorithm.centre = 'none', got '{algorithm.scale}'; equal rewards have no deviation"
            " to divide by")
    if algorithm.needs_critic:
        _check_critic(algorithm, critic=critic, total_steps=total_steps)
    _check_turns(algorithm)
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
        raise ValueError(f"rollout.single_rank_load must be true with {what}, got false; no rank has the whole batch to choose tokens from")
    if objective_of(algorithm.objective).imitates and algorithm.reward_kl:
        raise ValueError(
            f"algorithm.reward_kl must be 0 with algorithm.objective = '{algorithm.objective}', which reads no advantages, got"
            f" {algorithm.reward_kl:g}; use algorithm.kl_loss")


def _check_turns(algorithm: AlgorithmConfig) -> None:
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
    if objective_of(algorithm.objective).imitates:
        raise ValueError(
            f"algorithm.turn_credit must be 'episode' with algorithm.objective = '{algorithm.objective}', which reads no advantages, got"
            f" '{credit}'")
    for name, neutral in (("gamma", 1.0), ("reward_kl", 0.0), ("separate_rewards", False)):
        if (value := getattr(algorithm, name)) != neutral:
            raise ValueError(
                f"algorithm.{name} must be {shown(neutral)} with algorithm.turn_credit = '{credit}', got {shown(value)}; a turn has"
                " one advantage, of one reward")
    if algorithm.whiten == "sequences":
        raise ValueError(
            f"algorithm.whiten must be 'none' or 'tokens' with algorithm.turn_credit = '{credit}', got 'sequences'; turns of an episode"
            " have advantages of their own")


def _check_critic(algorithm: AlgorithmConfig, *, critic: CriticConfig, total_steps: int) -> None:
    if algorithm.scale != "none":
        raise ValueError(
            f"algorithm.scale must be 'none' with algorithm.centre = 'critic', got '{algorithm.scale}'; algorithm.whiten = 'tokens' can"
            " scale its advantages")
    if algorithm.credit:
        raise ValueError(f"algorithm.credit must be empty with algorithm.centre = 'critic', got '{algorithm.credit}'; both give advantages")
    for name, why in (
        ("separate_rewards", "a critic learns the sum of the rewards"), ("drop_zero_advantage", "the critic learns from all tokens"),
    ):
        if getattr(algorithm, name):
            raise ValueError(f"algorithm.{name} must be false with algorithm.centre = 'critic', got true; {why}")
    if algorithm.whiten == "sequences":
        raise ValueError(
            "algorithm.whiten must be 'none' or 'tokens' with algorithm.centre = 'critic', got 'sequences'; each token has an advantage"
            " of its own")
    if objective_of(algorithm.objective).imitates:
        raise ValueError(
            "algorithm.objective must be one that reads advantages with algorithm.centre = 'critic', got"
            f" '{algorithm.objective}'; use another centre")
    if critic.warmup_steps >= total_steps:
        raise ValueError(
            f"critic.warmup_steps must be below run.total_steps = {total_steps}, got {critic.warmup_steps}; the policy"
            " would never be trained")


def _check_loss(algorithm: AlgorithmConfig) -> None:
    if 0 < algorithm.dual_clip <= 1:
        raise ValueError(f"algorithm.dual_clip must be 0 (off) or > 1, got {algorithm.dual_clip:g}")
    if algorithm.dual_clip and "dual_clip" not in objective_of(algorithm.objective).constants:
        raise ValueError(
            f"algorithm.dual_clip must be 0 with algorithm.objective = '{algorithm.objective}', got {algorithm.dual_clip:g}; only"
            f" {' and '.join(names_with('dual_clip'))} has that bound")
    if algorithm.anchor == "rollout" and algorithm.weight != "none":
        raise ValueError(
            f"algorithm.weight must be 'none' with algorithm.anchor = 'rollout', got '{algorithm.weight}'; the ratio to the policy that"
            " sampled already corrects for it, and would count twice")
    if algorithm.weight_low > algorithm.weight_high:
        raise ValueError(f"algorithm.weight_low must be at most weight_high = {algorithm.weight_high:g}, got {algorithm.weight_low:g}")
    for rule in algorithm.filters:
        if rule.low > rule.high:
            raise ValueError(f"algorithm.filters: low of {rule.metric} must be at most high = {rule.high:g}, got {rule.low:g}")
    if algorithm.drop_zero_advantage and (terms := algorithm.terms_on_all_tokens):
        raise ValueError(
            f"algorithm.drop_zero_advantage must be false with algorithm.{terms[0]}, which acts on sequences of advantage 0, too; leave"
            " it out")


def _check_own_code(algorithm: AlgorithmConfig, *, rollout: RolloutConfig) -> None:
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
                f"algorithm.{name} must be {shown(neutral)} with algorithm.credit, got {shown(value)}; your function gives the"
                " advantages, so do it there")
    if not rollout.single_rank_load:
        raise ValueError(
            "rollout.single_rank_load must be true with algorithm.credit, got false; no rank has the whole batch to give your function")


def _check_control(algorithm: AlgorithmConfig) -> None:
    if algorithm.kl_target and algorithm.kl_loss == "none" and not algorithm.reward_kl:
        raise ValueError(
            f"algorithm.kl_target must be 0 without algorithm.kl_loss and algorithm.reward_kl, got {algorithm.kl_target:g}; there is no"
            " coefficient to adapt")
    control = algorithm.cov_control
    if control not in ("none", objective_of(algorithm.objective).cov_control):
        wanted = next(name for name, objective in OBJECTIVES.items() if objective.cov_control == control)
        raise ValueError(
            f"algorithm.objective must be '{wanted}' with algorithm.cov_control = '{algorithm.cov_control}', got"
            f" '{algorithm.objective}'; the method is defined for that loss")
    if algorithm.cov_control == "clip" and algorithm.cov_low >= algorithm.cov_high:
        raise ValueError(f"algorithm.cov_low must be below cov_high = {algorithm.cov_high:g}, got {algorithm.cov_low:g}")
    if algorithm.cov_control == "kl" and algorithm.num_minibatches == 1:
        raise ValueError(
            "algorithm.num_minibatches must be at least 2 with algorithm.cov_control = 'kl', got 1; the only update starts at the"
            " proximal policy, so the term cannot act")


def _check_teacher(algorithm: AlgorithmConfig, *, teacher: TeacherConfig, rollout: RolloutConfig) -> None:
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
    if teacher.url and rollout.temperature != 1:
        raise ValueError(
            f"rollout.temperature must be 1 with teacher.url, got {rollout.temperature:g}; an engine scores at temperature 1, and"
            " only equal temperatures can be compared, so use teacher.path")
    _check_top_k(algorithm, top_k=teacher.top_k)
    if algorithm.needs_teacher and objective_of(algorithm.objective).imitates:
        raise ValueError(
            f"algorithm.teacher must be 'none' with algorithm.objective = '{algorithm.objective}', which reads no advantages, got"
            f" '{algorithm.teacher}'; use importance_sampling, or forward_kl with teacher.top_k")


def _check_top_k(algorithm: AlgorithmConfig, *, top_k: int) -> None:
    if not objective_of(algorithm.objective).asks_teacher:
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
