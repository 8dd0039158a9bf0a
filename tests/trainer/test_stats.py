"""How the minibatches of a step become its report."""

import math
import subprocess
import sys

import pytest

from offbeat.telemetry.tracker import StatsPart
from offbeat.trainer.stats import Update, merge


def update(loss=0.5, tokens=10.0, entropy=20.0, gap=0.1, grad_norm=1.0):
    return Update(
        StatsPart(
            sums={"train/loss": loss, "train/tokens": tokens}, means={"train/entropy": (entropy, tokens)},
            maxima={"policy/logprob_gap_max": gap}),
        grad_norm)


def test_losses_add_up_and_means_weigh_every_token_alike():
    metrics = merge([update(), update(loss=1.0, tokens=30.0, entropy=20.0, gap=0.3, grad_norm=3.0)], lr=0.01)
    assert metrics == pytest.approx({
        "train/loss": 1.5, "train/tokens": 40.0, "train/entropy": 1.0, "policy/logprob_gap_max": 0.3,
        "train/grad_norm": 2.0, "train/lr": 0.01, "train/skipped_steps": 0.0})


@pytest.mark.parametrize("bad", [{"loss": math.nan}, {"loss": math.inf}, {"grad_norm": math.nan}, {"tokens": 0.0}])
def test_what_must_not_update_the_weights_is_counted(bad):
    assert update().is_sound
    assert not update(**bad).is_sound
    assert merge([update(), update(**bad)], lr=0.01)["train/skipped_steps"] == 1.0


def test_the_effective_sample_size_is_that_of_all_minibatches_together():
    def weighing(*weights):
        sums = {"policy/weight_mean": sum(weights), "policy/weight_square_mean": sum(weight**2 for weight in weights)}
        part = StatsPart({"train/loss": 0.0, "train/tokens": float(len(weights))}, {name: (x, len(weights)) for name, x in sums.items()})
        return Update(part, 1.0)

    metrics = merge([weighing(1.0, 0.0), weighing(2.0)], lr=0.01)
    assert metrics["policy/weight_ess"] == pytest.approx((1 + 0 + 2) ** 2 / (3 * (1 + 0 + 4)))
    assert metrics["policy/weight_mean"] == 1.0 and "policy/weight_square_mean" not in metrics
    assert merge([weighing(0.0)], lr=0.01)["policy/weight_ess"] == merge([weighing()], lr=0.01)["policy/weight_ess"] == 0.0


def test_no_tokens_give_means_and_maxima_of_zero():
    metrics = merge([update(tokens=0.0, entropy=0.0, gap=-math.inf)], lr=0.01)
    assert metrics["train/entropy"] == metrics["policy/logprob_gap_max"] == 0.0


def test_the_report_can_be_read_without_torch():
    code = "import sys, offbeat.trainer.stats; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
