"""An objective from a file of the user's own, `algorithm.objective = "my_loss.py:my_loss"`.

    from offbeat.losses.own import LossTokens, TokenLosses

    def my_loss(tokens: LossTokens, constants: dict) -> TokenLosses:
        return TokenLosses(-tokens.ratio * tokens.advantages)

Called by `losses.compose` for each micro-batch, in the train ranks. Masked and filtered tokens are among its tokens, with numbers that say
nothing, since leaving them out would make the host wait for the device to count the others; their losses are dropped. The result is
multiplied by weights that hold all denominators, so a loss is no mean. `losses.own_check` tries it out beforehand.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from offbeat.errors import OwnCodeError, shorten
from offbeat.losses.ratios import current_log_ratio
from offbeat.losses.targets import Targets, only
from offbeat.user_code.functions import blaming, resolve


@dataclass(frozen=True, eq=False)
class LossTokens:
    """M generated tokens of some sequences: all of each sequence that may be trained.

    Attributes:
        counted: [M] bool, whether a token is trained; others are masked or filtered. Their log-probabilities are -1 and without gradient,
            their advantages 0, and their losses are dropped.
        logprobs: [M] float32 with gradient, log-probability of each token under the policy that is being trained.
        anchor_logprobs: [M] float32, under the policy that the ratio compares with: at the start of the step, or the one that sampled
            (`algorithm.anchor`).
        ratio: [M] float32 with gradient, exp(logprobs - anchor_logprobs); the difference is limited to 20.
        advantages: [M] float32, how much better than expected the token was; 0 is possible if `algorithm.drop_zero_advantage` is false.
        rollout_logprobs: [M] float32, under the policy that sampled, as the engine reported it. May be infinite or NaN.
        ref_logprobs: [M] float32, under the reference policy; None unless "reference" is in `algorithm.objective_reads`.
        entropy: [M] float32 with gradient, of the distribution that each token was drawn from, in nats; None unless "entropy" is in
            `algorithm.objective_reads`.
        sequences: [M] int64, ascending from 0: the sequence that each token belongs to.
    """

    logprobs: Tensor
    anchor_logprobs: Tensor
    ratio: Tensor
    advantages: Tensor
    rollout_logprobs: Tensor
    ref_logprobs: Tensor | None
    entropy: Tensor | None
    sequences: Tensor
    counted: Tensor

    def over_sequences(self, values: Tensor, how: Literal["mean", "sum"] = "mean") -> Tensor:
        """Return [M]: for each token, the mean or the sum of `values` [M] over the counted tokens of its sequence, with gradient."""
        zeros = torch.zeros_like(values)  # there are no more sequences than tokens, and their number would have to be read
        sums = zeros.index_add(0, self.sequences, only(self.counted, values))
        if how == "mean":
            sums = sums / zeros.index_add(0, self.sequences, self.counted.to(values.dtype)).clamp(min=1)
        return sums[self.sequences]


@dataclass(frozen=True, eq=False)
class TokenLosses:
    """The result of an objective.

    Attributes:
        losses: [M], the loss of each token, with gradient and without any denominator.
        metrics: [M] each, by name; the run reports their means over all tokens as own/NAME. The same names at every call.
    """

    losses: Tensor
    metrics: Mapping[str, Tensor] = field(default_factory=dict)


OwnObjective = Callable[[LossTokens, dict[str, Any]], TokenLosses]


def own_losses(name: str, targets: Targets, trained: Tensor, *, ref_logprobs: Tensor | None, entropy: Tensor | None) -> TokenLosses:
    """Compute the losses and metrics of M targets with a function of the user's own; those that are not `trained` [M] bool have 0.

    The name is "path/to/file.py:function" or "module:function"; `ref_logprobs` and `entropy` are [M] float32 if the loss reads them.

    Raises:
        CodeError: there is no such function.
        OwnCodeError: it raised an exception, or returned something else than losses; names its file.
    """
    # The empty sums give a row without targets a backward pass, too, in which its rank meets the others.
    nothing = torch.zeros_like(targets.logprobs) + targets.logprobs[:0].sum() + (0.0 if entropy is None else entropy[:0].sum())
    found = call_own(name, shown_tokens(targets, trained, ref_logprobs=ref_logprobs, entropy=entropy), dict(targets.constants))
    names = _metric_names(name, tuple(sorted(targets.constants.items())), ref_logprobs is not None, entropy is not None)
    if found is None:
        return TokenLosses(nothing, {key: nothing.detach() for key in names})
    if tuple(found.metrics) != names:
        raise OwnCodeError(
            f"objective {name!r} must return the same metrics at every call, got {', '.join(found.metrics) or 'none'} after"
            f" {', '.join(names) or 'none'}")
    return TokenLosses(
        nothing + only(trained, found.losses.to(nothing.dtype)),
        {key: only(trained, values.detach().to(nothing.dtype)) for key, values in found.metrics.items()})


def shown_tokens(targets: Targets, trained: Tensor, *, ref_logprobs: Tensor | None, entropy: Tensor | None) -> LossTokens:
    """Return all targets as a user's function sees them, of which those `trained` [M] bool count."""
    def shown(values: Tensor, other: float = -1.0) -> Tensor:
        return torch.where(trained, values, other)

    logprobs, anchor = shown(targets.logprobs), shown(targets.anchor)
    return LossTokens(
        logprobs, anchor, current_log_ratio(logprobs, anchor).exp(), shown(targets.advantages, 0.0), shown(targets.rollout),
        None if ref_logprobs is None else shown(ref_logprobs), None if entropy is None else shown(entropy, 1.0), targets.sequences, trained)


def call_own(name: str, tokens: LossTokens, constants: dict[str, Any]) -> TokenLosses | None:
    """Call a user's objective and check the form of its result; None without a call where there are no tokens. Raises as `own_losses`."""
    if not len(tokens.logprobs):
        return None
    function: OwnObjective = resolve(name, kind="objective")
    with blaming(name, function, kind="objective"):
        found = function(tokens, constants)
    if not isinstance(found, TokenLosses):
        raise OwnCodeError(f"objective {name!r} must return TokenLosses(losses), got {_described(found)}")
    for what, values in {"losses": found.losses, **{f"metric {key}": values for key, values in found.metrics.items()}}.items():
        if not isinstance(values, Tensor) or values.shape != tokens.logprobs.shape:
            raise OwnCodeError(
                f"objective {name!r} must return {what} of shape ({len(tokens.logprobs)},), one for each token, got {_described(values)}")
    return found


def _described(value: object) -> str:
    return f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else shorten(value)


@functools.cache
def _metric_names(name: str, constants: tuple[tuple[str, Any], ...], with_ref: bool, with_entropy: bool) -> tuple[str, ...]:
    """Return the names of an objective's metrics: ranks without tokens report them, too, so that all report the same."""
    one = torch.full((1,), -1.0)
    logprobs = one.clone().requires_grad_()
    tokens = LossTokens(
        logprobs, one, (logprobs - one).exp(), -one, one, one if with_ref else None, -one if with_entropy else None,
        torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=torch.bool))
    found = call_own(name, tokens, dict(constants))
    assert found is not None, "there is a token"
    return tuple(found.metrics)
