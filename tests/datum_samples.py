"""Random datums for tests of the trainer's sums: of every loss, with none, one or several targets at a position; and the slow formulas."""

from dataclasses import replace

import numpy as np
import torch

from offbeat.algorithms.objectives import CROSS_ENTROPY, client_loss
from offbeat.data.batch import Batch

VOCAB = 23
LOSSES_OF_ALL = (
    CROSS_ENTROPY, client_loss("importance_sampling"), client_loss("ppo"), client_loss("cispo", clip_low=0.7, clip_high=1.3),
    client_loss("dro"), client_loss("gspo", clip_low=0.95, clip_high=1.1))


def make_datums(count, *, seed=0, losses=LOSSES_OF_ALL, prompt_len=4, dense=False, max_answer=8, vocab=VOCAB):
    """Sequences whose losses take turns.

    Args:
        dense: one target at each position, the next token, as a policy's samples have; else 0 to 3 random ones.
    """
    rng = np.random.default_rng(seed)
    prompt = rng.integers(2, vocab, prompt_len)
    lengths = prompt_len + rng.integers(1, max_answer, count)
    tokens = np.concatenate([np.concatenate([prompt, rng.integers(2, vocab, length - prompt_len)]) for length in lengths])
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    counts = np.ones(len(tokens), np.int64) if dense else rng.integers(0, 4, len(tokens))
    position = np.repeat(np.arange(len(tokens)) - np.repeat(offsets[:-1], lengths), counts)
    trained = (position >= prompt_len - 1) & (rng.random(len(position)) < 0.8)
    loss_ids = np.arange(count) % len(losses)
    is_ce = np.array([loss.name == "cross_entropy" for loss in losses])[np.repeat(np.repeat(loss_ids, lengths), counts)]
    targets = np.roll(tokens, -1) if dense else rng.integers(0, vocab, len(position))
    weights = np.where(trained & is_ce, rng.standard_normal(len(position)), 0)
    rollout_logprobs = np.where(trained, np.log(1 / vocab) + 0.3 * rng.standard_normal(len(position)), 0)
    advantages = np.where(trained & ~is_ce, rng.standard_normal(len(position)), 0)
    return Batch(
        tokens=tokens, offsets=offsets, positions=np.repeat(np.arange(len(tokens)), counts), targets=targets,
        columns={
            "loss_weights": np.where(is_ce, weights, advantages != 0), "rollout_logprobs": rollout_logprobs, "advantages": advantages,
            "ratio_mask": trained & ~is_ce},
        sequences={"group_ids": np.arange(count), "prefix_lens": np.zeros(count), "loss_ids": loss_ids}, losses=tuple(losses))


def of_adapters(batch, names):
    """The batch with the adapter [N] of each sequence."""
    known = sorted(set(names))
    return replace(batch, adapters=tuple(known), sequences={**batch.sequences, "adapter_ids": [known.index(name) for name in names]})


def reference(logprobs, batch):
    """Loss of each sequence in plain loops; what is masked takes no part."""
    results, columns = [], batch.columns
    for i in range(len(batch)):
        spec = batch.losses[batch.ids("loss_ids")[i]]
        where = np.flatnonzero(batch.target_sequences == i)
        gaps = [logprobs[m] - float(columns["rollout_logprobs"][m]) for m in where if columns["ratio_mask"][m]]
        s = torch.stack(gaps).mean().exp().detach() if gaps else None
        total = torch.zeros(())
        for m in where:
            lp, q, adv, w = logprobs[m], *(float(columns[name][m]) for name in ("rollout_logprobs", "advantages", "loss_weights"))
            if spec.name == "cross_entropy":
                if w != 0:
                    total = total - w * lp
                continue
            if adv == 0 or (spec.name == "gspo" and not columns["ratio_mask"][m]):
                continue
            r = (lp - q).exp()
            match spec.name:
                case "importance_sampling":
                    total = total - r * adv
                case "ppo":
                    total = total - torch.minimum(r * adv, r.clamp(spec.constants["clip_low"], spec.constants["clip_high"]) * adv)
                case "cispo":
                    total = total - r.detach().clamp(spec.constants["clip_low"], spec.constants["clip_high"]) * lp * adv
                case "dro":
                    total = total - (lp * adv - 0.5 * spec.constants["beta"] * (lp - q) ** 2)
                case "gspo":
                    st = s * (lp - lp.detach()).exp()
                    total = total - torch.minimum(st * adv, st.clamp(spec.constants["clip_low"], spec.constants["clip_high"]) * adv)
        results.append(total)
    return torch.stack(results)
