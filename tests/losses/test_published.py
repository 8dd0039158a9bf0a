"""What each preset does with stale samples and with an engine that computes differently: its gradient by its paper, in plain float64.

`python tests/losses/test_published.py --write` writes the table of distances in docs/algorithms.md, which a test compares with them.

A preset that gives plain REINFORCE there, -A for each token, has no correction at all. The gradients below are derived by hand from the
papers' formulas, token by token, and know nothing of the code under test; `W`, `r` and `A` are those of docs/algorithms.md.
"""

import math
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from offbeat.algorithms.distillation import TeacherScores, with_teacher
from offbeat.algorithms.experience import make_batch, with_scores
from offbeat.algorithms.objectives import policy_loss
from offbeat.algorithms.selection import choose_tokens
from offbeat.config.algorithms import AlgorithmConfig
from offbeat.config.presets import PRESETS
from offbeat.data.batch import Batch
from offbeat.data.trajectory import Group, Trajectory
from offbeat.losses.compose import target_losses

DOCUMENT = Path(__file__).parents[2] / "docs" / "algorithms.md"
BEGIN, END = "<!-- begin: distances from REINFORCE -->\n", "<!-- end: distances from REINFORCE -->\n"


@dataclass(frozen=True)
class Sample:
    """An answer's advantage, and of each token its probability when it was sampled, now, and under the reference."""

    advantage: float
    then: tuple[float, ...]
    now: tuple[float, ...]
    ref: tuple[float, ...]

    @property
    def ratios(self):
        return [now / then for now, then in zip(self.now, self.then, strict=True)]

    @property
    def mean_log(self):
        return math.fsum(map(math.log, self.ratios)) / len(self.now)


def moved(advantage, *tokens):
    """A sample of (then, now) for each token; the reference is a little below what sampled."""
    then, now = zip(*tokens, strict=True)
    return Sample(advantage, then, now, tuple(0.9 * p for p in then))


STALE = [
    moved(1.0, (0.5, 0.52), (0.3, 0.6), (0.5, 0.3), (0.4, 0.5)),  # ratios 1.04, 2, 0.6 and 1.25, between both upper clips
    moved(-1.0, (0.4, 0.18), (0.4, 0.6), (0.5, 0.49), (0.1, 0.7)),  # 0.45, 1.5, 0.98 and 7, above every bound
    moved(0.5, (0.05, 0.23), (0.2, 0.21), (0.3, 0.4)),  # 4.6, between the caps of aipo and cispo, and 1.33, which M2PO keeps
    moved(-1.5, (0.5, 0.2), (0.6, 0.25)),  # an unwanted answer that has become unlikely: OPSM drops it
    moved(1.0, (0.5, 0.50005), (0.25, 0.250025)),  # within GSPO's range
    moved(0.8, (0.9, 0.02), (0.5, 0.5)),  # a binary KL above 2
]
FRESH = [Sample(each.advantage, each.then, each.then, each.ref) for each in STALE]


def batch_of(preset, samples):
    """The samples as one batch with loss weights of 1, and their log-probabilities now [M]; the step has one update, so no column prox."""
    loss = policy_loss(AlgorithmConfig(preset=preset))
    trained = np.concatenate([[False] + [True] * len(each.now) for each in samples])
    columns = {
        "rollout_logprobs": [math.log(p) for each in samples for p in each.then],
        "ref_logprobs": [math.log(p) for each in samples for p in each.ref],
        "advantages": [each.advantage for each in samples for _ in each.now],
        "imitate_mask": [each.advantage > 0 for each in samples for _ in each.now],
        "loss_weights": np.ones(int(trained.sum()))}
    full = {name: np.zeros(len(trained)) for name in columns}
    for name, values in columns.items():
        full[name][trained] = values
    batch = Batch.of_next_tokens(
        np.zeros(len(trained), np.int32), trained, lengths=[1 + len(each.now) for each in samples], columns=full, losses=(loss,))
    now = np.array([math.log(p) for each in samples for p in each.now])
    return batch.with_columns(**choose_tokens(loss, batch, prox_logprobs=now, seed=0)), now


def gradient_of(batch, logprobs):
    """[M] float64, of the loss by the log-probabilities; the batch's columns are float32."""
    leaf = torch.tensor(logprobs, dtype=torch.float64, requires_grad=True)
    target_losses(leaf, batch, np.arange(batch.num_targets)).losses.sum().backward()
    return leaf.grad.numpy()


