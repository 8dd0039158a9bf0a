"""Real ranks: two train as one does, one policy or many adapters, however the batch is spread over them; one that fails is named."""

import asyncio
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from datum_samples import make_datums, of_adapters
from offbeat.algorithms.adam import AdamParams
from offbeat.config.root import Config
from offbeat.errors import ConfigError, RunError, StorageError, StuckError, SyncTimeout, WorkerError
from offbeat.model.hf_io import read_safetensors
from offbeat.model.peft_io import read_adapter
from offbeat.ranks.ranks import WorkerRanks
from offbeat.ranks.trainers import OnSpan, Trainers
from offbeat.sync.faults import VARIABLE
from offbeat.trainer.messages import NewAdapter, Scores, TargetScores, Trained, Trainee
from offbeat.workers.local import LocalLauncher
from small_run import small_config
from train_samples import imitated, make_batch


def config_of(tmp_path: Path, model: str = "", **changes: str) -> Config:
    return small_config(tmp_path, model, train__max_tokens_per_microbatch="64", train__optimizer__lr="1e-2", **changes)


async def start(
    launcher: LocalLauncher, config: Config, folder: Path, model: str, *, trains: Trainee = "policy", on_span: OnSpan = lambda *_: None,
) -> Trainers:
    ranks = await WorkerRanks.start(launcher, config.for_ranks, model=model, build=None, log_dir=folder, trains=trains)
    return Trainers(ranks, config.for_ranks, on_span=on_span)


@dataclass(frozen=True)
class Outcome:
    """What two steps came to, and what was seen of them."""

    stats: list[dict[str, float]]
    scores: TargetScores
    weights: dict[str, np.ndarray]
    spans: list[tuple]


async def two_steps(config: Config, folder: Path, model: str) -> Outcome:
    spans: list[tuple] = []
    async with LocalLauncher(stop_timeout_s=5) as launcher:
        group = await start(launcher, config, folder, model, on_span=lambda *span: spans.append(span))
        await group.restart_optimizer(config.train.optimizer, total_steps=10)
        stats = [await group.train_step(make_batch(5, 3, seed=step)) for step in range(2)]
        stats.append(await group.train_step(make_batch(1, 1).select([])))
        batch = make_batch(5, 3, seed=8)
        scores = await group.score(batch, with_entropy=True)
        np.testing.assert_allclose(scores.columns["logprobs"], (await group.forward(batch)).logprobs, atol=1e-5)
        with pytest.raises(ConfigError, match="there is no reference policy here"):
            await group.score(batch, of="reference")
        manifest = await group.write_weights(7, folder / "v7", canary=(3, 4, 5))
        assert (manifest.version, manifest.folder, manifest.canary) == (7, str(folder / "v7"), (3, 4, 5))
        assert len(manifest.fingerprint) == 32 and max(manifest.canary_logprobs) < 0
        await group.save(folder / "checkpoint")
        await group.train_step(make_batch(5, 3, seed=5))
        await group.load(folder / "checkpoint")
        again = await group.write_weights(8, folder / "v8", canary=(3, 4, 5))
        assert (again.fingerprint, again.canary_logprobs) == (manifest.fingerprint, manifest.canary_logprobs)
        with pytest.raises(StorageError, match="find no checkpoint"):
            await group.load(folder / "nothing")
        stats.append(await group.train_step(make_batch(5, 3, seed=6)))  # a failed load leaves all ranks in step
    return Outcome(stats, scores, {name: tensor.numpy() for name, tensor in read_safetensors(folder / "v7")}, spans)


@pytest.mark.drill
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

    one, two, dealt = asyncio.run(main())
    for name in ("train/loss", "train/grad_norm", "train/tokens"):
        for other in (two, dealt):
            assert [s[name] for s in other.stats] == pytest.approx([s[name] for s in one.stats], abs=1e-5)
    assert all(s["balance/predicted_gain"] > 0.999 and s["balance/lost_s"] >= 0.0 for s in two.stats)
    assert all(s["balance/predicted_gain"] == pytest.approx(1.0) for s in dealt.stats)
    assert all(0 < s["train/busy_share"] <= 1.1 and s["train/peak_memory_bytes"] > 2**20 and "train/mfu" not in s for s in two.stats)
    assert two.stats[0]["train/tokens_per_s_per_device"] > 0 == two.stats[2]["train/tokens_per_s_per_device"]
    assert one.stats[0]["train/grad_norm"] > 0 and one.stats[2]["train/tokens"] == 0
    for other in (two, dealt):
        assert list(one.scores.columns) == ["logprobs", "entropy"]
        for name, values in one.scores.columns.items():
            np.testing.assert_allclose(other.scores.columns[name], values, atol=1e-4)
    for name, weight in one.weights.items():
        np.testing.assert_allclose(two.weights[name], weight, atol=1e-5)
    assert {track for _, track, _, _ in two.spans} == {"rank 0", "rank 1"}
    assert all(what in ("train_step", "score") and start <= end for what, _, start, end in two.spans)


