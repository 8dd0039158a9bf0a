"""Ranks that train tenants: two give what one gives; one that fails is named. See also `test_tenants.py`."""

import asyncio
from pathlib import Path

import numpy as np
import pytest

from datum_samples import make_datums
from offbeat.algorithms.adam import AdamParams
from offbeat.cluster.local import LocalLauncher
from offbeat.cluster.tenant_group import TenantGroup
from offbeat.config.algorithms import AlgorithmConfig
from offbeat.dist.faults import VARIABLE
from offbeat.errors import ConfigError, RunError
from offbeat.model.peft_io import read_adapter
from small_run import small_config
from train_samples import make_batch

MODULES = ("attn", "mlp")
TENANTS = ("alice", "bob", "alice", "bob", "bob", "alice")


async def train(num_ranks: int, folder: Path, model: str) -> tuple[dict, np.ndarray, np.ndarray, dict]:
    config = small_config(folder, model, model__lora__rank="4", train__num_ranks=str(num_ranks))
    async with LocalLauncher(stop_timeout_s=5) as launcher:
        group = await TenantGroup.start(launcher, config, model=model, build=None, log_dir=folder)
        for seed, name in enumerate(("alice", "bob")):
            await group.add(name, rank=4, alpha=8.0, seed=seed, modules=MODULES)
        batch = make_batch(6, 1)
        metrics, logprobs = {}, batch.rollout_logprobs
        for _ in range(2):
            passed = await group.learn(batch, TENANTS, objective="sft", algorithm=AlgorithmConfig())
            metrics, logprobs = passed.metrics, passed.logprobs
            norms = await group.update(dict.fromkeys(("alice", "bob"), AdamParams(lr=1e-2, eps=1e-5)))
        with pytest.raises(ConfigError, match="carol"):
            await group.learn(batch, (*TENANTS[:-1], "carol"), objective="sft", algorithm=AlgorithmConfig())
        scores = await group.score(batch, TENANTS)
        assert np.all(scores[~batch.loss_mask] == 0) and np.all(scores[batch.loss_mask] < 0)
        manifest = await group.publish("alice", 3, folder / "alice", canary=(5, 6, 7))
        assert manifest.name == "alice@3" and manifest.fingerprint == read_adapter(folder / "alice").fingerprint()
        again = await group.update(dict.fromkeys(("alice", "bob"), AdamParams(lr=1e-2)))
        assert again == {"alice": 0.0, "bob": 0.0}  # what the failed pass had added is gone
        assert group.steps == {"alice": 3, "bob": 3}
        datums = make_datums(12, seed=1)
        passed = await group.run_datums(datums, TENANTS * 2, learn=True)
        with pytest.raises(ConfigError, match="carol"):
            await group.run_datums(datums, (*TENANTS, *TENANTS[:-1], "carol"), learn=False)
        norms |= {f"{name} by datums": norm for name, norm in (await group.update({"alice": AdamParams(lr=1e-2)})).items()}
        await group.discard(["bob"])
        assert (await group.update({"bob": AdamParams(lr=1e-2)}))["bob"] == 0.0
        return metrics, logprobs, scores, norms, passed


def test_two_ranks_train_tenants_as_one_does(tmp_path: Path, model_dir: str) -> None:
    async def main() -> list:
        folders = [tmp_path / "one", tmp_path / "two"]
        for folder in folders:
            folder.mkdir()
        return await asyncio.gather(*(train(n, folder, model_dir) for n, folder in zip((1, 2), folders, strict=True)))

    (metrics, logprobs, scores, norms, passed), (metrics_2, logprobs_2, scores_2, norms_2, passed_2) = asyncio.run(main())
    np.testing.assert_allclose(passed_2.logprobs, passed.logprobs, atol=1e-4)
    np.testing.assert_allclose(passed_2.losses, passed.losses, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(logprobs_2, logprobs, atol=1e-4)
    np.testing.assert_allclose(scores_2, scores, atol=1e-4)
    assert norms_2 == pytest.approx(norms, rel=1e-3) and len(norms) == 3
    for name in ("alice", "bob"):
        assert metrics_2[name] == pytest.approx(metrics[name], rel=1e-4, abs=1e-6)
        assert metrics[name]["train/tokens"] > 0


@pytest.mark.parametrize(("point", "kind", "sentence"), [
    ("optim_step", "exception", r"rank 1 failed in update: RuntimeError: injected at 'optim_step'"),
    ("optim_step", "slow", r"'optim_step' timed out after 3 s with 1 of 2 ranks there: rank 1 is slow, for .* in phase 'injected delay'"),
    ("optim_step_gradients", "kill", r"rank 1 \(process \d+\) was killed by SIGKILL in update"),
], ids=["exception", "slow", "kill"])
def test_a_rank_that_misbehaves_in_a_step_is_named(
    point: str, kind: str, sentence: str, tmp_path: Path, model_dir: str, monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(VARIABLE, f"rank=1,point={point},kind={kind}")
    config = small_config(
        tmp_path, model_dir, model__lora__rank="4", train__num_ranks="2", dist__sync_timeout_s="3", dist__answer_timeout_s="10")

    async def main() -> None:
        async with LocalLauncher(stop_timeout_s=1) as launcher:
            group = await TenantGroup.start(launcher, config, model=model_dir, build=None, log_dir=tmp_path)
            await group.add("alice", rank=4, alpha=8.0, seed=0, modules=MODULES)
            with pytest.raises(RunError, match=sentence):
                await group.update({"alice": AdamParams(lr=1e-2)})

    asyncio.run(main())
