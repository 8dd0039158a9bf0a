"""Which proofs are believed: for random bias, noise and moves, and for engines in another number format, right ones and wrong ones."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.data.image_store import FIRST_ID
from offbeat.weights.proof import TOLERANCES, Outcome, ProofJudge, Verdict
from offbeat.weights.protocol import Manifest, Proof
from proof_drills import FAULTY_FROM, Drill, play

NUM_TOKENS = 48


def manifest(version: int, logprobs: np.ndarray) -> Manifest:
    return Manifest(version, "", "right", tuple(range(len(logprobs) + 1)), tuple(logprobs.tolist()))


def told(version: int, logprobs: np.ndarray) -> Proof:
    """What an engine says that cannot show its weights."""
    return Proof(version, None, tuple(logprobs.tolist()))


class World:
    """A trainer whose canary drifts, and the bias and noise of an engine."""

    def __init__(self, seed: int, *, step: float, noise: float, bias: float) -> None:
        self._random = np.random.default_rng(seed)
        self._step, self._noise = step, noise
        self._drift = self._random.normal(size=NUM_TOKENS)
        self.bias = self._random.normal(scale=bias, size=NUM_TOKENS) if bias else np.zeros(NUM_TOKENS)
        self.trainer = self._random.normal(-2.0, 0.5, NUM_TOKENS)

    def move(self) -> None:
        """One step: part of it goes where the others went."""
        self.trainer = self.trainer + self._step * (self._drift + self._random.normal(size=NUM_TOKENS)) / 2**0.5

    def see(self, weights: np.ndarray) -> np.ndarray:
        """The canary under these weights, by the engine."""
        return weights + self.bias + self._random.normal(scale=self._noise, size=NUM_TOKENS)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), step=st.floats(1e-6, 0.3), noise=st.floats(1e-7, 0.02), bias=st.floats(0, 0.02))
def test_a_right_engine_is_never_refused_however_small_the_steps_are_against_its_noise(
    seed: int, step: float, noise: float, bias: float,
) -> None:
    world, judge = World(seed, step=step, noise=noise, bias=bias), ProofJudge(tolerance=0.2)
    for version in range(60):
        verdict = judge.judge("a", manifest(version, world.trainer), told(version, world.see(world.trainer)))
        assert not verdict.refused, verdict
        world.move()


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), step=st.floats(1e-4, 0.3), noise=st.floats(1e-7, 0.01), stale_from=st.integers(1, 20))
def test_a_stale_engine_is_refused_as_soon_as_the_moves_add_up_to_more_than_its_noise(
    seed: int, step: float, noise: float, stale_from: int,
) -> None:
    world, judge = World(seed, step=step, noise=noise, bias=noise), ProofJudge(tolerance=1e9)
    stale = world.trainer
    for version in range(stale_from + 4000):
        if version <= stale_from:
            stale = world.trainer
        verdict = judge.judge("a", manifest(version, world.trainer), told(version, world.see(stale)))
        if verdict.refused:
            assert version > stale_from
            return
        # 10 standard deviations of a difference, and what was inconclusive when it went wrong, which may be as much again.
        assert np.linalg.norm(world.trainer - stale) < 45 * max(2 * noise, 2e-6), verdict
        world.move()
    pytest.fail("it was never refused")


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), bias=st.floats(-0.1, 0.1), noise=st.floats(1e-5, 1e-4))
def test_a_bias_of_all_tokens_is_seen_and_is_no_noise(seed: int, bias: float, noise: float) -> None:
    world, judge = World(seed, step=100 * noise, noise=noise, bias=0), ProofJudge(tolerance=0.2)
    first = world.see(world.trainer) + bias
    off = np.asarray(first, np.float64) - world.trainer
    verdict = judge.judge("a", manifest(0, world.trainer), told(0, first))
    spread, mean = float(np.std(off, ddof=0)), float(np.mean(off))
    assert f"its noise of {max(spread, 2e-6):.2g} a token" in verdict.reason
    assert (f"its bias of {mean:.2g}" in verdict.reason) == (abs(mean) > 5 * spread / NUM_TOKENS**0.5)
    for version in (1, 2):  # each moves by far more than the noise, and may move by far less than the bias
        world.move()
        stale, right = (judge.judge("a", manifest(version, world.trainer), told(version, seen)) for seen in (
            first, world.see(world.trainer) + bias))
        assert right.outcome is Outcome.PROVEN and stale.outcome is Outcome.REFUSED


def test_a_bias_of_its_own_for_each_token_is_no_noise_either() -> None:
    found = []
    for seed in range(30):
        world, judge = World(seed, step=2e-3, noise=1e-4, bias=1e-2), ProofJudge(tolerance=0.2)
        judge.judge("a", manifest(0, world.trainer), told(0, world.see(world.trainer)))
        world.move()
        right = judge.judge("a", manifest(1, old := world.trainer), told(1, world.see(old)))
        world.move()
        stale = judge.judge("a", manifest(2, world.trainer), told(2, world.see(old)))
        found.append((right.outcome, stale.outcome))
    assert found.count((Outcome.PROVEN, Outcome.REFUSED)) > 25 and all(right is not Outcome.REFUSED for right, _ in found)


def versions_until_told(seed: int, *, step: float, bias: float) -> int:
    """Versions after which an engine that goes stale at version 3 is refused, at a noise of 7e-4 and a bias of each token's own."""
    world, judge = World(seed, step=step, noise=7e-4, bias=0), ProofJudge(tolerance=0.2)
    world.bias = np.random.default_rng(seed + 10_000).normal(scale=bias, size=NUM_TOKENS)
    stale = world.trainer
    for version in range(200):
        stale = world.trainer if version <= 3 else stale
        if judge.judge("a", manifest(version, world.trainer), told(version, world.see(stale))).refused:
            return version - 3
        world.move()
    return 200


