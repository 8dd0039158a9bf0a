"""One table of all objectives: what each reads, and which constants it has. The formulas are in `losses`, under the same names. Torch-free.

The controller and the service choose a loss here and put it into their batches as a `LossSpec`; the trainer computes it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from offbeat.config.algorithms import AlgorithmConfig
from offbeat.config.preference import PreferenceConfig
from offbeat.data.batch import Batch, FilterSpec, LossSpec, RegulariserSpec, WeightSpec
from offbeat.errors import ConfigError, DataError


@dataclass(frozen=True)
class Constant:
    """A constant of an objective: its default, and its bounds or, if it is a word, all words that it can be."""

    default: float | str
    low: float = 0.0
    high: float = math.inf
    words: tuple[str, ...] = ()

    def check(self, name: str, value: Any) -> None:
        """Raise ConfigError for a value that it cannot have; `name` is the constant's in the message."""
        if self.words:
            if value not in self.words:
                raise ConfigError(f"{name} must be one of {', '.join(self.words)}, got {str(value)[:80]!r}")
        elif isinstance(value, str) or not math.isfinite(value) or not self.low <= value <= self.high:
            bounds = f"at least {self.low:g}" + (f" and at most {self.high:g}" if self.high < math.inf else "")
            raise ConfigError(f"{name} must be a finite number of {bounds}, got {str(value)[:80]!r}")


@dataclass(frozen=True)
class Objective:
    """One kind of loss.

    Attributes:
        reads: columns of the batch, besides `loss_weights` and what `reads_of` adds.
        constants: by name.
        uses_anchor: whether it compares the current policy with the anchor of its `LossSpec`.
        bounds: what `clip_low` and `clip_high` bound: "ratio", the ratio itself, or "distance", how far the policy may move to either
            side; "" if it has none.
        by_sequence: whether a target's loss depends on the other targets of its sequence.
        by_group: whether it depends on the other sequences of its group (`group_ids`), such as the two answers of a preference pair, which
            are then in one micro-batch and one minibatch. Each target has the loss of its whole group, and weighs 1 / (number of groups *
            targets of its group).
        by_token: whether it compares means over an answer's targets instead of sums.
        drops_inputs: whether an adapter's dropout applies. A ratio compares the policy with the one that sampled, and neither uses dropout.
    """

    reads: tuple[str, ...] = ("advantages",)
    constants: Mapping[str, Constant] = field(default_factory=dict)
    uses_anchor: bool = True
    bounds: Literal["", "ratio", "distance"] = ""
    by_sequence: bool = False
    by_group: bool = False
    by_token: bool = False
    drops_inputs: bool = False

    @property
    def refers(self) -> bool:
        """Whether it compares with the reference policy."""
        return "ref_logprobs" in self.reads


def _compares(constants: Mapping[str, Constant], *, reads: tuple[str, ...] = ("ref_logprobs",), by_token: bool = False) -> Objective:
    """Return an objective of preference training."""
    return Objective(reads, constants, uses_anchor=False, by_group=True, by_token=by_token)


_RATIO = {"clip_low": Constant(0.8), "clip_high": Constant(1.2)}
_POSITIVE = 1e-6
_BETA = {"beta": Constant(0.1, low=_POSITIVE)}
_SMOOTHING = {"label_smoothing": Constant(0.0, high=0.5)}
OBJECTIVES: Mapping[str, Objective] = MappingProxyType({
    "cross_entropy": Objective((), uses_anchor=False, drops_inputs=True),
    "reinforce": Objective(uses_anchor=False),
    "importance_sampling": Objective(),
    "ppo": Objective(constants={**_RATIO, "dual_clip": Constant(0.0)}, bounds="ratio"),
    "cispo": Objective(constants={"clip_low": Constant(0.0), "clip_high": Constant(4.0)}, bounds="ratio"),
    "dro": Objective(constants={"beta": Constant(0.05)}),
    # The paper's range is 0.9997 to 1.0004; PPO's, which users expect, stops only steps that went far astray.
    "gspo": Objective(("advantages", "ratio_mask"), _RATIO, bounds="ratio", by_sequence=True),
    "sapo": Objective(constants={"tau_low": Constant(1.05, low=_POSITIVE), "tau_high": Constant(1.0, low=_POSITIVE)}),
    "gmpo": Objective(constants={"clip_low": Constant(0.4), "clip_high": Constant(0.4)}, bounds="distance", by_sequence=True),
    "dppo": Objective(
        constants={"clip_low": Constant(0.2), "clip_high": Constant(0.2), "divergence": Constant("tv", words=("tv", "kl"))},
        bounds="distance"),
    "forward_kl": Objective(("teacher_logprobs",), uses_anchor=False),
    "reverse_kl": Objective(("teacher_logprobs", "teacher_least"), uses_anchor=False),
    "value": Objective(("values", "returns"), {"clip": Constant(0.0)}, uses_anchor=False),
    # Of preference training, in `losses.pairs`.
    "dpo": _compares(_BETA | _SMOOTHING),
    "robust": _compares(_BETA | _SMOOTHING),
    "hinge": _compares(_BETA),
    "exo_pair": _compares(_BETA | {"label_smoothing": Constant(1e-3, low=_POSITIVE, high=0.5)}),
    "nca_pair": _compares(_BETA),
    "bco_pair": _compares(_BETA),
    "sppo_hard": _compares(_BETA),
    "apo_zero": _compares(_BETA),
    "apo_down": _compares(_BETA),
    "ipo": _compares(_BETA, by_token=True),
    "sigmoid_norm": _compares({"beta": Constant(5.0, low=_POSITIVE)}, by_token=True),
    "simpo": _compares({"beta": Constant(2.0, low=_POSITIVE), "gamma": Constant(0.5)}, reads=(), by_token=True),
    "orpo": _compares(_BETA, reads=(), by_token=True),
    "sft": _compares({}, reads=(), by_token=True),
    # `z` is the divergence from the reference, measured before each step over the whole batch; its groups are single answers.
    "kto": _compares(_BETA | {"z": Constant(0.0), "desirable_weight": Constant(1.0), "undesirable_weight": Constant(1.0)}),
    # Its constants are the weights of its losses by name, and theirs as "dpo.beta".
    "mix": _compares({}),
    # Of reward models, in `losses.pairs`, too.
    "bradley_terry": Objective(("margins",), {"centring": Constant(0.01)}, uses_anchor=False, by_group=True),
})
"""All objectives by name. Where they bound a ratio, `clip_low` and `clip_high` are the smallest and the largest unclipped ratio."""

