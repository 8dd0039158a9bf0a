"""Tries out an objective of the user's own before a run, in a child process of its own: the controller has no torch.

`controller.own_code` starts the process. A fault is said in one sentence, with file and line if the code raised an exception.
"""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from offbeat.algorithms.objectives import policy_loss
from offbeat.config.algorithms import AlgorithmConfig
from offbeat.data.batch import Batch, LossSpec
from offbeat.errors import CodeError, OwnCodeError, describe
from offbeat.losses.compose import target_losses
from offbeat.user_code.handshake import enter

_LENGTHS = (4, 1, 7, 3, 5, 2)
"""Trained tokens of the sequences; the last token of each but the shortest is masked."""

_TOLERANCE = 1e-4


class OwnObjectiveCheck:
    """Handler of the child process."""

    def handle(self, method: str, payload: bytes) -> bytes:
        """Check the objective of [algorithm], which comes as JSON, with the call `load`; raises as `check_objective`."""
        assert method == "load", f"there is no call {method!r}"
        algorithm = AlgorithmConfig.model_validate_json(enter(payload).load)
        check_objective(policy_loss(algorithm), name=algorithm.objective, drops=algorithm.drop_zero_advantage)
        return b""


def check_objective(loss: LossSpec, *, name: str, drops: bool) -> None:
    """Call an objective of the user's own on made-up tokens, several times. `drops`: sequences of advantage 0 are left out of its batch.

    Raises:
        CodeError: it cannot be loaded, raises an exception, returns something else than finite losses of the right shape, has no gradient,
            has one at tokens of advantage 0 although those are left out, or its losses depend on masked tokens, on how many of them
            there are, or on how a batch is split.
    """
    batch = _example(replace(loss, weight=None, filters=(), regularisers=()))
    everything, counts = np.arange(batch.num_targets), batch.columns["loss_weights"] != 0
    try:
        whole = _evaluate(batch, everything)
        if fault := _fault_of(whole, batch, counts, drops=drops):
            raise CodeError(f"algorithm.objective = {name!r} {fault}")
        if not _alike(whole, _evaluate(_with_junk(batch, counts), everything), counts):
            raise CodeError(
                f"algorithm.objective = {name!r} returns different losses when only masked tokens change, or when it is called again with"
                " the same; a loss must depend on nothing but its tokens")
        half = batch.target_offsets[len(batch) // 2]
        halves = [_evaluate(batch, part) for part in (everything[:half], everything[half:])]
        if not _alike(whole, [torch.cat(parts) for parts in zip(*halves, strict=True)], counts):
            raise CodeError(
                f"algorithm.objective = {name!r} returns different losses when a batch is split in halves, as it is over micro-batches and"
                " ranks; a loss may depend on the tokens of its own sequence alone, so use no mean over all tokens")
        if not _alike([values[counts] for values in whole], _evaluate(batch, np.flatnonzero(counts)), counts[counts]):
            raise CodeError(
                f"algorithm.objective = {name!r} returns different losses when masked tokens stand among the others; sum over a sequence"
                " with tokens.over_sequences, or leave out the tokens for which tokens.counted is false")
    except OwnCodeError as exc:
        raise CodeError(f"algorithm.objective: {exc}, when it was tried out on made-up tokens") from exc


def _fault_of(whole: list[Tensor], batch: Batch, counts: np.ndarray, *, drops: bool) -> str:
    """Return the fault of losses and gradients [M] of all targets, as the end of a sentence; "" if there is none."""
    losses, gradients = whole[0][counts], sum(gradient.abs() for gradient in whole[1:])
    assert isinstance(gradients, Tensor), "there is a gradient by log-probability"
    if not losses.isfinite().all():
        return f"gives the loss {losses[~losses.isfinite()][0].item()} for a token whose values are finite; clamp what can overflow"
    if not gradients[counts].isfinite().all():
        return "has a gradient that is not finite at a token whose values are finite; clamp what can overflow before it does"
    if not gradients[counts].any():
        return "has no gradient: compute its losses from tokens.logprobs, tokens.ratio or tokens.entropy, without detach() or no_grad()"
    if drops and gradients[torch.from_numpy(counts & (batch.columns["advantages"] == 0))].any():
        return ("has a gradient at tokens of advantage 0, and algorithm.drop_zero_advantage = true leaves sequences of those out; set it to"
                " false")
    return ""


def _evaluate(batch: Batch, index: np.ndarray) -> list[Tensor]:
    """Return [M] losses of the targets at `index` [M], and their gradients by log-probability and, if the loss reads it, by entropy."""
    logprobs = torch.from_numpy(batch.columns["logprobs"][index]).requires_grad_()
    entropy = torch.from_numpy(batch.columns["entropy"][index]).requires_grad_() if "entropy" in batch.losses[0].reads else None
    losses = target_losses(logprobs, batch, index, entropy=entropy, report=True).losses
    try:
        losses.sum().backward()
    except RuntimeError as exc:
        raise OwnCodeError(f"objective {batch.losses[0].name!r} has no backward pass: {describe(exc)}") from exc
    leaves = [logprobs] if entropy is None else [logprobs, entropy]
    return [losses.detach(), *(torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves)]


def _alike(one: list[Tensor], other: list[Tensor], counts: np.ndarray) -> bool:
    chosen = torch.from_numpy(counts)
    return all(torch.allclose(a[chosen], b[chosen], rtol=_TOLERANCE, atol=_TOLERANCE) for a, b in zip(one, other, strict=True))


def _example(loss: LossSpec) -> Batch:
    """Return sequences of unequal lengths with advantages of both signs and 0, ratios around 1 and far from it, and masked tokens."""
    rng = np.random.default_rng(0)
    total = [length + 1 for length in _LENGTHS]
    trained = np.concatenate([np.arange(length) > 0 for length in total])
    rollout = -rng.uniform(0.05, 3, len(trained))
    prox = np.minimum(rollout + 0.2 * rng.standard_normal(len(trained)), -1e-3)
    logprobs = np.minimum(prox + 0.3 * rng.standard_normal(len(trained)), -1e-3)
    logprobs[[2, 9]] = [-15.0, -1e-3]
    advantages = np.repeat([1.0, -1.0, 0.7, -0.4, 0.0, 1.5], total)
    weights = np.concatenate([(np.arange(length) < length - 1) | (length < 3) for length in total]).astype(np.float32)
    return Batch.of_next_tokens(
        rng.integers(2, 9, len(trained)), trained, lengths=total, losses=(loss,), columns={
            "logprobs": logprobs, "entropy": rng.uniform(0.1, 2, len(trained)), "rollout_logprobs": rollout, "prox_logprobs": prox,
            "ref_logprobs": np.minimum(rollout + 0.3 * rng.standard_normal(len(trained)), -1e-3), "advantages": advantages,
            "loss_weights": weights})


def _with_junk(batch: Batch, counts: np.ndarray) -> Batch:
    junk = np.resize(np.array([np.nan, -np.inf, np.inf, 1e30], np.float32), len(counts))
    return batch.with_columns(**{name: np.where(counts, values, junk) for name, values in batch.columns.items() if name != "loss_weights"})
