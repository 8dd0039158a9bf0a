"""Losses that compare the answers of a preference pair, or an answer with its label; rows of `losses.objectives.OBJECTIVES`.

With d the sum of lp - ref over an answer's targets, n their number, p the mean of lp over them, s the sigmoid, c the chosen answer and j
the rejected one:

    dpo    -(1 - e) log s(x) - e log s(-x), x = beta * (d_c - d_j), e = label_smoothing
    ipo    (d_c / n_c - d_j / n_j - 1 / (2 beta))^2
    simpo  -log s(beta * (p_c - p_j) - gamma)
    kto    1 - s(beta * (d - z)) of an answer labelled as good, 1 - s(beta * (z - d)) of another; z is a constant

and of a reward model, with c and j the rewards of the chosen and of the rejected answer, each of which has one target:

    bradley_terry  -log s(c - j - margin) + centring * (c + j)^2

Each target has the loss of its whole group; the batch's weights divide by the number of its targets. Sums are in float64: in float32, those
of long answers are too coarse to tell which answer is the likelier one.

Source: DPO, arXiv:2305.18290; label smoothing, https://ericmitchell.ai/cdpo.pdf; IPO, arXiv:2310.12036, by length as in TRL; SimPO,
arXiv:2405.14734; KTO, arXiv:2402.01306; centring, arXiv:2312.09244.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from offbeat.losses.targets import Targets, only


@dataclass(frozen=True, eq=False)
class Comparison:
    """What the loss sees of G groups, in float64.

    Attributes:
        chosen, rejected: [G] value of each answer, with gradient: d of dpo and kto, d / n of ipo, p of simpo, the reward of
            bradley_terry; 0 where a group has no such answer.
        has_chosen, has_rejected: [G] bool, which answers there are.
    """

    chosen: Tensor
    rejected: Tensor
    has_chosen: Tensor
    has_rejected: Tensor


def compare(name: str, targets: Targets, trained: Tensor) -> Comparison:
    """Compute the values of all answers, from the targets that are `trained`, [M] bool."""
    values = targets.logprobs.double()
    if name not in ("simpo", "bradley_terry"):
        values = values - targets.reference.double()
    num_groups = int(targets.groups.max()) + 1 if len(targets.groups) else 0
    zeros = values.new_zeros(num_groups)

    def of(answer: Tensor) -> tuple[Tensor, Tensor]:
        sums = zeros.index_add(0, targets.groups, only(answer, values))
        counts = zeros.index_add(0, targets.groups, answer.double())
        return (sums / counts.clamp(min=1) if name in ("ipo", "simpo") else sums), counts > 0

    chosen, has_chosen = of(trained & targets.liked)
    rejected, has_rejected = of(trained & ~targets.liked)
    return Comparison(chosen, rejected, has_chosen, has_rejected)


def margins(name: str, found: Comparison, targets: Targets) -> Tensor:
    """Return [G] float64, how far each group is on the right side, as the loss measures it: above 0, it is right."""
    constants = targets.constants
    if name in ("ipo", "bradley_terry"):
        return found.chosen - found.rejected
    if name == "kto":
        z = constants["z"]
        return constants["beta"] * torch.where(found.has_chosen, found.chosen - z, z - found.rejected)
    return constants["beta"] * (found.chosen - found.rejected)


def dpo(targets: Targets, trained: Tensor) -> Tensor:
    """Compute direct preference optimisation."""
    x = margins("dpo", compare("dpo", targets, trained), targets)
    smoothing = targets.constants["label_smoothing"]
    return _of_groups(-(1 - smoothing) * logsigmoid(x) - smoothing * logsigmoid(-x), targets, trained)


def ipo(targets: Targets, trained: Tensor) -> Tensor:
    """Compute identity preference optimisation, with values by token."""
    x = margins("ipo", compare("ipo", targets, trained), targets)
    return _of_groups((x - 1 / (2 * targets.constants["beta"])).square(), targets, trained)


def simpo(targets: Targets, trained: Tensor) -> Tensor:
    """Compute simple preference optimisation, which compares mean log-probabilities and needs no reference."""
    x = margins("simpo", compare("simpo", targets, trained), targets)
    return _of_groups(-logsigmoid(x - targets.constants["gamma"]), targets, trained)


def kto(targets: Targets, trained: Tensor) -> Tensor:
    """Compute Kahneman-Tversky optimisation, whose groups are single answers."""
    x = margins("kto", compare("kto", targets, trained), targets)
    return _of_groups(1 - torch.sigmoid(x), targets, trained)


def bradley_terry(targets: Targets, trained: Tensor) -> Tensor:
    """Compute the loss of a reward model, whose values are in the place of log-probabilities."""
    found = compare("bradley_terry", targets, trained)
    wanted = torch.zeros_like(found.chosen).index_add(0, targets.groups, only(trained & targets.liked, targets.columns["margins"]).double())
    losses = -logsigmoid(found.chosen - found.rejected - wanted)
    return _of_groups(losses + targets.constants["centring"] * (found.chosen + found.rejected).square(), targets, trained)


def _of_groups(losses: Tensor, targets: Targets, trained: Tensor) -> Tensor:
    """Return [M] float32, the loss of each target's group; 0 without gradient where a target is not trained."""
    return only(trained, losses[targets.groups].to(targets.logprobs.dtype))