@dataclass
class Spreading:
    """Ranks that spread and answer at once, and remember what they were asked to spread."""

    spreads_ahead: bool = True
    asked: list[tuple[int, float, int, bool]] = field(default_factory=list)
    trained: list[list[str]] = field(default_factory=list)
    num_called = 1

    async def spread(self, batch, params, *, num_minibatches, seed, ahead=False):
        self.asked.append((len(batch), params.lr, seed, ahead))
        await asyncio.sleep(0)
        return [f"{len(batch)} of {seed}"]

    async def call(self, method, requests, reply, *, timeout_s):
        if method == "train_step":
            self.trained.append(requests)
        return [Trained({}, 0.0, 1.0, 1.0)]

    def observe(self, busy_s):
        return {}


@pytest.mark.parametrize("can", [True, False])
def test_a_step_that_was_prepared_is_spread_as_it_would_be_and_only_once(tmp_path: Path, can: bool) -> None:
    config = small_config(tmp_path, run__seed="7", train__optimizer__warmup_steps="4", train__optimizer__lr="1.0")
    batches = [make_batch(n, 2) for n in (1, 2, 3)]

    async def steps(prepares: bool) -> Spreading:
        ranks = Spreading(can)
        trainers = Trainers(ranks, config.for_ranks)  # pyright: ignore[reportArgumentType]
        for batch, following in zip(batches, [*batches[1:], None], strict=True):
            step = asyncio.create_task(trainers.train_step(batch, num_minibatches=2))
            if prepares and following is not None:
                await asyncio.sleep(0)
                await trainers.spread_ahead(following, num_minibatches=2)
            await step
        return ranks

    plain, prepared = asyncio.run(steps(False)), asyncio.run(steps(True))
    assert prepared.trained == plain.trained == [["2 of 7"], ["4 of 8"], ["6 of 9"]]
    assert [asked[:3] for asked in prepared.asked] == [asked[:3] for asked in plain.asked]
    assert [asked[3] for asked in prepared.asked] == [False, can, can]


def test_what_was_prepared_and_is_not_trained_on_is_forgotten(tmp_path: Path) -> None:
    async def main() -> Spreading:
        ranks = Spreading()
        trainers = Trainers(ranks, small_config(tmp_path).for_ranks)  # pyright: ignore[reportArgumentType]
        await trainers.spread_ahead(make_batch(1, 2))
        await trainers.train_step(make_batch(2, 2))
        await trainers.spread_ahead(make_batch(1, 2))
        await trainers.restart_optimizer(small_config(tmp_path).train.optimizer, total_steps=4)
        await trainers.train_step(make_batch(3, 2))
        return ranks

    assert [requests[0][0] for requests in asyncio.run(main()).trained] == ["4", "6"]


