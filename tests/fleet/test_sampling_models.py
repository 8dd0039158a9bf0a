"""Models that are only sampled, on engines that somebody else has started."""

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

import pytest

from offbeat.engine.options import EngineOptions
from offbeat.engine.server import EngineServer
from offbeat.errors import ConfigError, EngineError
from offbeat.fleet.members import State
from offbeat.fleet.sampling_models import SamplingModel, open_sampling_models
from offbeat.inference.sampling import Sampling
from offbeat.telemetry.record import SilentRecord
from small_run import small_config
from waiting import until

PROMPT = (13, 14, 15)


def with_teachers(tmp_path: Path, body: Callable[[Mapping[str, SamplingModel]], Awaitable[None]], *entries: str) -> None:
    """A test's body, given the models."""
    listed = ", ".join(f'"{entry}"' for entry in entries)
    config = small_config(tmp_path, serve__sampling_models=f"[{listed}]", inference__probe_interval_s="0.1")

    async def main() -> None:
        async with open_sampling_models(config, SilentRecord(tmp_path)) as models:
            await body(models)

    asyncio.run(main())


def test_a_teacher_is_sampled_and_scored_by_what_its_own_engine_serves(model_dir: str, tmp_path: Path) -> None:
    server = EngineServer(EngineOptions(model=model_dir, max_context=40))

    async def body(models: Mapping[str, SamplingModel]) -> None:
        teacher = models["org/teacher"]
        assert list(models) == ["org/teacher"] and teacher.context == 40 and teacher.end_token_ids == ()
        first, second = await teacher.sample("", PROMPT, Sampling(5, seed=1, ignore_eos=True), 2, "session")
        assert len(first.token_ids) == len(second.token_ids) == 5
        tokens = (*PROMPT, *first.token_ids)
        score = await teacher.score("", tokens, 2, None)
        assert math.isnan(score.logprobs[0]) and score.logprobs[len(PROMPT):] == pytest.approx(first.logprobs, abs=1e-5)
        assert [len(row) for row in score.top] == [0] + [2] * (len(tokens) - 1) and teacher.dispatcher.generated_tokens == 10

    url = server.start()
    try:
        with_teachers(tmp_path, body, f"org/teacher={url}", f"org/teacher={url}/")
    finally:
        server.stop()


def test_a_teacher_that_failed_returns_by_itself_and_one_that_is_gone_fails_its_requests_soon(
        model_dir: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offbeat.fleet.sampling_models._PATIENCE_S", 0.5)
    server = EngineServer(EngineOptions(model=model_dir))

    async def body(models: Mapping[str, SamplingModel]) -> None:
        pool = models["teacher"].dispatcher.pool
        pool.quarantine("teacher 0", "its probe was late")
        await until(lambda: pool.states["teacher 0"] is State.SERVING)
        assert len(await models["teacher"].sample("", PROMPT, Sampling(2), 1, "")) == 1
        await asyncio.to_thread(server.stop)
        async with asyncio.timeout(20):
            with pytest.raises(EngineError):
                await models["teacher"].sample("", PROMPT, Sampling(2), 1, "")

    with_teachers(tmp_path, body, f"teacher={server.start()}")


def test_an_engine_that_is_not_there_is_named_with_its_url(tmp_path: Path) -> None:
    async def body(_: Mapping[str, SamplingModel]) -> None:
        raise AssertionError("not reached")

    with pytest.raises(ConfigError, match=r"serve\.sampling_models names http://127\.0\.0\.1:9, but teacher 0 .* cannot be reached"):
        with_teachers(tmp_path, body, "teacher=http://127.0.0.1:9")


def test_no_teachers_are_no_work(tmp_path: Path) -> None:
    async def body(models: Mapping[str, SamplingModel]) -> None:
        assert models == {}

    with_teachers(tmp_path, body)