# -- by the papers: the gradient of one sample's tokens ------------------------------------------------------------------------------------


def reinforce(sample):
    return [-sample.advantage for _ in sample.now]


def ppo(low, high, advantage_bound=None):
    """Nothing for a token whose ratio has left the range in the direction of its advantage, -r A for others."""
    def of(sample):
        a = sample.advantage
        return [0.0 if (a > 0 and r > 1 + high) or (a < 0 and r < 1 - low) else -r * a for r in sample.ratios]
    return of


def weighted(weight):
    """-W A, with W of the ratio alone, which is that of the policy at the start of the step to the one that sampled."""
    return lambda sample: [-weight(r) * sample.advantage for r in sample.ratios]


def whole_answer(sample):
    """mis: the product of an answer's ratios weighs it, or drops it."""
    product = math.prod(sample.ratios)
    return [-(product if 0.5 <= product <= 2 else 0.0) * sample.advantage for _ in sample.now]


def binary_kl(sample):
    """kpop: plain REINFORCE, without tokens whose Bernoulli distribution has moved too far in either direction."""
    def kl(p, q):
        return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))
    return [0.0 if max(kl(p, q), kl(q, p)) > 2 else -sample.advantage for p, q in zip(sample.now, sample.then, strict=True)]


def sequence_ratio(sample):
    """gspo: one ratio for the answer, the geometric mean, and one clip for all of its tokens."""
    s, a = math.exp(sample.mean_log), sample.advantage
    return [0.0 if (a > 0 and s > 1 + 4e-4) or (a < 0 and s < 1 - 3e-4) else -s * a for _ in sample.now]


def soft_gate(sample):
    """sapo: the slope of (4 / tau) sigmoid(tau (r - 1)), which is 1 at r = 1 and falls to both sides."""
    tau = 1.0 if sample.advantage > 0 else 1.05
    gates = [1 / (1 + math.exp(-tau * (r - 1))) for r in sample.ratios]
    return [-4 * gate * (1 - gate) * r * sample.advantage for gate, r in zip(gates, sample.ratios, strict=True)]


def geometric_mean(sample):
    """gmpo: the geometric mean of ratios, each clipped against the sign of A; a clipped one has no gradient."""
    a, logs = sample.advantage, [math.log(r) for r in sample.ratios]
    clipped = [min(x, 0.4) if a > 0 else max(x, -0.4) for x in logs]
    mean = math.exp(math.fsum(clipped) / len(logs))
    return [-a * mean if x == kept else 0.0 for x, kept in zip(logs, clipped, strict=True)]


def by_probability(sample):
    """dppo: nothing where the probability has moved by more than 0.2 in the direction of A."""
    a = sample.advantage
    return [0.0 if (a > 0 and now - then > 0.2) or (a < 0 and then - now > 0.2) else -now / then * a
            for now, then in zip(sample.now, sample.then, strict=True)]


def unlike_teacher(sample):
    """opd: -r A without tokens that have lost more than 0.2 of probability."""
    return [0.0 if now - then < -0.2 else -now / then * sample.advantage for now, then in zip(sample.now, sample.then, strict=True)]


def without_far_answers(sample):
    """deepseek_v32: PPO, without unwanted answers that have become unlikely, plus 0.001 r k3."""
    kept = [0.0] * len(sample.now) if sample.advantage < 0 and -sample.mean_log > 0.5 else ppo(0.2, 0.2)(sample)
    gaps = [math.log(now / ref) for now, ref in zip(sample.now, sample.ref, strict=True)]
    slopes = [r * (math.exp(-d) - 1 + d) + r * (1 - math.exp(-d)) for r, d in zip(sample.ratios, gaps, strict=True)]
    return [g + 1e-3 * slope for g, slope in zip(kept, slopes, strict=True)]


def plus(base, term):
    """A loss with a term for each token of (then, now, ref, advantage)."""
    return lambda sample: [g + term(then, now, ref, sample.advantage) for g, then, now, ref in zip(
        base(sample), sample.then, sample.now, sample.ref, strict=True)]


