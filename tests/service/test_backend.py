"""The backend speaks of models by id, and refuses beforehand what would fail in the middle of others' work."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from offbeat.controller.inputs import base_ends, read_base
from offbeat.errors import DataError, ModelError
from offbeat.inference.sampling import Sampling
from offbeat.service.backend import Backend, tenant_of
from small_service import BASE, LORA, STEP, SmallCluster, training_data

ONE, TWO = "11111111-1111-4111-8111-111111111111:train:0", "11111111-1111-4111-8111-111111111111:train:1"


def test_models_are_trained_exported_pinned_and_sampled_by_id(cluster: SmallCluster, tmp_path: Path) -> None:
    async def body() -> None:
        backend, data = Backend(cluster.tenants, cluster.config, base_model=BASE), training_data(1).batch
        for model_id in (ONE, TWO):
            await backend.create(model_id, LORA)
        passes = await backend.run({TWO: data, ONE: data}, learn=True)
        np.testing.assert_allclose(passes[ONE].losses, passes[TWO].losses, rtol=1e-5)
        norms = await backend.step({ONE: STEP, TWO: replace(STEP, lr=0.0)})
        assert norms[ONE] == pytest.approx(norms[TWO], rel=1e-4)
        manifest = await backend.export(ONE, tmp_path / "one", version=4)
        assert manifest.name == f"{tenant_of(ONE)}@4" and tenant_of(ONE) == "11111111-1111-4111-8111-111111111111.train.0"
        backend.pin(manifest)
        await backend.remove(ONE)
        sampled = await backend.sample(manifest.name, (7, 8, 9), Sampling(4, temperature=0.0), 2, "")
        assert len(sampled) == 2 and set(sampled[0].versions) == {4}
        assert len((await backend.score(manifest.name, (7, 8, 9), 0, None)).logprobs) == 3
        (engine,) = backend.engines
        assert manifest.name in engine.adapters and engine.outstanding_tokens == 0 and backend.sampled_tokens >= 2
        backend.unpin(manifest.name)
        await backend.remove(TWO)

    cluster.run(body)


def test_what_does_not_fit_is_one_sentence(cluster: SmallCluster) -> None:
    backend, batch = Backend(cluster.tenants, cluster.config, base_model=BASE), training_data(1, num=1, length=65).batch
    assert (backend.max_rank, backend.context, backend.max_length) == (8, 64, 64)
    assert backend.end_token_ids == base_ends(read_base(cluster.config)).token_ids
    for lora, sentence in (
        (replace(LORA, rank=9), "must be 1 to 8 on this server, got 9"), (replace(LORA, rank=0), "must be 1 to 8"),
        (replace(LORA, train_attn=False, train_mlp=False), "needs train_attn or train_mlp")):
        with pytest.raises(ModelError, match=sentence):
            backend.check_lora(lora)
    with pytest.raises(DataError, match="a datum has 65 tokens, more than the 64 that fit"):
        backend.check_batch(batch)
    short = training_data(1).batch
    for wrong, what in ((replace(short, tokens=short.tokens - 9), "token"), (replace(short, targets=short.targets + 9999), "target")):
        with pytest.raises(DataError, match=f"a {what} is outside the vocabulary of {backend.vocab_size}"):
            backend.check_batch(wrong)
