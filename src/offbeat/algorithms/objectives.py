"""The loss of a batch as a `LossSpec`: of a run's [algorithm] or [preference], of a critic, or of a client. Torch-free.

The controller and the service choose it here, and the trainer computes it by the formula in `losses` of the same name.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from offbeat.config.algorithms import AlgorithmConfig
from offbeat.config.loss_terms import FILTERS, REGULARISERS
from offbeat.config.objectives import OBJECTIVES, is_own, names_for, objective_of
from offbeat.config.preference import PreferenceConfig
from offbeat.data.batch import Batch, FilterSpec, LossSpec, RegulariserSpec, WeightSpec
from offbeat.errors import ConfigError, DataError

CLIENT_LOSSES: Mapping[str, tuple[str, ...]] = MappingProxyType({
    name: tuple(key for key, constant in OBJECTIVES[name].constants.items() if constant.of_clients) for name in names_for("client")})
"""Losses that clients of the service may ask for, with the constants that they may set."""

CROSS_ENTROPY = LossSpec("cross_entropy")


def keeps_groups(batch: Batch) -> bool:
    """Whether a loss of the batch needs its groups whole, in each micro-batch."""
    return any(objective_of(loss.name).group for loss in batch.losses)


def reads_of(loss: LossSpec) -> tuple[str, ...]:
    """Return the columns that a loss reads besides `loss_weights`, such as ("rollout_logprobs", "advantages"), and "entropy".

    The trainer computes the entropy in its own pass. It computes `prox_logprobs`, under the weights at the start of a step, if the step has
    several updates; with one update they are those of its own forward pass. `algorithms.selection.choose_tokens` gives `m2_mask`,
    `detach_mask` and `kl_cov_mask`. A loss over a run's own samples does not need `ratio_mask`: all of its targets count.
    """
    objective = objective_of(loss.name)
    anchor = "prox_logprobs" if loss.anchor == "prox" else "rollout_logprobs"
    reads = ["anchor"] if objective.uses_anchor else []
    reads += ["advantages"] if loss.own_samples else []
    reads += [name for name in objective.reads if name != "ratio_mask" or not loss.own_samples]
    reads += ["prox_logprobs"] if loss.weight is not None else []
    reads += ["rollout_logprobs"] if loss.weight is not None or loss.own_samples else []
    for rule in loss.filters:
        reads += FILTERS[rule.metric]
    for term in loss.regularisers:
        reads += REGULARISERS[term.kind]
    return tuple(dict.fromkeys(anchor if name == "anchor" else name for name in (*reads, *loss.reads)))


def policy_loss(config: AlgorithmConfig) -> LossSpec:
    """Return the loss that [algorithm] describes. Raises ConfigError if its objective has no such constant, or a value is out of bounds."""
    terms = [
        *([RegulariserSpec(config.kl_loss, config.kl_coefficient)] if config.kl_loss != "none" else []),
        RegulariserSpec("entropy", config.entropy_coefficient), RegulariserSpec("drift", config.drift_coefficient),
        RegulariserSpec("imitation", config.imitation_coefficient),
        *([RegulariserSpec("kl_cov", config.cov_coefficient, config.cov_share)] if config.cov_control == "kl" else [])]
    filters = [FilterSpec(rule.metric, rule.level, rule.aggregate, rule.low, rule.high) for rule in config.filters]
    if config.cov_control == "clip":
        filters.append(FilterSpec("clip_cov", low=config.cov_low, high=config.cov_high, share=config.cov_share))
    columns = {"reference": "ref_logprobs", "entropy": "entropy"}
    return LossSpec(
        _absolute(config.objective), _constants(config), anchor=config.anchor,
        weight=None if config.weight == "none" else WeightSpec(
            config.weight, config.weight_level, config.weight_low, config.weight_high),
        filters=tuple(filters), regularisers=tuple(term for term in terms if term.coefficient), own_samples=True,
        reads=tuple(columns[name] for name in config.objective_reads))


def _absolute(name: str) -> str:
    """Return an objective's name with its file, if it has one, as an absolute path: a rank may have another working directory."""
    module, _, function = name.rpartition(":")
    return f"{Path(module).resolve()}:{function}" if module.endswith(".py") else name


