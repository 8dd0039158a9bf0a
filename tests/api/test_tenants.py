"""Adapters of several owners on one base model, opened by the public function."""

import asyncio
from pathlib import Path

import pytest

import offbeat
from offbeat.errors import ConfigError
from offbeat.inference.sampling import Sampling


def test_tenants_are_added_published_and_sampled(model_dir: str, tmp_path: Path) -> None:
    async def play() -> list[int]:
        settings = {"run.dir": tmp_path, "train.threads": 1, "inference.threads": 1, "cluster.stop_timeout_s": 3}
        async with offbeat.open_tenants(model_dir, max_rank=4, name="tenants", settings=settings) as tenants:
            for seed, name in enumerate(("alice", "bob")):
                await tenants.add(name, seed=seed)
                await tenants.publish(name)
            prompt = tenants.tokenizer.encode("31>")
            answers = [await tenants.sample(name, prompt, Sampling(max_new_tokens=4, temperature=0.0)) for name in tenants.names]
            return [len(sample.tokens) for [sample] in answers]

    lengths = asyncio.run(play())
    assert len(lengths) == 2 and all(1 <= length <= 4 for length in lengths)
    assert (tmp_path / "tenants" / "events.jsonl").stat().st_mode & 0o077 == 0


def test_a_mistake_is_told_before_anything_is_started(model_dir: str) -> None:
    async def play() -> None:
        async with offbeat.open_tenants(model_dir, max_rank=0):
            pass

    with pytest.raises(ConfigError, match=r"model\.lora\.rank must be at least 1 to train many adapters, got 0"):
        asyncio.run(play())
