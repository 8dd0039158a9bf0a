"""Models that are sampled and never trained, on engines that somebody else has started: teachers, judges. Opened by the service.

Their weights must not change while they are used. An engine that fails is probed until it answers again, and is not restarted.
"""

import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from offbeat.aio import beside, deadline, gather_all
from offbeat.config.root import Config
from offbeat.errors import ConfigError, DeadlineError, EngineError
from offbeat.fleet.dispatch import Dispatcher
from offbeat.fleet.fleet import make_dispatcher, make_pool
from offbeat.fleet.health import Healer
from offbeat.fleet.kinds import MAKERS
from offbeat.fleet.listener import FleetRecord
from offbeat.inference.client import EngineClient, EngineSession
from offbeat.inference.sampling import Draws, PromptScore, Sample, Sampling
from offbeat.telemetry.record import RunRecord
from offbeat.types import Version

_PATIENCE_S = 10.0
"""Longest wait of a request for a model without a healthy engine; nobody here can restart it, and other requests wait for their turn."""
_ANY_TOKENS = (0, 1)


@dataclass(frozen=True)
class SamplingModel:
    """A model that engines serve for samples and scores.

    Attributes:
        context: largest number of tokens in a prompt and its continuation.
        end_token_ids: tokens that end a sample; empty where only the engines know them.
        max_failures: number of engines that may fail a request before it is given up; None for three times all.
    """

    name: str
    dispatcher: Dispatcher
    context: int
    end_token_ids: tuple[int, ...] = ()
    max_failures: int | None = None

    async def sample(self, adapter: str, prompt: tuple[int, ...], sampling: Sampling, n: int, session: str) -> list[Sample]:
        """Generate n continuations with an adapter, or with the model itself for ""; see `Dispatcher.generate`."""
        return await self.dispatcher.generate(prompt, sampling, n=n, session=session, adapter=adapter, max_failures=self.max_failures)

    async def score(
        self, adapter: str, tokens: tuple[int, ...], top_k: int, targets: tuple[tuple[int, ...], ...] | None, draws: Draws | None = None,
    ) -> PromptScore:
        """Score tokens with an adapter, or with the model itself for ""; see `Dispatcher.score`."""
        return await self.dispatcher.score(
            tokens, top_k=top_k, targets=targets, draws=draws, adapter=adapter, max_failures=self.max_failures)


@asynccontextmanager
async def open_sampling_models(config: Config, record: RunRecord) -> AsyncIterator[Mapping[str, SamplingModel]]:
    """Connect to the engines of `serve.sampling_models`, and look after them while the body runs. Yields the models by name.

    Raises:
        ConfigError: an engine is not ready, or does not report the length of its context.
    """
    async with EngineSession() as http:
        opened = await gather_all(_open(config, name, urls, http, record) for name, urls in config.serve.sampling_urls.items())
        async with beside(*(healer.run() for _, healer in opened)):
            yield {model.name: model for model, _ in opened}


async def _open(config: Config, name: str, urls: Sequence[str], http: EngineSession, record: RunRecord) -> tuple[SamplingModel, Healer]:
    settings, key = config.inference, os.environ.get("OFFBEAT_API_KEY", "")
    clients = [
        EngineClient(f"{name} {index}", url, http.session, dialect=MAKERS[config.serve.sampling_engine].reader(), api_key=key)
        for index, url in enumerate(urls)]

    async def version_of(client: EngineClient) -> Version:
        return (await client.prove(_ANY_TOKENS, timeout_s=settings.request_timeout_s)).version

    pool = make_pool(clients, record, probe_timeout_s=settings.probe_timeout_s, heal_timeout_s=min(_PATIENCE_S, settings.heal_timeout_s))
    contexts = []
    for client in clients:
        try:
            await client.check(timeout_s=settings.start_timeout_s)
            pool.admit(client.name, await version_of(client))
            contexts.append(await _context_of(client, timeout_s=settings.probe_timeout_s))
        except (EngineError, DeadlineError) as exc:
            raise ConfigError(f"serve.sampling_models names {client.url}, but {exc}") from exc
    healer = Healer(
        pool, reload=version_of, probe_interval_s=settings.probe_interval_s, probe_timeout_s=settings.probe_timeout_s,
        listener=FleetRecord(record))
    return SamplingModel(name, make_dispatcher(pool, settings), min(contexts)), healer


async def _context_of(client: EngineClient, *, timeout_s: float) -> int:
    async with deadline(f"the context of {client.name} ({client.url})", timeout_s):
        answer = await client.call("GET", "/v1/models")
    try:
        return int(answer["data"][0]["max_model_len"])
    except (LookupError, TypeError, ValueError) as exc:
        raise EngineError(f"it does not report max_model_len in /v1/models; use `offbeat engine` or vLLM ({exc!r})") from exc