def _constants(config: AlgorithmConfig) -> dict[str, float | str]:
    """Return the constants of the objective that [algorithm] names; raises as `policy_loss`."""
    name = config.objective
    if is_own(name):
        return dict(config.constants)
    objective, values = OBJECTIVES[name], {}
    if objective.bounds == "ratio":
        values = {"clip_low": 1.0 - config.clip_low, "clip_high": 1.0 + config.clip_high}
    elif objective.bounds == "distance":
        values = {"clip_low": config.clip_low, "clip_high": config.clip_high}
    if "dual_clip" in objective.constants:
        values["dual_clip"] = config.dual_clip
    further = [key for key in objective.constants if key not in values]
    unknown = config.constants.keys() - set(further)
    if unknown and not config.credit:  # the others are for a credit of the user's own
        raise ConfigError(f"algorithm.constants of {name} has no {min(unknown)[:80]!r}; it has {', '.join(further) or 'none'}")
    own = {key: value for key, value in config.constants.items() if key in further}
    values = {**{key: constant.default for key, constant in objective.constants.items()}, **values, **own}
    for key, constant in objective.constants.items():
        constant.check(f"{key} of the objective {name}", values[key])
    return values


def value_loss(clip: float) -> LossSpec:
    """Return the loss of a critic, whose values may change by at most `clip`; 0 is no limit."""
    return LossSpec("value", {"clip": clip})


def preference_loss(config: PreferenceConfig) -> LossSpec:
    """Return the loss of preference training that [preference] describes; kto's has a `z` of 0."""
    if not config.mix:
        return LossSpec(config.loss, _pair_constants(config.loss, config))
    constants: dict[str, float | str] = dict(config.mix)
    for name in config.mix:
        constants |= {f"{name}.{key}": value for key, value in _pair_constants(name, config).items()}
    return LossSpec("mix", constants)


def _pair_constants(name: str, config: PreferenceConfig) -> dict[str, float | str]:
    given = {key: value for key, value in (
        ("beta", config.beta), ("label_smoothing", config.label_smoothing)) if value}  # 0 takes the default of the loss
    given |= {key: getattr(config, key) for key in ("gamma", "desirable_weight", "undesirable_weight")}
    return {key: given.get(key, constant.default) for key, constant in OBJECTIVES[name].constants.items()}


def parts_of(constants: Mapping[str, float | str]) -> list[tuple[LossSpec, float]]:
    """Return the losses of a mix, from its constants, with their weights."""
    names = [name for name in constants if "." not in name]
    return [(LossSpec(name, {key.partition(".")[2]: value for key, value in constants.items() if key.startswith(f"{name}.")}),
             float(constants[name])) for name in names]


def first_of(loss: LossSpec) -> LossSpec:
    """Return the loss that compares answers in metrics: the first of a mix, or the loss itself."""
    return parts_of(loss.constants)[0][0] if objective_of(loss.name).mixes else loss


def client_loss(name: str, **constants: float) -> LossSpec:
    """Return a loss with default constants but those given; raises DataError if clients cannot ask for it, a constant or a value."""
    if name not in CLIENT_LOSSES:
        raise DataError(f"there is no loss {name[:80]!r}; use one of {', '.join(CLIENT_LOSSES)}")
    known = CLIENT_LOSSES[name]
    if unknown := constants.keys() - set(known):
        raise DataError(f"the loss {name} has no constant {min(unknown)[:80]!r}; it has {', '.join(known) or 'none'}")
    values = {**{key: OBJECTIVES[name].constants[key].default for key in known}, **constants}
    low, high, beta = (float(values.get(constant, 0.0)) for constant in ("clip_low", "clip_high", "beta"))
    if not 0 <= low <= high < math.inf:
        raise DataError(f"the bounds of the ratio in {name} must be finite with 0 <= low <= high, got {low} and {high}")
    if not 0 <= beta < math.inf:
        raise DataError(f"beta of {name} must be finite and at least 0, got {beta}")
    return LossSpec(name, values)
