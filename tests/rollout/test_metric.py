"""Metrics of the user's own, in real processes."""

import asyncio
from pathlib import Path

import psutil
import pytest

from evaluation.played import played
from offbeat.errors import CodeError
from offbeat.rollout.metric import Metric, check_metrics
from offbeat.user_code.given import give, withdraw
from small_run import small_config

METRICS = Path(__file__).parents[1] / "support" / "metrics.py"
ANSWERED = played([[1.0, None], [0.5, 1.0], []], num_samples=2)


def metric(name: str, *, timeout_s: float = 60.0) -> Metric:
    return Metric(f"{METRICS}:{name}", timeout_s=timeout_s, log_dir=None)


def test_all_answers_go_to_a_process_and_numbers_come_back_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", "secret")

    async def main() -> list[dict[str, float]]:
        return [await metric(name).measure(ANSWERED) for name in ("mean_length", "several", "secret")]

    assert asyncio.run(main()) == [{"mean_length": 8.0}, {"right": 2.0, "failed@1": 1.0}, {"seen": 0.0}]


def test_a_function_that_was_given_as_an_object_is_sent_to_the_process() -> None:
    weight = 2.0
    name = give(lambda samples: {"weighted": weight * len(samples)}, kind="evaluate.metric")
    try:
        sent = Metric(name, timeout_s=60.0, log_dir=None)
        asyncio.run(sent.check())
        assert asyncio.run(sent.measure(ANSWERED)) == {"weighted": 2.0 * len(ANSWERED.samples)}
    finally:
        withdraw([name])


@pytest.mark.parametrize(("name", "why"), [
    ("raises", "raised ValueError: no such thing"), ("exits", "raised SystemExit: 3"), ("dies", "ended its process")])
def test_what_fails_says_why_and_leaves_no_process(name: str, why: str) -> None:
    with pytest.raises(CodeError, match=why):
        asyncio.run(metric(name).measure(ANSWERED))
    assert not [child for child in psutil.Process().children() if "metric_worker" in " ".join(child.cmdline())]


def test_what_hangs_is_ended_at_its_deadline() -> None:
    with pytest.raises(CodeError, match=r"did not answer within evaluate\.metric_timeout_s = 3 s; make it faster or raise the limit"):
        asyncio.run(metric("hangs", timeout_s=3.0).measure(ANSWERED))


def test_a_wrong_name_is_found_before_anything_is_evaluated(tmp_path: Path) -> None:
    config = small_config(tmp_path, evaluate__metric=f"{METRICS}:mean_lenght")
    with pytest.raises(CodeError, match="did you mean 'mean_length'"):
        asyncio.run(check_metrics([(config.evaluate, config.rollout)], log_dir=tmp_path))
    config = small_config(tmp_path)
    assert Metric.of(config.evaluate, config.rollout, log_dir=tmp_path) is None
