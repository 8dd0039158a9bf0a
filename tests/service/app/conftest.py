"""The whole service behind HTTP."""

from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from http_serving import Client, Serve, serving
from offbeat.aio import beside
from offbeat.config.service import ServeConfig
from offbeat.data.image_reader import ImageReader
from offbeat.data.tokenizer import load_tokenizer
from offbeat.fleet.sampling_models import open_sampling_models
from offbeat.service.app.assembly import FrontSettings, open_front
from offbeat.service.keys import Keys
from offbeat.service.serve import open_core, served_models
from offbeat.service.store import Store
from offbeat.telemetry.record import SilentRecord
from small_service import BASE, SmallCluster

ServeWith = Callable[..., None]
"""Runs a test's body, given a client, with further settings of `serve`."""


@pytest.fixture
def serve_with(cluster: SmallCluster, tmp_path: Path) -> ServeWith:
    """Runs a test's body, given a client, on a service with settings and an empty data folder."""
    return serve_on(cluster, tmp_path)


def serve_on(cluster: SmallCluster, tmp_path: Path, *, images: ImageReader | None = None) -> ServeWith:
    """Return the runner of a test's body on a cluster and an empty data folder; `images` reads those of its model."""

    def run(body: Callable[[Client], Awaitable[None]], **given: Any) -> None:
        settings = ServeConfig(**{"data_dir": str(tmp_path), "model_name": BASE, "max_body_bytes": 2**20} | given)
        config = cluster.config.model_copy(update={"serve": settings})

        async def on_service() -> None:
            keys = Keys.open_house()
            with closing(Store.open(f"sqlite:///{tmp_path / 'service.db'}")) as store:
                async with (
                        open_sampling_models(config, SilentRecord(tmp_path)) as others,
                        open_core(config, cluster.adapters, store, keys, others=others) as core):
                    served = served_models(config, cluster.adapters.limits, others, tokenizer="folder", images=images)
                    front = open_front(
                        core.service, core.sampling, served, tokenizer=load_tokenizer(config.model.path), keys=keys,
                        settings=FrontSettings(max_body_bytes=settings.max_body_bytes))
                    async with serving(front.app) as client, beside(front.page.watch()):
                        await body(client)

        cluster.run(on_service)

    return run


@pytest.fixture
def serve(serve_with: ServeWith) -> Serve:
    """Runs a test's body, given a client, on a service with an empty data folder."""
    return serve_with
