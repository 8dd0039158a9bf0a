"""The losses again, slowly: token by token in plain Python and float64, by cases, from the papers' formulas.

A current log-probability is a scalar tensor, so that gradients are those of PyTorch's autograd over these scalars alone.
"""

import math

import numpy as np
import torch

from offbeat.data.batch import Batch, SharedPrompts

LIMIT = 20.0


def random_batch(loss, *, lengths=(1, 2, 5, 1, 9, 4, 3), seed=0, spread=0.4, equal_advantages=True):
    """Sequences of unequal numbers of loss tokens, with every column that a loss may read; returns it with current log-probabilities [M].

    Args:
        equal_advantages: one advantage for a sequence, of either sign, or 0 for one of them; else one for each token.
    """
    rng = np.random.default_rng(seed)
    total = [length + 2 for length in lengths]
    trained = np.concatenate([np.arange(length) >= 2 for length in total])
    count = int(trained.sum())
    rollout = -rng.uniform(0.02, 4, count)
    prox = np.minimum(rollout + spread * rng.standard_normal(count), -1e-3)
    advantages = np.repeat(rng.choice([-1.0, 1.0], len(lengths)) * rng.uniform(0.3, 2, len(lengths)), lengths)
    if not equal_advantages:
        advantages = rng.standard_normal(count)
    advantages[np.repeat(np.arange(len(lengths)) == 3, lengths)] = 0.0
    columns = {
        "rollout_logprobs": rollout, "prox_logprobs": prox, "advantages": advantages, "loss_weights": rng.uniform(0.1, 1, count),
        "ref_logprobs": np.minimum(rollout + 0.5 * rng.standard_normal(count), -1e-3), "m2_mask": rng.integers(0, 2, count),
        "teacher_logprobs": np.log(np.random.default_rng(seed + 1000).uniform(1e-3, 1, count)),
        "teacher_least": np.full(count, -7.0)}
    masks = np.random.default_rng(seed + 1)
    columns |= {name: masks.integers(0, 2, count) for name in ("detach_mask", "kl_cov_mask")}
    full = {name: np.zeros(len(trained)) for name in columns}
    for name, values in columns.items():
        full[name][trained] = values
    batch = Batch.of_next_tokens(
        rng.integers(2, 9, len(trained)), trained, lengths=total, columns=full, losses=(loss,),
        shared=SharedPrompts(np.arange(len(lengths)) // 2, np.zeros(len(lengths), np.int64)))
    return batch, np.minimum(batch.columns["prox_logprobs"] + spread * rng.standard_normal(count), -1e-3).astype(np.float32)


def slow_losses(batch, logprobs, entropy=None):
    """Losses of all targets, a list of M scalar tensors; `logprobs` and `entropy` are lists of M float64 scalar tensors."""
    (loss,) = batch.losses
    results = [torch.zeros((), dtype=torch.float64) for _ in logprobs]
    for i in range(len(batch)):
        tokens = [int(m) for m in np.flatnonzero(batch.target_sequences == i) if batch.columns["loss_weights"][m] != 0]
        if tokens:
            sequence = _Sequence(batch, loss, {m: logprobs[m] for m in tokens})
            for m in tokens:
                value = sequence.objective(m) * sequence.weight(m)
                for term in loss.regularisers:
                    value = value + term.coefficient * sequence.term(term.kind, m, entropy)
                results[m] = value * float(batch.columns["loss_weights"][m])
    return results


class _Sequence:
    """The loss tokens of one sequence."""

    def __init__(self, batch, loss, logprobs):
        self.loss, self.logprobs = loss, logprobs

        def of(name, missing=None):
            return {m: float(batch.columns[name][m]) if name in batch.columns else missing(m) for m in logprobs}

        self.rollout, self.advantage = of("rollout_logprobs"), of("advantages")
        self.prox = of("prox_logprobs", lambda m: logprobs[m].item())
        self.teacher = of("teacher_logprobs", lambda m: math.nan)
        self.least = of("teacher_least", lambda m: math.nan)
        self.ref, self.m2 = of("ref_logprobs", lambda m: math.nan), of("m2_mask", lambda m: 1.0)
        self.kept_by_cov, self.held_by_cov = of("detach_mask", lambda m: 1.0), of("kl_cov_mask", lambda m: 0.0)
        self.anchor = self.prox if loss.anchor == "prox" else {
            m: self.rollout[m] if math.isfinite(self.rollout[m]) else logprobs[m].item() for m in logprobs}

    # -- constant weight ----------------------------------------------------------------------------------------------------------------

    def behaviour(self, m, other=None):
        """log(proximal, or other, / behaviour)."""
        if not math.isfinite(self.rollout[m]):
            return LIMIT
        new = (self.prox if other is None else other)[m]
        return min(max(new - self.rollout[m], -LIMIT), LIMIT)

    def weight(self, m):
        result, spec = 1.0, self.loss.weight
        if self.loss.anchor == "rollout" and not math.isfinite(self.rollout[m]):
            return 0.0
        if spec is not None:
            gaps = [self.behaviour(n) for n in self.logprobs]
            log = {"token": self.behaviour(m), "sequence": sum(gaps), "geometric": sum(gaps) / len(gaps)}[spec.level]
            w = math.exp(min(max(log, -LIMIT), LIMIT))
            if spec.mode == "clamp":
                w = min(max(w, spec.low), spec.high)
            elif spec.mode == "mask":
                w = w if spec.low <= w <= spec.high else 0.0
            elif not math.isfinite(self.rollout[m]):
                w = 0.0
            result *= w
        return result * math.prod(self.kept(rule, m) for rule in self.loss.filters)

    def kept(self, rule, m):
        if rule.metric == "m2":
            return self.m2[m] != 0
        if rule.metric == "clip_cov":
            return self.kept_by_cov[m] != 0
        if rule.metric == "opsm":
            current = {n: value.item() for n, value in self.logprobs.items()}
            moved = -sum(self.behaviour(n, current) for n in self.logprobs) / len(self.logprobs)
            return not (self.advantage[m] < 0 and moved > rule.high)
        values = {n: self.metric(rule.metric, n) for n in self.logprobs}
        value = values[m]
        if rule.level == "sequence":
            own = list(values.values())
            value = {"mean": sum(own) / len(own), "sum": sum(own), "max": max(own)}[rule.aggregate]
        if rule.metric == "ratio":
            value = math.exp(min(max(value, -LIMIT), LIMIT))
        return rule.low <= value <= rule.high

    def metric(self, name, m):
        x = self.behaviour(m)
        if name == "binary_kl":
            if not math.isfinite(self.rollout[m]):
                return math.inf
            p, q = math.exp(self.prox[m]), math.exp(self.rollout[m])
            return max(a * math.log(a / b) + (1 - a) * math.log((1 - a) / (1 - b)) for a, b in ((p, q), (q, p)))
        if name == "tv":
            return math.exp(self.prox[m]) - math.exp(self.rollout[m]) if math.isfinite(self.rollout[m]) else math.inf
        return {"ratio": x, "k1": x, "k2": x * x / 2, "k3": math.exp(x) - 1 - x}[name]

    # -- objective and regularisers -----------------------------------------------------------------------------------------------------

    def gap(self, m, other):
        return (self.logprobs[m] - other[m]).clamp(-LIMIT, LIMIT)

    def objective(self, m):
        lp, a, constants = self.logprobs[m], self.advantage[m], self.loss.constants
        gap = self.gap(m, self.anchor)
        ratio = gap.exp()
        low, high = constants.get("clip_low"), constants.get("clip_high")
        if a == 0:
            return torch.zeros((), dtype=torch.float64)
        match self.loss.name:
            case "cross_entropy":
                return -lp if a > 0 else 0 * lp
            case "reinforce":
                return -lp * a
            case "importance_sampling":
                return -ratio * a
            case "dro":
                return -(lp * a - constants["beta"] / 2 * (lp - self.anchor[m]) ** 2)
            case "cispo":
                return -min(max(ratio.item(), low), high) * a * lp
            case "ppo":
                return self.clipped(ratio, a)
            case "forward_kl":
                return math.exp(self.teacher[m]) * (self.teacher[m] - lp)
            case "reverse_kl":
                outside = (1 - lp.exp()) - (1 - math.exp(self.teacher[m]))  # what a token adds to 1 - sum p, as sum q is 1
                return lp.exp() * (lp - self.teacher[m]) + outside * (1 - self.least[m])
            case "gspo":
                mean = sum(self.logprobs[n].item() - self.anchor[n] for n in self.logprobs) / len(self.logprobs)
                s = math.exp(min(max(mean, -LIMIT), LIMIT))
                return self.clipped(s * (lp - lp.item()).exp(), a)
            case "sapo":
                tau = constants["tau_high"] if a > 0 else constants["tau_low"]
                return -4 / tau / (1 + (-tau * (ratio - 1)).exp()) * a
            case "gmpo":
                gaps = []
                for n in self.logprobs:
                    x = self.gap(n, self.anchor)
                    if self.weight(n) == 0 or self.advantage[n] == 0:
                        x = x.detach()
                    x = torch.minimum(x, torch.tensor(high).double()) if self.advantage[n] > 0 else torch.maximum(
                        x, torch.tensor(-low).double())
                    gaps.append(x)
                return -a * (sum(gaps) / len(gaps)).exp()
            case "dppo":
                p, q = math.exp(lp.item()), math.exp(self.anchor[m])
                by_token = {"tv": abs(p - q), "kl": q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))}
                moved = by_token[constants["divergence"]]
                stops = (a > 0 and p > q and moved > high) or (a < 0 and p < q and moved > low)
                return 0 * lp if stops else -ratio * a
        raise AssertionError(self.loss.name)

    def clipped(self, ratio, a):
        low, high = self.loss.constants["clip_low"], self.loss.constants["clip_high"]
        if (a > 0 and ratio.item() > high) or (a < 0 and ratio.item() < low):
            return torch.tensor(-a * (high if a > 0 else low)).double()
        bound = self.loss.constants.get("dual_clip", 0.0) * -a
        return torch.tensor(bound).double() if a < 0 and bound and -ratio.item() * a > bound else -ratio * a

    def term(self, kind, m, entropy):
        lp = self.logprobs[m]
        if kind == "entropy":
            return -entropy[m]
        if kind == "drift":
            return (lp - self.rollout[m]) ** 2 if math.isfinite(self.rollout[m]) else 0 * lp
        if kind == "kl_cov":
            gap = lp - self.prox[m]
            return 0 * lp if self.held_by_cov[m] == 0 or gap == 0 else gap if gap > 0 else -gap
        if not math.isfinite(self.ref[m]):
            return 0 * lp
        if kind == "k2":
            return (lp - self.ref[m]) ** 2 / 2
        d = self.gap(m, self.ref)
        k3 = (-d).exp() - 1 + d
        return k3 if kind == "k3" else self.gap(m, self.anchor).exp() * k3