@pytest.mark.parametrize("point", ["join", pytest.param("save_recover", marks=pytest.mark.drill)])
def test_a_rank_that_fails_is_named_and_its_peers_hear_of_it_at_once(
    point: str, tmp_path: Path, model_dir: str, monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        async with LocalLauncher(stop_timeout_s=5) as launcher:
            group = await start(launcher, config, tmp_path, model_dir)
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
    pytest.param(
        0, "point=forward,kind=stop", r"rank 0 is stopped by a signal \(SIGSTOP or a debugger\)", marks=pytest.mark.drill),
    pytest.param(
        0, "point=write_weights,kind=hang", r"^rank 0 hangs in 'write_weights' \(write_weights\): for \d+\.\d s it ",
        marks=pytest.mark.drill),
])
def test_a_rank_that_hangs_or_is_stopped_inside_a_region_is_named_and_no_victim(
    rank: int, fault: str, text: str, tmp_path: Path, model_dir: str, monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The others sit in a collective of torch's meanwhile, or have answered."""
    seconds = 0.0

    async def main() -> None:
        nonlocal seconds
        async with LocalLauncher(stop_timeout_s=5) as launcher:
            group = await start(launcher, config, tmp_path, model_dir)
            started = time.monotonic()
            try:
                await group.train_step(make_batch(5, 3))
                await group.write_weights(1, tmp_path / "v1", canary=(3, 4))
            finally:
                seconds = time.monotonic() - started

    config = config_of(tmp_path, model_dir, train__num_ranks="2", dist__sync_timeout_s="3", dist__answer_timeout_s="10")
    monkeypatch.setenv("OFFBEAT_FAULT", f"rank={rank},{fault}")
    # Rank 0 hosts the store: stopped soon enough, it keeps the other at the point before the region.
    with pytest.raises((StuckError, SyncTimeout), match=text) as caught:
        asyncio.run(main())
    assert f"rank {1 - rank} " not in str(caught.value).partition("\n")[0]
    assert seconds < 100


# -- many adapters -------------------------------------------------------------------------------------------------------------------------

NAMES = ("alice", "bob", "alice", "bob", "bob", "alice")
BOTH = ("alice", "bob")


async def add(group: Trainers, *names: str) -> None:
    for seed, name in enumerate(names):
        await group.add(NewAdapter(name, 4, 8.0, seed, ("attn", "mlp")))


async def train(num_ranks: int, folder: Path, model: str) -> tuple[Scores, Scores, dict[str, float], Scores]:
    config = small_config(folder, model, model__lora__rank="4", train__num_ranks=str(num_ranks))
    async with LocalLauncher(stop_timeout_s=5) as launcher:
        group = await start(launcher, config, folder, model, trains="adapters")
        await add(group, *BOTH)
        batch = of_adapters(imitated(make_batch(6, 1)), NAMES)
        for _ in range(2):
            learnt = await group.forward_backward(batch)
            norms = await group.optim_step(dict.fromkeys(BOTH, AdamParams(lr=1e-2, eps=1e-5)))
        with pytest.raises(ConfigError, match="carol"):
            await group.forward_backward(of_adapters(batch, (*NAMES[:-1], "carol")))
        scores = await group.forward(batch)
        assert scores.logprobs.shape == (batch.num_targets,) and np.all(scores.logprobs < 0) and scores.losses.shape == (6,)
        manifest = await group.write_adapter("alice", 3, folder / "alice", canary=(5, 6, 7))
        assert manifest.name == "alice@3" and manifest.fingerprint == read_adapter(folder / "alice").fingerprint()
        assert manifest.num_bytes > 0 and len(manifest.canary_logprobs) == 2
        again = await group.optim_step(dict.fromkeys(BOTH, AdamParams(lr=1e-2)))
        assert again == {"alice": 0.0, "bob": 0.0}  # what the failed pass had added is gone
        assert group.steps == {"alice": 3, "bob": 3}
        datums = make_datums(12, seed=1)
        passed = await group.forward_backward(of_adapters(datums, NAMES * 2))
        with pytest.raises(ConfigError, match="carol"):
            await group.forward(of_adapters(datums, (*NAMES, *NAMES[:-1], "carol")))
        norms |= {f"{name} by datums": norm for name, norm in (await group.optim_step({"alice": AdamParams(lr=1e-2)})).items()}
        await group.discard(["bob"])
        assert (await group.optim_step({"bob": AdamParams(lr=1e-2)}))["bob"] == 0.0
        await group.save_adapter("alice", folder / "saved")
        await group.restore_adapter("carol", folder / "saved", optimizer=True)
        await group.remove("alice")
        assert group.steps == {"bob": 4, "carol": 4} and len(await group.score_base((5, 6, 7))) == 2
        return learnt, scores, norms, passed


@pytest.mark.drill
def test_two_ranks_train_adapters_as_one_does(tmp_path: Path, model_dir: str) -> None:
    async def main() -> list:
        folders = [tmp_path / "one", tmp_path / "two"]
        for folder in folders:
            folder.mkdir()
        return await asyncio.gather(*(train(n, folder, model_dir) for n, folder in zip((1, 2), folders, strict=True)))

    (*scores, norms, passed), (*scores_2, norms_2, passed_2) = asyncio.run(main())
    for mine, theirs in zip((*scores, passed), (*scores_2, passed_2), strict=True):
        np.testing.assert_allclose(theirs.logprobs, mine.logprobs, atol=1e-4)
        np.testing.assert_allclose(theirs.losses, mine.losses, rtol=1e-3, atol=1e-4)
    assert norms_2 == pytest.approx(norms, rel=1e-3) and len(norms) == 3


@pytest.mark.drill
@pytest.mark.parametrize(("point", "kind", "sentence"), [
    ("optim_step", "exception", r"rank 1 failed in optim_step: RuntimeError: injected at 'optim_step'"),
    ("optim_step", "slow", r"'optim_step' timed out after 3 s with 1 of 2 ranks there: rank 1 is slow, for .* in phase 'injected delay'"),
    ("optim_step_gradients", "kill", r"rank 1 \(process \d+\) was killed by SIGKILL in optim_step"),
], ids=["exception", "slow", "kill"])
def test_a_rank_that_misbehaves_in_a_step_is_named(
    point: str, kind: str, sentence: str, tmp_path: Path, model_dir: str, monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(VARIABLE, f"rank=1,point={point},kind={kind}")
    config = small_config(
        tmp_path, model_dir, model__lora__rank="4", train__num_ranks="2", dist__sync_timeout_s="3", dist__answer_timeout_s="10")

    async def main() -> None:
        async with LocalLauncher(stop_timeout_s=1) as launcher:
            group = await start(launcher, config, tmp_path, model_dir, trains="adapters")
            await add(group, "alice")
            with pytest.raises(RunError, match=sentence):
                await group.optim_step({"alice": AdamParams(lr=1e-2)})

    asyncio.run(main())
