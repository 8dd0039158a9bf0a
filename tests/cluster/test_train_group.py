"""Real ranks: two train as one does, however the batch is spread over them."""

import asyncio
import time
from pathlib import Path

import numpy as np
import pytest

from offbeat.cluster.local import LocalLauncher
from offbeat.cluster.messages import Objective
from offbeat.cluster.train_group import TrainGroup
from offbeat.config.root import Config
from offbeat.errors import StorageError, StuckError, SyncTimeout, WorkerError
from offbeat.model.hf_io import read_safetensors
from small_run import small_config
from train_samples import make_batch


def config_of(tmp_path: Path, model: str = "", **changes: str) -> Config:
    return small_config(tmp_path, model, train__max_tokens_per_microbatch="64", train__optimizer__lr="1e-2", **changes)


async def two_steps(config: Config, folder: Path, model: str) -> tuple[list[dict[str, float]], dict[str, np.ndarray], list[tuple]]:
    spans: list[tuple] = []
    async with LocalLauncher(stop_timeout_s=5) as launcher:
        group = await TrainGroup.start(
            launcher, config, model=model, build=None, log_dir=folder, on_span=lambda *span: spans.append(span))
        await group.set_objective(Objective("ppo", 10))
        stats = [await group.train_step(make_batch(5, 3, seed=step)) for step in range(2)]
        stats.append(await group.train_step(make_batch(1, 1).select([])))
        manifest = await group.publish(7, folder / "v7", canary=(3, 4, 5))
        assert (manifest.version, manifest.folder, manifest.canary) == (7, str(folder / "v7"), (3, 4, 5))
        assert len(manifest.fingerprint) == 32 and max(manifest.canary_logprobs) < 0
        await group.save(folder / "checkpoint")
        await group.train_step(make_batch(5, 3, seed=5))
        await group.load(folder / "checkpoint")
        again = await group.publish(8, folder / "v8", canary=(3, 4, 5))
        assert (again.fingerprint, again.canary_logprobs) == (manifest.fingerprint, manifest.canary_logprobs)
        with pytest.raises(StorageError, match="find no checkpoint"):
            await group.load(folder / "nothing")
        stats.append(await group.train_step(make_batch(5, 3, seed=6)))  # a failed load leaves all ranks in step
    return stats, {name: tensor.numpy() for name, tensor in read_safetensors(folder / "v7")}, spans


def test_two_ranks_train_as_one_does(tmp_path: Path, model_dir: str) -> None:
    async def main() -> list:
        folders = [tmp_path / "one", tmp_path / "two", tmp_path / "dealt"]
        for folder in folders:
            folder.mkdir()
        # AdamW divides a gradient that is mere rounding by its own size; a larger epsilon leaves the comparison to real gradients.
        configs = [
            config_of(tmp_path, model_dir, train__num_ranks=n, train__optimizer__eps="1e-5", rollout__balance_batch=balance)
            for n, balance in (("1", "true"), ("2", "true"), ("2", "false"))]
        return await asyncio.gather(*(two_steps(c, f, model_dir) for c, f in zip(configs, folders, strict=True)))

    (one, weights_one, _), (two, weights_two, spans), (dealt, _, _) = asyncio.run(main())
    for name in ("train/loss", "train/grad_norm", "train/tokens"):
        for other in (two, dealt):
            assert [s[name] for s in other] == pytest.approx([s[name] for s in one], abs=1e-5)
    assert all(s["balance/predicted_gain"] > 0.999 and s["balance/lost_s"] >= 0.0 for s in two)
    assert all(s["balance/predicted_gain"] == pytest.approx(1.0) for s in dealt)
    assert one[0]["train/grad_norm"] > 0 and one[2]["train/tokens"] == 0
    for name, weight in weights_one.items():
        np.testing.assert_allclose(weights_two[name], weight, atol=1e-5)
    assert {track for _, track, _, _ in spans} == {"rank 0", "rank 1"}
    assert all(what == "train_step" and start <= end for what, _, start, end in spans)


@pytest.mark.parametrize("point", ["join", "save_recover"])
def test_a_rank_that_fails_is_named_and_its_peers_hear_of_it_at_once(
    point: str, tmp_path: Path, model_dir: str, monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        async with LocalLauncher(stop_timeout_s=5) as launcher:
            group = await TrainGroup.start(
                launcher, config, model=model_dir, build=None, log_dir=tmp_path, on_span=lambda *span: None)
            await group.save(tmp_path / "checkpoint")

    config = config_of(tmp_path, model_dir, train__num_ranks="2", dist__init_timeout_s="200", dist__sync_timeout_s="200")
    monkeypatch.setenv("OFFBEAT_FAULT", f"rank=1,point={point},kind=exception")
    started = time.monotonic()
    with pytest.raises(WorkerError, match=rf"^rank 1 failed in {'join' if point == 'join' else 'save'}: RuntimeError") as caught:
        asyncio.run(main())
    assert time.monotonic() - started < 150
    if point == "save_recover":
        assert caught.value.__notes__[-1].startswith("rank 0: sync point 'save_recover' cannot be passed: rank 1 failed")


@pytest.mark.parametrize(("rank", "fault", "text"), [
    (1, "point=backward,kind=hang", r"^rank 1 hangs in 'train_step' \(backward\): for \d+\.\d s it .* in strike: time\.sleep"),
    (0, "point=forward,kind=stop", r"rank 0 is stopped by a signal \(SIGSTOP or a debugger\)"),
    (0, "point=write_weights,kind=hang", r"^rank 0 hangs in 'publish' \(write_weights\): for \d+\.\d s it "),
])
def test_a_rank_that_hangs_or_is_stopped_inside_a_region_is_named_and_no_victim(
    rank: int, fault: str, text: str, tmp_path: Path, model_dir: str, monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The others sit in a collective of torch's meanwhile, or have answered."""
    seconds = 0.0

    async def main() -> None:
        nonlocal seconds
        async with LocalLauncher(stop_timeout_s=5) as launcher:
            group = await TrainGroup.start(
                launcher, config, model=model_dir, build=None, log_dir=tmp_path, on_span=lambda *span: None)
            started = time.monotonic()
            try:
                await group.train_step(make_batch(5, 3))
                await group.publish(1, tmp_path / "v1", canary=(3, 4))
            finally:
                seconds = time.monotonic() - started

    config = config_of(tmp_path, model_dir, train__num_ranks="2", dist__sync_timeout_s="3", dist__answer_timeout_s="10")
    monkeypatch.setenv("OFFBEAT_FAULT", f"rank={rank},{fault}")
    # Rank 0 hosts the store: stopped soon enough, it keeps the other at the point before the region.
    with pytest.raises((StuckError, SyncTimeout), match=text) as caught:
        asyncio.run(main())
    assert f"rank {1 - rank} " not in str(caught.value).partition("\n")[0]
    assert seconds < 100
