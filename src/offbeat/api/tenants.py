"""`offbeat.open_tenants`: many adapters on one base model, trained and sampled by their names from this program."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from offbeat.api.session import umask_of
from offbeat.api.settings import Settings, configured
from offbeat.config.inference import InferenceConfig
from offbeat.runs.adapters import Adapters, open_adapters
from offbeat.telemetry.console import Console
from offbeat.telemetry.record import RunRecord

_HOMES = ("run", "inference", "train", "model.lora")


@asynccontextmanager
async def open_tenants(
    model: str | os.PathLike[str], *, max_rank: int = 32, settings: Settings | None = None, **keywords: Any,
) -> AsyncIterator[Adapters]:
    """Start train ranks and engines for LoRA adapters of one base model, whose owners share them; all of them end with the body.

        async with offbeat.open_tenants("models/small", max_rank=8, name="tenants") as tenants:
            await tenants.add("alice", seed=0)
            await tenants.publish("alice")
            [answer] = await tenants.sample("alice", tenants.tokenizer.encode("31>"), offbeat.Sampling(max_new_tokens=4))
            print(answer.text)

    docs/adapters.md describes the yielded object. examples/many_adapters.py trains sixteen adapters; examples/loop.py is a loop to change.

    Args:
        model: folder or hub id of the base model, its tokenizer included.
        max_rank: largest rank of an adapter.
        settings, keywords: as of `train`; those of [run], [inference] and [train] are looked for first.

    Raises:
        UserError: an argument cannot work.
        RunError: ranks or engines do not start, or too few of them are left.
    """
    most = max(max_rank, InferenceConfig().max_adapter_rank)
    given = {"model.path": model, "model.lora.rank": max_rank, "inference.max_adapter_rank": most}
    with configured(None, settings, keywords, homes=_HOMES, given=given, rows={}) as config:
        with umask_of(config), RunRecord(config.run_dir, trace=False, console=Console("quiet")) as record:
            async with open_adapters(config, record) as adapters:
                yield adapters
