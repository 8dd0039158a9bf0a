"""Random datums for tests of the trainer's sums: of every loss, with none, one or several targets at a position; and the slow formulas."""

import numpy as np
import torch

from offbeat.data.datums import DatumBatch, LossSpec

VOCAB = 23
LOSSES_OF_ALL = (
    LossSpec("cross_entropy"), LossSpec("importance_sampling"), LossSpec.of("ppo"), LossSpec.of("cispo", clip_low=0.7, clip_high=1.3),
    LossSpec.of("dro"), LossSpec.of("gspo", clip_low=0.95, clip_high=1.1))


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
    return DatumBatch(
        tokens=tokens, offsets=offsets, target_offsets=np.concatenate([[0], np.cumsum(counts)]), targets=targets,
        weights=np.where(trained & is_ce, rng.standard_normal(len(position)), 0),
        rollout_logprobs=np.where(trained, np.log(1 / vocab) + 0.3 * rng.standard_normal(len(position)), 0),
        advantages=np.where(trained & ~is_ce, rng.standard_normal(len(position)), 0), ratio_mask=trained & ~is_ce,
        losses=tuple(losses), loss_ids=loss_ids)


def reference(logprobs, batch):
    """Loss of each sequence in plain loops; what is masked takes no part."""
    results = []
    for i in range(len(batch)):
        spec = batch.losses[batch.loss_ids[i]]
        where = np.flatnonzero(batch.target_sequences == i)
        gaps = [logprobs[m] - float(batch.rollout_logprobs[m]) for m in where if batch.ratio_mask[m]]
        s = torch.stack(gaps).mean().exp().detach() if gaps else None
        total = torch.zeros(())
        for m in where:
            lp, q, adv, w = logprobs[m], float(batch.rollout_logprobs[m]), float(batch.advantages[m]), float(batch.weights[m])
            if spec.name == "cross_entropy":
                if w != 0:
                    total = total - w * lp
                continue
            if adv == 0 or (spec.name == "gspo" and not batch.ratio_mask[m]):
                continue
            r = (lp - q).exp()
            match spec.name:
                case "importance_sampling":
                    total = total - r * adv
                case "ppo":
                    total = total - torch.minimum(r * adv, r.clamp(spec.clip_low, spec.clip_high) * adv)
                case "cispo":
                    total = total - r.detach().clamp(spec.clip_low, spec.clip_high) * lp * adv
                case "dro":
                    total = total - (lp * adv - 0.5 * spec.beta * (lp - q) ** 2)
                case "gspo":
                    st = s * (lp - lp.detach()).exp()
                    total = total - torch.minimum(st * adv, st.clamp(spec.clip_low, spec.clip_high) * adv)
        results.append(total)
    return torch.stack(results)
