"""Losses that compare the answers of a preference pair, or an answer with its label; rows of `losses.objectives.FORMULAS`.

With d the sum of lp - ref over an answer's targets, n their number, p the mean of lp over them, s the sigmoid, c the chosen answer and j
the rejected one, x = beta * (d_c - d_j) and e = label_smoothing:

    dpo           -(1 - e) log s(x) - e log s(-x)
    robust        (-(1 - e) log s(x) + e log s(-x)) / (1 - 2 e), unbiased where a share e of the labels is swapped
    hinge         max(0, 1 - x)
    exo_pair      s(x) (log s(x) - log(1 - e)) + s(-x) (log s(-x) - log e)
    nca_pair      -log s(beta d_c) - log s(-beta d_c) / 2 - log s(-beta d_j) / 2
    bco_pair      -log s(beta d_c) - log s(-beta d_j)
    sppo_hard     (d_c - 1 / (2 beta))^2 + (d_j + 1 / (2 beta))^2
    apo_zero      1 - s(beta d_c) + s(beta d_j)
    apo_down      s(beta d_c) + 1 - s(x)
    ipo           (d_c / n_c - d_j / n_j - 1 / (2 beta))^2
    sigmoid_norm  -log s(beta * (d_c / n_c - d_j / n_j))
    simpo         -log s(beta * (p_c - p_j) - gamma)
    orpo          -p_c - beta * log s(o_c - o_j), o = p - log(1 - exp(p)), the log odds of an answer
    sft           -p_c
    kto           weight * (1 - s(beta (d - z))) of an answer labelled as good, weight * (1 - s(beta (z - d))) of another; z is a constant,
                  and the weight is desirable_weight or undesirable_weight
    mix           the sum of several of these of pairs, each times its weight

and of a reward model, with c and j the rewards of the chosen and of the rejected answer, each of which has one target:

    bradley_terry  -log s(c - j - margin) + centring * (c + j)^2

Each target has the loss of its whole group; the batch's weights divide by the number of its targets. Sums are in float64: float32 sums of
long answers are too coarse to tell which answer is the likelier one.

Source: DPO, arXiv:2305.18290; label smoothing, https://ericmitchell.ai/cdpo.pdf; robust, arXiv:2403.00409; hinge, arXiv:2309.06657; EXO,
arXiv:2402.00856; NCA, arXiv:2402.05369; BCO without its moving shift, arXiv:2404.04656; SPPO, arXiv:2405.00675; APO, arXiv:2408.06266; IPO,
arXiv:2310.12036, by length as in TRL; sigmoid_norm, arXiv:2411.15124; SimPO, arXiv:2405.14734; ORPO, arXiv:2403.07691; KTO,
arXiv:2402.01306; mixes, arXiv:2411.10442; centring, arXiv:2312.09244.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from offbeat.algorithms.objectives import parts_of
from offbeat.config.objectives import OBJECTIVES
from offbeat.losses.targets import Targets, only

_TINY = 1e-12  # nats below certainty, where the odds of an answer stay finite


@dataclass(frozen=True, eq=False)
class Comparison:
    """The answers of G groups as the loss compares them, in float64.

    Attributes:
        chosen, rejected: [G] value of each answer, with gradient: d, or d / n or p where the loss compares by token, or the reward of
            bradley_terry; 0 where a group has no such answer.
        has_chosen, has_rejected: [G] bool, whether the group has such an answer.
    """

    chosen: Tensor
    rejected: Tensor
    has_chosen: Tensor
    has_rejected: Tensor


def compare(name: str, targets: Targets, trained: Tensor) -> Comparison:
    """Compute the values of all answers, from the targets that are `trained`, [M] bool."""
    objective, values = OBJECTIVES[name], targets.logprobs.double()
    if objective.refers:
        values = values - targets.reference.double()
    zeros = values.new_zeros(targets.num_groups)

    def of(answer: Tensor) -> tuple[Tensor, Tensor]:
        sums = zeros.index_add(0, targets.groups, only(answer, values))
        counts = zeros.index_add(0, targets.groups, answer.double())
        return (sums / counts.clamp(min=1) if objective.by_token else sums), counts > 0

    chosen, has_chosen = of(trained & targets.liked)
    rejected, has_rejected = of(trained & ~targets.liked)
    return Comparison(chosen, rejected, has_chosen, has_rejected)


def margins(name: str, found: Comparison, targets: Targets) -> Tensor:
    """Return [G] float64 margins of the groups as the loss measures them; above 0 where the answer is on the right side."""
    objective, gaps = OBJECTIVES[name], found.chosen - found.rejected
    if objective.takes_labels:
        z = targets.constants["z"]
        gaps = torch.where(found.has_chosen, found.chosen - z, z - found.rejected)
    return targets.constants["beta"] * gaps if objective.scaled_margin else gaps


def _dpo(x: Tensor, smoothing: float) -> Tensor:
    return -(1 - smoothing) * logsigmoid(x) - smoothing * logsigmoid(-x)


def _robust(x: Tensor, smoothing: float) -> Tensor:
    return (-(1 - smoothing) * logsigmoid(x) + smoothing * logsigmoid(-x)) / (1 - 2 * smoothing)


def _exo_pair(x: Tensor, smoothing: float) -> Tensor:
    right, wrong = logsigmoid(x), logsigmoid(-x)
    return right.exp() * (right - math.log1p(-smoothing)) + wrong.exp() * (wrong - math.log(smoothing))


def _nca_pair(chosen: Tensor, rejected: Tensor) -> Tensor:
    return -logsigmoid(chosen) - (logsigmoid(-chosen) + logsigmoid(-rejected)) / 2


def _orpo(found: Comparison, beta: float) -> Tensor:
    odds = [values - torch.log(-torch.expm1(values.clamp(max=-_TINY))) for values in (found.chosen, found.rejected)]
    return -found.chosen - beta * logsigmoid(odds[0] - odds[1])


_FORMULAS: Mapping[str, Callable[[Comparison, Tensor, Mapping[str, float]], Tensor]] = MappingProxyType({
    "dpo": lambda _, x, given: _dpo(x, given["label_smoothing"]),
    "robust": lambda _, x, given: _robust(x, given["label_smoothing"]),
    "hinge": lambda _, x, __: (1 - x).clamp(min=0),
    "exo_pair": lambda _, x, given: _exo_pair(x, given["label_smoothing"]),
    "nca_pair": lambda found, _, given: _nca_pair(given["beta"] * found.chosen, given["beta"] * found.rejected),
    "bco_pair": lambda found, _, given: -logsigmoid(given["beta"] * found.chosen) - logsigmoid(-given["beta"] * found.rejected),
    "sppo_hard": lambda found, _, given: (
        (found.chosen - 1 / (2 * given["beta"])).square() + (found.rejected + 1 / (2 * given["beta"])).square()),
    "apo_zero": lambda found, _, given: torch.sigmoid(-given["beta"] * found.chosen) + torch.sigmoid(given["beta"] * found.rejected),
    "apo_down": lambda found, x, given: torch.sigmoid(given["beta"] * found.chosen) + torch.sigmoid(-x),
    "ipo": lambda _, x, given: (x - 1 / (2 * given["beta"])).square(),
    "sigmoid_norm": lambda _, x, __: -logsigmoid(x),
    "simpo": lambda _, x, given: -logsigmoid(x - given["gamma"]),
    "orpo": lambda found, _, given: _orpo(found, given["beta"]),
    "sft": lambda found, _, __: -found.chosen,
    "kto": lambda found, x, given: torch.where(found.has_chosen, given["desirable_weight"], given["undesirable_weight"]) * (
        1 - torch.sigmoid(x))})
"""Losses [G] float64 of G groups, from their values, margins and constants."""


def _objective(name: str) -> Callable[[Targets, Tensor], Tensor]:
    """Return the objective of a formula, which gives [M] losses of M targets."""
    def objective(targets: Targets, trained: Tensor) -> Tensor:
        found = compare(name, targets, trained)
        return _of_groups(_FORMULAS[name](found, margins(name, found, targets), targets.constants), targets, trained)
    return objective


def mix(targets: Targets, trained: Tensor) -> Tensor:
    """Compute the weighted sum of several losses of pairs, [M]."""
    losses = [weight * OF_PAIRS[part.name](replace(targets, constants=part.constants), trained)
              for part, weight in parts_of(targets.constants)]
    return torch.stack(losses).sum(0)


OF_PAIRS: Mapping[str, Callable[[Targets, Tensor], Tensor]] = MappingProxyType(
    {**{name: _objective(name) for name in _FORMULAS}, "mix": mix})
"""Objectives of preference training, by name."""


def bradley_terry(targets: Targets, trained: Tensor) -> Tensor:
    """Compute the loss [M] of a reward model, whose values are in the place of log-probabilities."""
    found = compare("bradley_terry", targets, trained)
    wanted = torch.zeros_like(found.chosen).index_add(0, targets.groups, only(trained & targets.liked, targets.columns["margins"]).double())
    losses = -logsigmoid(found.chosen - found.rejected - wanted)
    return _of_groups(losses + targets.constants["centring"] * (found.chosen + found.rejected).square(), targets, trained)


def _of_groups(losses: Tensor, targets: Targets, trained: Tensor) -> Tensor:
    """Return [M] float32, the loss of each target's group; 0 without gradient where a target is not trained."""
    return only(trained, losses[targets.groups].to(targets.logprobs.dtype))
