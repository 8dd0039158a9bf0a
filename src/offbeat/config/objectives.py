"""One table of all objectives: who may choose each, the columns it reads, and its constants. Torch-free.

Everything else about an objective follows from its row: whether `algorithm.objective`, `preference.loss` and clients of the service may
name it, the settings that act on it, and the meaning of its metrics. Its formula is in `losses`, under the same name.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from offbeat.errors import ConfigError


@dataclass(frozen=True)
class Constant:
    """A constant of an objective: its default, and its bounds or possible words. Clients of the service may set it if `of_clients`."""

    default: float | str
    low: float = 0.0
    high: float = math.inf
    words: tuple[str, ...] = ()
    of_clients: bool = True

    def check(self, name: str, value: Any) -> None:
        """Raise ConfigError for a value that it cannot have; `name` is the constant's in the message."""
        if self.words:
            if value not in self.words:
                raise ConfigError(f"{name} must be one of {', '.join(self.words)}, got {str(value)[:80]!r}")
        elif isinstance(value, str) or not math.isfinite(value) or not self.low <= value <= self.high:
            bounds = f"at least {self.low:g}" + (f" and at most {self.high:g}" if self.high < math.inf else "")
            raise ConfigError(f"{name} must be a finite number of {bounds}, got {str(value)[:80]!r}")


Chooser = Literal["algorithm", "client", "preference"]


@dataclass(frozen=True)
class Objective:
    """One kind of loss.

    Attributes:
        chosen_by: who may name it: `algorithm.objective`, clients of the service, or `preference.loss`.
        reads: columns of the batch, such as "advantages", besides `loss_weights` and those that `algorithms.objectives.reads_of` adds.
        uses_anchor: whether it compares the current policy with the anchor of its `LossSpec`.
        bounds: the quantity that `clip_low` and `clip_high` bound: "ratio", the ratio itself, or "distance", how far the policy may move to
            either side; "" if it has no bounds.
        by_sequence: whether a target's loss depends on the other targets of its sequence.
        group: its unit of comparison: the two answers of a preference "pair", or an "answer" with its label. Sequences of a group
            (`group_ids`) are in one micro-batch and one minibatch. Each target has the loss of its whole group, and weighs
            1 / (number of groups * targets of its group).
        by_token: whether it compares means over an answer's targets instead of sums.
        scaled_margin: whether the margin of its metrics is multiplied by `beta`, as in the loss.
        imitates: whether it learns a run's samples whose reward is above `algorithm.imitate_above`, instead of reading advantages.
        several_targets: whether a position may have several targets, as in a client's [N, K].
        drops_inputs: whether an adapter's dropout applies. A ratio compares the policy with the one that sampled, and neither uses dropout.
        mixes: whether it is a weighted sum of others, which are its constants.
        cov_control: the method of `algorithm.cov_control` that is defined for it.
        unsmoothed: the objective that it is where `label_smoothing` is 0, such as "dpo"; "" for another one.
    """

    chosen_by: tuple[Chooser, ...] = ()
    reads: tuple[str, ...] = ("advantages",)
    constants: Mapping[str, Constant] = field(default_factory=dict)
    uses_anchor: bool = True
    bounds: Literal["", "ratio", "distance"] = ""
    by_sequence: bool = False
    group: Literal["", "pair", "answer"] = ""
    by_token: bool = False
    scaled_margin: bool = True
    imitates: bool = False
    several_targets: bool = False
    drops_inputs: bool = False
    mixes: bool = False
    cov_control: Literal["", "clip", "kl"] = ""
    unsmoothed: str = ""

    @property
    def refers(self) -> bool:
        """Whether it compares with the reference policy."""
        return "ref_logprobs" in self.reads

    @property
    def takes_labels(self) -> bool:
        """Whether it learns single answers with a label, instead of comparing the two answers of a pair."""
        return self.group == "answer"

    @property
    def asks_teacher(self) -> bool:
        """Whether it compares with the likeliest tokens of a teacher instead of the sampled ones."""
        return "teacher_logprobs" in self.reads


def _compares(
    constants: Mapping[str, Constant], *, reads: tuple[str, ...] = ("ref_logprobs",), group: Literal["pair", "answer"] = "pair",
    by_token: bool = False, scaled_margin: bool = True, unsmoothed: str = "",
) -> Objective:
    """Return an objective of preference training."""
    return Objective(
        ("preference",), reads, constants, uses_anchor=False, group=group, by_token=by_token, scaled_margin=scaled_margin,
        unsmoothed=unsmoothed)