CLIENT_LOSSES: Mapping[str, tuple[str, ...]] = MappingProxyType({
    "cross_entropy": (), "importance_sampling": (), "ppo": ("clip_low", "clip_high"), "cispo": ("clip_low", "clip_high"),
    "dro": ("beta",), "gspo": ("clip_low", "clip_high")})
"""Losses that clients of the service may ask for, with the constants that they may set."""

CROSS_ENTROPY = LossSpec("cross_entropy")

_OWN = Objective(by_sequence=True)


def is_own(name: str) -> bool:
    """Whether a loss has an objective of the user's own, "path/to/file.py:function" or "module:function"."""
    return ":" in name


def objective_of(name: str) -> Objective:
    """Return the row of an objective; all of the user's own have the same."""
    return _OWN if is_own(name) else OBJECTIVES[name]


def keeps_groups(batch: Batch) -> bool:
    """Whether a loss of the batch needs its groups whole, in each micro-batch."""
    return any(objective_of(loss.name).by_group for loss in batch.losses)


def reads_of(loss: LossSpec) -> tuple[str, ...]:
    """Return what a loss reads besides `loss_weights`: names of columns, and "entropy", which the trainer computes in its own pass.

    The trainer computes `prox_logprobs` itself, under the weights at the start of a step, if the step has several updates; with one update
    they are those of its own forward pass. `algorithms.selection.choose_tokens` gives `m2_mask`, `detach_mask` and `kl_cov_mask`. A loss
    over a run's own samples does not need `ratio_mask`: all of its targets count.
    """
    objective = objective_of(loss.name)
    metrics = {rule.metric for rule in loss.filters}
    kinds = {term.kind for term in loss.regularisers}
    anchor = "prox_logprobs" if loss.anchor == "prox" else "rollout_logprobs"
    reads = [anchor] if objective.uses_anchor or "ratio_k3" in kinds else []
    reads += ["advantages"] if loss.own_samples else []
    reads += [name for name in objective.reads if name != "ratio_mask" or not loss.own_samples]
    if loss.weight is not None or metrics - {"opsm", "clip_cov"} or "kl_cov" in kinds:
        reads += ["prox_logprobs"]
    if loss.weight is not None or metrics or "drift" in kinds or loss.own_samples:
        reads += ["rollout_logprobs"]
    reads += ["m2_mask"] if "m2" in metrics else []
    reads += ["detach_mask"] if "clip_cov" in metrics else []
    reads += ["kl_cov_mask"] if "kl_cov" in kinds else []
    reads += ["ref_logprobs"] if kinds & {"k2", "k3", "ratio_k3"} else []
    reads += ["entropy"] if "entropy" in kinds else []
    reads += ["imitate_mask"] if "imitation" in kinds else []
    reads += loss.reads
    return tuple(dict.fromkeys(reads))


def policy_loss(config: AlgorithmConfig) -> LossSpec:
    """Return the loss of reinforcement learning that [algorithm] describes.

    Raises:
        ConfigError: the objective has no such constant, or a value is out of bounds.
    """
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
    """Return the loss of a critic, whose values may move `clip` from where they were; 0 is no limit."""
    return LossSpec("value", {"clip": clip})


def preference_loss(config: PreferenceConfig) -> LossSpec:
    """Return the loss of preference training that [preference] describes; that of kto with a `z` of 0."""
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
    """Return the loss by which answers are compared in metrics: the first of a mix, or the loss itself."""
    return parts_of(loss.constants)[0][0] if loss.name == "mix" else loss


def client_loss(name: str, **constants: float) -> LossSpec:
    """Return a loss with its default constants, except those given.

    Raises:
        DataError: clients cannot ask for such a loss, or it has no such constant, or a value is out of bounds.
    """
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
