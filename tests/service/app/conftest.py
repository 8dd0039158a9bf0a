"""The whole service behind HTTP."""

from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path

import pytest

from http_serving import Client, Serve, serving
from offbeat.aio import beside
from offbeat.config.service import ServeConfig
from offbeat.service.app.assembly import open_front
from offbeat.service.app.reply import Served
from offbeat.service.keys import Keys
from offbeat.service.serve import open_core
from offbeat.service.store import Store
from offbeat.service.wire.limits import WireLimits
from small_service import BASE, SmallCluster


@pytest.fixture
def serve(cluster: SmallCluster, tmp_path: Path) -> Serve:
    """Runs a test's body, given a client, on a service with an empty data folder."""
    settings = ServeConfig(data_dir=str(tmp_path), model_name=BASE, max_body_bytes=2**20)
    config = cluster.config.model_copy(update={"serve": settings})

    async def on_service(body: Callable[[Client], Awaitable[None]]) -> None:
        keys = Keys.open_house()
        with closing(Store.open(f"sqlite:///{tmp_path / 'service.db'}")) as store:
            async with open_core(config, cluster.tenants, store, keys) as core:
                served = Served(BASE, "folder", 32.0, WireLimits(vocab_size=core.backend.vocab_size, context=core.backend.context))
                front = open_front(core.service, core.sampling, served, keys=keys, max_body_bytes=2**20, public_status=False)
                async with serving(front.app) as client, beside(front.page.watch()):
                    await body(client)

    return lambda body: cluster.run(lambda: on_service(body))