DECOUPLED = weighted(lambda w: w if w <= 5 else 0.0)
PPO_CLIP = ppo(0.2, 0.2)
CISPO = weighted(lambda r: min(r, 5.0))
PUBLISHED = {
    "grpo": DECOUPLED, "rloo": DECOUPLED, "opo": DECOUPLED,
    "dr_grpo": PPO_CLIP, "ppo": PPO_CLIP, "lite_ppo": PPO_CLIP, "max_rl": PPO_CLIP, "gdpo": PPO_CLIP, "gigpo": PPO_CLIP,
    "reinforce_pp": PPO_CLIP,
    "reinforce_pp_baseline": plus(PPO_CLIP, lambda then, now, ref, a: 0.01 * math.log(now / ref)),
    "dapo": ppo(0.2, 0.28),
    "vapo": plus(ppo(0.2, 0.28), lambda then, now, ref, a: -0.1 if a > 0 else 0.0),
    "gspo": sequence_ratio, "luspo": sequence_ratio,
    "cispo": CISPO, "scale_rl": CISPO, "aipo": weighted(lambda r: min(r, 4.0)),
    "sapo": soft_gate, "gmpo": geometric_mean,
    "tis": weighted(lambda w: min(w, 2.0)), "icepop": weighted(lambda w: w if 0.5 <= w <= 5 else 0.0), "mis": whole_answer,
    "kpop": binary_kl,
    "dppo": by_probability, "prime_rl": plus(by_probability, lambda then, now, ref, a: 2e-3 * math.log(now / then)),
    "deepseek_v32": without_far_answers,
    "opd": unlike_teacher, "sdft": unlike_teacher,
    "raft": lambda sample: [-1.0 if sample.advantage > 0 else 0.0 for _ in sample.now],
}
"""Gradients of a sample. m2po chooses among all samples: `m2po` below."""

ALIKE = [
    {"grpo", "rloo", "opo"}, {"dr_grpo", "ppo", "lite_ppo", "max_rl", "gdpo", "gigpo", "reinforce_pp"}, {"gspo", "luspo"},
    {"cispo", "scale_rl"}, {"opd", "sdft"}]
"""Presets whose papers have one loss for given advantages, and differ in advantages or aggregation."""


def m2po(samples):
    """-r A, without the harmful tokens of the largest (log r)^2, as many as bring the mean of the rest to at most 0.04."""
    harmful = sorted(
        math.log(r) ** 2 for each in samples for r in each.ratios if (each.advantage > 0 and r > 1) or (each.advantage < 0 and r < 1))
    while harmful and math.fsum(harmful) / len(harmful) > 0.04:
        harmful.pop()
    limit = harmful[-1] if harmful else -1.0
    return [0.0 if (each.advantage > 0) == (r > 1) and r != 1 and math.log(r) ** 2 > limit else -r * each.advantage
            for each in samples for r in each.ratios]


def published(preset, samples):
    return np.array(m2po(samples) if preset == "m2po" else [g for each in samples for g in PUBLISHED[preset](each)])