@pytest.mark.parametrize("step", [5e-4, 1e-3, 2e-3])
def test_a_bias_of_14_times_the_noise_delays_no_refusal(step: float) -> None:
    plain, biased = ([versions_until_told(seed, step=step, bias=bias) for seed in range(40)] for bias in (0.0, 1e-2))
    assert min(*plain, *biased) >= 1 and max(*plain, *biased) < 60
    assert np.mean(biased) <= np.mean(plain) + 0.5, (plain, biased)


def test_no_right_engine_is_refused_in_600_publishes_beside_such_a_bias() -> None:
    for seed, step in enumerate((1e-5, 5e-4, 2e-3)):
        world, judge = World(seed, step=step, noise=7e-4, bias=1e-2), ProofJudge(tolerance=0.2)
        for version in range(200):
            verdict = judge.judge("a", manifest(version, world.trainer), told(version, world.see(world.trainer)))
            assert not verdict.refused, verdict
            world.move()


def test_the_number_of_publishes_that_say_nothing_is_told_with_its_reason() -> None:
    world, judge = World(1, step=1e-5, noise=1e-2, bias=1e-2), ProofJudge(tolerance=0.1)
    verdicts = []
    for version in range(3):
        verdicts.append(judge.judge("a", manifest(version, world.trainer), told(version, world.see(world.trainer))))
        world.move()
    assert [verdict.outcome for verdict in verdicts] == [Outcome.UNSURE] * 3
    assert "its first proof shows its noise" in verdicts[0].reason
    assert "inconclusive, within noise: version 2 moves the canary by" in verdicts[2].reason


def shown(verdict: Verdict) -> tuple[bool, str]:
    return verdict.refused, verdict.reason


@pytest.mark.parametrize(("proof", "reason"), [
    (Proof(4, "right", (-1.0,)), "serves version 4 instead of 5"),
    (Proof(5, "other", (-1.0,)), "its weights have fingerprint other instead of right"),
    (Proof(5, "other", (-1.0,), live=False), "the weights that it has read have fingerprint other instead of right"),
    (Proof(5, "right", (-1.5,)), "its canary log-probabilities are off by 0.5, more than 0.001"),
    (Proof(5, "right", (float("nan"),)), "off by nan"),
    (Proof(5, None, (-1.5,)), "off by 0.5"),
])
def test_what_is_wrong_by_itself_is_refused_at_once(proof: Proof, reason: str) -> None:
    refused, why = shown(ProofJudge(tolerance=1e-3).judge("a", Manifest(5, "", "right", (1, 2), (-1.0,)), proof))
    assert refused and reason in why


def test_weights_that_are_shown_are_proven_at_any_noise_and_those_that_were_only_read_are_not() -> None:
    judge, wanted = ProofJudge(tolerance=0.1), Manifest(5, "", "right", (1, 2), (-1.0,))
    assert judge.judge("a", wanted, Proof(5, "right", (-1.05,))) == Verdict(Outcome.PROVEN, pytest.approx(0.05), by_weights=True)
    assert judge.judge("b", wanted, Proof(5, "right", (-1.05,), live=False)).outcome is Outcome.UNSURE


