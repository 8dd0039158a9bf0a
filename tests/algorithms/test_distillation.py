"""What a teacher's scores become, against loops over single tokens; and that a split of the batch changes none of it."""

import math
from dataclasses import replace

import numpy as np
import pytest

from offbeat.algorithms.distillation import TeacherScores, teacher_stats, with_teacher
from offbeat.config.algorithms import AlgorithmConfig
from offbeat.data.ranges import gather_ranges
from slow_losses import random_batch

OPD = AlgorithmConfig(preset="opd")
TOP_K = AlgorithmConfig(preset="opd", objective="forward_kl", filters=())
VOCAB, K = 11, 4


def sample(seed, *, top_k=0):
    """A batch and scores of it, with log-probabilities that are missing on either side, far apart, or fewer than K."""
    rng = np.random.default_rng(seed)
    batch, _ = random_batch(None, seed=seed)
    count = batch.num_targets
    logprobs = -rng.uniform(0, 14, count).astype(np.float32)
    logprobs[rng.integers(0, count, 4)] = [np.nan, np.inf, -np.inf, -80.0]
    batch.columns["rollout_logprobs"][rng.integers(0, count, 2)] = [-np.inf, np.nan]
    batch.columns["rollout_logprobs"][rng.integers(0, count)] = -60.0
    tokens = np.argsort(rng.random((count, VOCAB)), axis=1)[:, :top_k].astype(np.int32)
    top = np.sort(np.log(rng.dirichlet(np.ones(VOCAB), count)), axis=1)[:, ::-1][:, :top_k].astype(np.float32)
    if top_k:
        top[3, 2:], top[5, :] = -np.inf, -np.inf
    return batch, TeacherScores(logprobs, rng.random(len(batch)) < 0.3, tokens, top)


def slow_log_ratio(batch, scores, m):
    teacher, rollout = float(scores.logprobs[m]), float(batch.columns["rollout_logprobs"][m])
    return max(-20.0, min(20.0, teacher - rollout)) if math.isfinite(teacher) and math.isfinite(rollout) else None


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("credit", "coefficient"), [("alone", 1.0), ("alone", 0.3), ("added", 1.0), ("added", 2.5)])
def test_an_advantage_is_how_much_likelier_the_teacher_finds_the_token(credit, coefficient, seed):
    batch, scores = sample(seed)
    found = with_teacher(batch, scores, OPD.model_copy(update={"teacher_credit": credit, "teacher_coefficient": coefficient}))
    for m in range(batch.num_targets):
        ratio = slow_log_ratio(batch, scores, m)
        task = float(batch.columns["advantages"][m]) if credit == "added" else 0.0
        expected = 0.0 if ratio is None else task + coefficient * ratio
        assert found.columns["advantages"][m] == pytest.approx(expected, rel=1e-6, abs=1e-6)
    for name, values in batch.columns.items():
        assert name == "advantages" or values is found.columns[name]


@pytest.mark.parametrize("seed", range(5))
def test_a_token_becomes_the_likeliest_tokens_of_the_teacher_whose_probabilities_add_up_to_one(seed):
    batch, scores = sample(seed, top_k=K)
    found, reverse = (with_teacher(batch, scores, TOP_K.model_copy(update={"objective": name})) for name in ("forward_kl", "reverse_kl"))
    expected, least = [], []
    for m in range(batch.num_targets):
        finite = [i for i in range(K) if math.isfinite(scores.top_logprobs[m, i])]
        if slow_log_ratio(batch, scores, m) is None:
            continue
        total = math.fsum(math.exp(float(scores.top_logprobs[m, i])) for i in finite)
        expected += [(int(batch.positions[m]), int(scores.top_tokens[m, i]), float(batch.columns["loss_weights"][m]),
                      float(scores.top_logprobs[m, i]) - math.log(total)) for i in finite]
        least += [min(float(scores.top_logprobs[m, i]) for i in finite) - math.log(total)] * len(finite) if finite else []
    assert found.positions.tolist() == [each[0] for each in expected]
    assert found.targets.tolist() == [each[1] for each in expected]
    np.testing.assert_array_equal(found.columns["loss_weights"], np.array([each[2] for each in expected], np.float32))
    np.testing.assert_allclose(found.columns["teacher_logprobs"], [each[3] for each in expected], rtol=1e-5, atol=1e-6)
    sums = np.bincount(found.positions, np.exp(found.columns["teacher_logprobs"].astype(np.float64)))
    np.testing.assert_allclose(sums[sums > 0], 1, rtol=1e-6)
    assert list(reverse.columns) == [*found.columns, "teacher_least"]
    np.testing.assert_allclose(reverse.columns["teacher_least"], least, rtol=1e-5, atol=1e-6)
    assert found.denominator == batch.denominator and len(found) == len(batch)


@pytest.mark.parametrize(("config", "top_k"), [(OPD, 0), (TOP_K, K)])
def test_parts_of_a_batch_become_the_parts_of_what_the_whole_becomes(config, top_k):
    batch, scores = sample(7, top_k=top_k)
    whole = with_teacher(batch, scores, config)
    for part in ([0, 3, 4], [6], [], [5, 1, 2]):
        targets = gather_ranges(batch.target_offsets, np.array(part, np.int64))
        own = TeacherScores(
            scores.logprobs[targets], scores.too_long[np.array(part, np.int64)], scores.top_tokens[targets], scores.top_logprobs[targets])
        mine, theirs = with_teacher(batch.select(part), own, config), whole.select(part)
        assert mine.columns.keys() == theirs.columns.keys()
        for name in ("positions", "targets"):
            np.testing.assert_array_equal(getattr(mine, name), getattr(theirs, name))
        for name, values in mine.columns.items():
            np.testing.assert_array_equal(values, theirs.columns[name])


@pytest.mark.parametrize("seed", range(5))
def test_statistics_count_what_is_known_and_what_is_not(seed):
    batch, scores = sample(seed, top_k=K)
    stats = teacher_stats(batch, scores).values()
    ratios = [slow_log_ratio(batch, scores, m) for m in range(batch.num_targets)]
    known = [(-r, float(scores.logprobs[m])) for m, r in enumerate(ratios) if r is not None]
    entropies = []
    for row in scores.top_logprobs.astype(np.float64).tolist():
        p = [math.exp(x) for x in row if math.isfinite(x)]
        if p:
            entropies.append(-math.fsum(x / math.fsum(p) * math.log(x / math.fsum(p)) for x in p))
    assert stats == pytest.approx({
        "teacher/reverse_kl_mean": math.fsum(r for r, _ in known) / len(known),
        "teacher/unlikely_share": sum(lp < -10 for _, lp in known) / len(known),
        "teacher/missing_share": ratios.count(None) / len(ratios),
        "teacher/too_long_share": float(np.mean(scores.too_long)),
        "teacher/top_entropy_mean": math.fsum(entropies) / len(entropies)}, rel=1e-5)


def test_nothing_has_no_statistics_and_stays_nothing():
    batch, scores = sample(0)
    empty = batch.select([])
    none = TeacherScores.of_targets(np.zeros(0, np.float32), np.zeros(0, np.bool_))
    assert teacher_stats(empty, none).values() == {}
    assert with_teacher(empty, none, OPD).num_targets == 0
    unknown = replace(scores, logprobs=np.full(batch.num_targets, np.nan, np.float32))
    assert not with_teacher(batch, unknown, OPD).columns["advantages"].any()