@pytest.mark.parametrize("preset", PRESETS)
def test_the_gradient_of_stale_samples_is_that_of_the_paper(preset):
    batch, now = batch_of(preset, STALE)
    np.testing.assert_allclose(gradient_of(batch, now), published(preset, STALE), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("preset", PRESETS)
def test_no_preset_is_plain_reinforce_on_stale_samples(preset):
    plain = np.array([g for each in STALE for g in reinforce(each)])
    batch, now = batch_of(preset, STALE)
    assert np.abs(gradient_of(batch, now) - plain).max() > 0.1 * np.abs(plain).max()


@pytest.mark.parametrize("preset", PRESETS)
def test_samples_of_the_very_policy_give_plain_reinforce_and_the_terms_of_the_preset(preset):
    plain = np.array([g for each in FRESH for g in reinforce(each)])
    batch, now = batch_of(preset, FRESH)
    found = gradient_of(batch, now)
    terms = {"raft": None, "vapo": 0.1, "reinforce_pp_baseline": 0.01 * math.log(1 / 0.9), "deepseek_v32": 1e-3}
    if preset == "raft":
        np.testing.assert_array_equal(found, -(plain < 0).astype(float))
    else:
        np.testing.assert_allclose(found, plain, rtol=1e-5, atol=terms.get(preset, 0.0) + 1e-6)


def test_presets_differ_by_their_loss_unless_their_papers_have_one_loss_with_other_advantages():
    found = {preset: gradient_of(*batch_of(preset, STALE)) for preset in PRESETS}
    for one in PRESETS:
        for other in PRESETS:
            alike = one == other or any({one, other} <= family for family in ALIKE)
            assert np.allclose(found[one], found[other], rtol=1e-6, atol=1e-7) == alike, (one, other)


# -- from rewards: advantages, aggregation and loss together -------------------------------------------------------------------------------


def whole_gradient(preset):
    """The gradient of a step by the log-probabilities of all tokens, in order, of three groups of stale samples with two rewards each."""
    rng = np.random.default_rng(0)
    config = AlgorithmConfig(preset=preset, drop_zero_advantage=False)
    limit, lengths = 10, [[3, 6, 10, 4], [2, 5, 7, 1], [4, 4, 2, 9]]
    rewards = [[(1, 0.5), (0, 0.5), (1, 0), (0, 0)], [(1, 1), (0, 0.5), (0, 0), (0, 0.25)], [(0, 1), (1, 1), (1, 0), (1, 0.5)]]
    groups, index = [], 0
    for own_lengths, own_rewards in zip(lengths, rewards, strict=True):
        members = []
        for length, (right, form) in zip(own_lengths, own_rewards, strict=True):
            members.append(Trajectory(
                [index] + [1] * length, [False] + [True] * length, [0.0, *-rng.uniform(0.1, 2, length)], [-1] + [0] * length,
                {"right": float(right), "form": float(form)}, "length" if length == limit else "stop"))
            index += 1
        groups.append(Group(f"0:{len(groups)}", 0, tuple(members)))
    noise = np.random.default_rng(1).standard_normal((4, 57)).astype(np.float32)
    batch = make_batch(groups, config=config, max_new_tokens=limit)
    rollout = batch.columns["rollout_logprobs"]
    if config.needs_teacher:
        batch = with_teacher(batch, TeacherScores.of_targets(rollout + noise[0 if preset == "opd" else 1, : len(rollout)], np.zeros(
            len(batch), np.bool_)), config)
    if config.compares_reference or config.needs_critic:
        scores = {"ref_logprobs": rollout + noise[2, : len(rollout)], "values": noise[3, : len(rollout)], "end_values": np.zeros(
            len(batch), np.float32)}
        batch = with_scores(batch, scores, config)
    now = np.minimum(rollout + np.random.default_rng(2).normal(0, 1.2, 57)[: len(rollout)], -0.01)
    batch = batch.with_columns(**choose_tokens(batch.losses[0], batch, prox_logprobs=now, seed=0))
    found = np.zeros(57)  # dapo leaves the cut-off answer out
    starts = np.cumsum([0, *(length for own in lengths for length in own)])
    for i, sequence in enumerate(batch.tokens[batch.offsets[:-1]]):
        own = slice(batch.target_offsets[i], batch.target_offsets[i + 1])
        found[starts[sequence] : starts[sequence] + own.stop - own.start] = gradient_of(batch, now)[own]
    return found


def test_from_rewards_to_gradient_every_preset_differs_from_every_other_one():
    found = {preset: whole_gradient(preset) for preset in PRESETS}
    for one in PRESETS:
        for other in PRESETS:
            if one < other:
                assert np.abs(found[one] - found[other]).max() > 1e-4 * np.abs(found[one]).max(), (one, other)


def test_the_hand_derived_gradients_know_every_preset():
    assert {*PUBLISHED, "m2po"} == set(PRESETS)


# -- the table in the documentation --------------------------------------------------------------------------------------------------------


def table():
    """The rows of docs/algorithms.md, nearest first: presets of one gradient, its distance, tokens without gradient, largest weight."""
    plain, rows = np.array([g for each in STALE for g in reinforce(each)]), {}
    for preset in PRESETS:
        found = gradient_of(*batch_of(preset, STALE))
        far, idle, most = np.linalg.norm(found - plain) / np.linalg.norm(plain), int((found == 0).sum()), np.abs(found / plain).max()
        rows.setdefault(tuple(np.round(found, 6)), (float(far), [], f"{far:.3f} | {idle} | {most:.2f}"))[1].append(f"`{preset}`")
    lines = ["| presets | distance from REINFORCE | tokens without gradient | largest weight |", "|---|---|---|---|"]
    return "\n".join([*lines, *(f"| {', '.join(names)} | {figures} |" for _, names, figures in sorted(rows.values()))]) + "\n"


def written(page):
    """The page with the table of today's gradients."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}{table()}{END}{rest.partition(END)[2]}"


def test_the_table_of_distances_in_the_documentation_is_that_of_these_gradients():
    page = DOCUMENT.read_text(encoding="utf-8")
    assert BEGIN in page and written(page) == page, "write it: python tests/losses/test_published.py --write"


if __name__ == "__main__" and "--write" in sys.argv:
    DOCUMENT.write_text(written(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