def test_gaps_that_cancel_in_the_mean_are_found_token_by_token() -> None:
    wanted = Manifest(5, "", "right", (1, 2, 3), (-1.0, -1.0))
    verdict = ProofJudge(tolerance=0.1).judge("a", wanted, Proof(5, None, (-2.0, 0.0)))
    assert verdict.refused and verdict.gap == 0.0


def test_another_adapter_under_a_known_name_is_refused_and_an_engine_that_was_started_anew_begins_again() -> None:
    judge, world = ProofJudge(tolerance=0.5), World(3, step=0.1, noise=1e-3, bias=1e-3)
    wanted = replace(manifest(3, world.trainer), adapter="alice")
    assert not judge.judge("a", wanted, told(3, world.see(world.trainer))).refused
    world.move()
    other = told(3, world.see(world.trainer))
    assert "a part is not this version's" in judge.judge("a", wanted, other).reason
    assert not judge.judge("a", replace(wanted, adapter="bob"), other).refused  # nothing is known of it there
    for forget in (lambda: judge.forget("a"), lambda: judge.forget_adapter("alice")):
        assert judge.judge("a", wanted, other).refused
        forget()
        assert judge.judge("a", wanted, told(3, world.see(np.array(wanted.canary_logprobs)))).outcome is Outcome.UNSURE


def test_an_adapter_of_which_only_the_mean_is_known_is_judged_by_that() -> None:
    wanted = Manifest(5, "", "right", (1, 2, 3), (-1.0,))
    assert ProofJudge(tolerance=1e-3).judge("a", wanted, Proof(5, None, (-0.5, -1.5))).outcome is Outcome.UNSURE
    assert ProofJudge(tolerance=1e-3).judge("a", wanted, Proof(5, None, (-0.5, -1.4))).refused


def test_the_tolerance_is_the_number_formats_where_none_is_set() -> None:
    forms = ("float32", "bfloat16", "int8", "fp8", "int4", "nf4")
    assert [ProofJudge.of(0.0, form).tolerance for form in forms] == list(TOLERANCES.values())
    assert ProofJudge.of(0.0, "float32", "none", "nf4").tolerance == TOLERANCES["nf4"], "the coarsest counts"
    assert ProofJudge.of(0.3, "float32").tolerance == 0.3


@pytest.fixture(scope="module")
def drills() -> dict[tuple[str, float], dict[str, Drill]]:
    """`tests/proof_drills.py` plays 400 publishes of each."""
    return {(dtype, lr): play(dtype, lr, 30) for dtype, lr in (("float32", 1e-6), ("bfloat16", 1e-6), ("bfloat16", 1e-4))}


@pytest.mark.parametrize(("dtype", "lr"), [pytest.param("float32", 1e-6, marks=pytest.mark.drill), ("bfloat16", 1e-6), ("bfloat16", 1e-4)])
def test_a_right_engine_in_another_number_format_serves_every_version(drills, dtype: str, lr: float) -> None:
    assert drills[dtype, lr][""].count(Outcome.REFUSED) == 0


@pytest.mark.parametrize(("dtype", "lr", "fault", "within"), [
    ("float32", 1e-6, "stale", 1), ("float32", 1e-6, "half loaded", 10), ("float32", 1e-6, "one layer stale", 10),
    ("float32", 1e-6, "one layer wrong", 1), ("float32", 1e-6, "tied head stale", 20),
    ("bfloat16", 1e-6, "one layer wrong", 1), ("bfloat16", 1e-4, "one layer wrong", 1), ("bfloat16", 1e-4, "stale", 10),
])
def test_a_wrong_engine_is_caught_within_so_many_versions(drills, dtype: str, lr: float, fault: str, within: int) -> None:
    verdicts = drills[dtype, lr][fault].verdicts
    assert verdicts[-1].refused and len(verdicts) - 1 - FAULTY_FROM <= within


def test_where_the_noise_hides_a_stale_engine_it_is_called_inconclusive(drills) -> None:
    assert drills["bfloat16", 1e-6]["stale"].count(Outcome.UNSURE) == 30


def test_what_engines_report_at_placeholders_of_images_is_not_compared() -> None:
    wanted = Manifest(1, "", "right", (5, FIRST_ID, FIRST_ID, 7), (-1.0, -1.0, -2.0))
    judge = ProofJudge(tolerance=1e-3)
    assert judge.judge("engine 0", wanted, Proof(1, "right", (-9.0, -8.0, -2.0))).gap == 0.0
    assert judge.judge("engine 0", wanted, Proof(1, "right", (-9.0, -8.0, -2.0))).outcome is Outcome.PROVEN
    assert judge.judge("engine 0", wanted, Proof(1, "right", (-1.0, -1.0, -2.5))).refused