_RUN: tuple[Chooser, ...] = ("algorithm",)
_RUN_AND_CLIENT: tuple[Chooser, ...] = ("algorithm", "client")
_RATIO = {"clip_low": Constant(0.8), "clip_high": Constant(1.2)}
_POSITIVE = 1e-6
_BETA = {"beta": Constant(0.1, low=_POSITIVE)}
_SMOOTHING = {"label_smoothing": Constant(0.0, high=0.5)}
OBJECTIVES: Mapping[str, Objective] = MappingProxyType({
    "ppo": Objective(
        _RUN_AND_CLIENT, constants={**_RATIO, "dual_clip": Constant(0.0, of_clients=False)}, bounds="ratio", cov_control="clip"),
    # The paper's range is 0.9997 to 1.0004; PPO's, which users expect, stops only steps that went far astray.
    "gspo": Objective(_RUN_AND_CLIENT, ("advantages", "ratio_mask"), _RATIO, bounds="ratio", by_sequence=True),
    "cispo": Objective(_RUN_AND_CLIENT, constants={"clip_low": Constant(0.0), "clip_high": Constant(4.0)}, bounds="ratio"),
    "sapo": Objective(_RUN, constants={"tau_low": Constant(1.05, low=_POSITIVE), "tau_high": Constant(1.0, low=_POSITIVE)}),
    "gmpo": Objective(_RUN, constants={"clip_low": Constant(0.4), "clip_high": Constant(0.4)}, bounds="distance", by_sequence=True),
    "dppo": Objective(
        _RUN, constants={"clip_low": Constant(0.2), "clip_high": Constant(0.2), "divergence": Constant("tv", words=("tv", "kl"))},
        bounds="distance"),
    "importance_sampling": Objective(_RUN_AND_CLIENT, cov_control="kl"),
    "reinforce": Objective(_RUN, uses_anchor=False),
    "cross_entropy": Objective(_RUN_AND_CLIENT, (), uses_anchor=False, imitates=True, several_targets=True, drops_inputs=True),
    "forward_kl": Objective(_RUN, ("teacher_logprobs",), uses_anchor=False, several_targets=True),
    "reverse_kl": Objective(_RUN, ("teacher_logprobs", "teacher_least"), uses_anchor=False, several_targets=True),
    "dro": Objective(("client",), constants={"beta": Constant(0.05)}),
    "value": Objective((), ("values", "returns"), {"clip": Constant(0.0)}, uses_anchor=False),
    # Of preference training, in `losses.pairs`.
    "dpo": _compares(_BETA | _SMOOTHING),
    "robust": _compares(_BETA | _SMOOTHING, unsmoothed="dpo"),
    "hinge": _compares(_BETA),
    "exo_pair": _compares(_BETA | {"label_smoothing": Constant(1e-3, low=_POSITIVE, high=0.5)}),
    "nca_pair": _compares(_BETA),
    "bco_pair": _compares(_BETA),
    "sppo_hard": _compares(_BETA),
    "apo_zero": _compares(_BETA),
    "apo_down": _compares(_BETA),
    "ipo": _compares(_BETA, by_token=True, scaled_margin=False),
    "sigmoid_norm": _compares({"beta": Constant(5.0, low=_POSITIVE)}, by_token=True),
    "simpo": _compares({"beta": Constant(2.0, low=_POSITIVE), "gamma": Constant(0.5)}, reads=(), by_token=True),
    "orpo": _compares(_BETA, reads=(), by_token=True),
    "sft": _compares({}, reads=(), by_token=True, scaled_margin=False),
    # `z` is the divergence from the reference, measured before each step over the whole batch.
    "kto": _compares(
        _BETA | {"z": Constant(0.0), "desirable_weight": Constant(1.0), "undesirable_weight": Constant(1.0)}, group="answer"),
    # Its constants are the weights of its losses by name, and theirs as "dpo.beta".
    "mix": Objective(reads=("ref_logprobs",), uses_anchor=False, group="pair", mixes=True),
    # Of reward models, in `losses.pairs`, too.
    "bradley_terry": Objective(
        reads=("margins",), constants={"centring": Constant(0.01)}, uses_anchor=False, group="pair", scaled_margin=False),
})
"""All objectives by name. Where they bound a ratio, `clip_low` and `clip_high` are the smallest and the largest unclipped ratio."""

_OWN = Objective(_RUN, by_sequence=True)


def is_own(name: str) -> bool:
    """Whether an objective is the user's own, "path/to/file.py:function" or "module:function"."""
    return ":" in name


def objective_of(name: str) -> Objective:
    """Return the row of an objective; all of the user's own have the same."""
    return _OWN if is_own(name) else OBJECTIVES[name]


def names_for(chooser: Chooser) -> tuple[str, ...]:
    """Return the objectives that `algorithm.objective`, clients or `preference.loss` may name, in the order of the table."""
    return tuple(name for name, objective in OBJECTIVES.items() if chooser in objective.chosen_by)


def names_with(constant: str) -> tuple[str, ...]:
    """Return the objectives that have a constant."""
    return tuple(name for name, objective in OBJECTIVES.items() if constant in objective.constants)
