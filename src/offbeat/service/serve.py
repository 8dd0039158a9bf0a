"""Assembles the service and runs it: data folder, database, trainers and engines, core, HTTP. Called by the command line.

Mistakes of the user are found before a process is started. Ctrl-C ends gracefully: the server accepts no new work, finishes running work,
and saves every model. A second Ctrl-C ends at once, which leaves models at their last checkpoint.
"""

import asyncio
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from ipaddress import IPv4Network, IPv6Network, ip_network
from pathlib import Path
from types import MappingProxyType

import uvloop

from offbeat.aio import Terminations, beside, both
from offbeat.config.root import Config
from offbeat.connections import Bounds, Connections
from offbeat.controller.inputs import Base, image_reader, read_base
from offbeat.data.image_reader import ImageReader
from offbeat.data.image_store import ImageStore, images_folder
from offbeat.data.model_folder import read_model_config
from offbeat.errors import ConfigError, StorageError
from offbeat.fleet.sampling_models import SamplingModel, open_sampling_models
from offbeat.hosts import is_loopback
from offbeat.listening import GuestServer, allow_files, bind, num_free_files, server_config, url_of
from offbeat.runs.adapters import Adapters, BaseLimits, open_adapters
from offbeat.service.app.assembly import FrontSettings, open_front
from offbeat.service.app.auth import HostNames
from offbeat.service.app.reply import Served
from offbeat.service.app.request_images import MOST_STORED_BYTES
from offbeat.service.base_models import BaseModels
from offbeat.service.cost import max_resident
from offbeat.service.futures import Futures
from offbeat.service.identity import agree, keep
from offbeat.service.incidents import Incidents
from offbeat.service.keys import Keys
from offbeat.service.limits import Limits, Usage
from offbeat.service.results import Results
from offbeat.service.samplers import Samplers
from offbeat.service.sampling import SamplingService
from offbeat.service.service import ServiceCore, ServiceSettings
from offbeat.service.starting import tell_while_starting
from offbeat.service.store import Store
from offbeat.service.wire.answers import encode
from offbeat.service.wire.limits import WireLimits
from offbeat.telemetry.console import Console
from offbeat.telemetry.log import set_up_logging
from offbeat.telemetry.record import RunRecord

_SWEEP_EVERY_S = 60.0
_GRACE_S = 3
_KEEP_ALIVE_S = 75
_BACKLOG = 4096
_SWITCH_INTERVAL_S = 0.0005
"""A thread that reads a large body gives way to the event loop after this long; Python's 5 ms would add up over a request's turns."""
_SHARE_OF_ONE = 4
_CLUSTER = "cluster"
_MAX_FAILURES = 3
"""Number of engines on which one request for the trained model may fail, whether or not they survived.

The request itself may crash engines, and other owners' requests run on them.
"""
_ANY_TOKEN = 2**31
"""Vocabulary size assumed for models whose vocabulary is unknown here; the engines refuse invalid tokens."""

_log = logging.getLogger(__name__)
Say = Callable[[str], None]


def run_service(config: Config, *, say: Say, debug: bool = False) -> None:
    """Serve until interrupted; `say` is called with messages for the user.

    Raises:
        ConfigError: the address is reachable by others without a file of keys, the keys or database are bad, or the folder is in use.
        ModelError: there is no model.
        PortBusyError: the port is taken.
        StorageError: the data folder cannot be written.
    """
    check_address(config)
    check_proxies(config)
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    allow_files()
    folder = Path(config.serve.data_dir).resolve()
    config = config.model_copy(update={
        "run": config.run.model_copy(update={"dir": str(folder), "name": _CLUSTER}),
        "serve": config.serve.model_copy(update={"data_dir": str(folder)})})
    base, keys = read_base(config), read_keys(config)
    with bind(config.serve.host, config.serve.port, who="the service", another="another --port") as listener, open_record(folder) as record:
        set_up_logging(folder / "log" / "service.jsonl", debug=debug, as_json=True)
        store = open_store(config.serve.database, folder)
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(_Run(config, base, keys, store, say).serve(record, listener))
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None
        finally:
            store.close()


def max_connections(config: Config) -> int:
    """Return the configured limit, but at most half of the free descriptors: engine calls, the database and results need some, too."""
    return int(min(config.serve.max_connections, max(num_free_files() // 2, 1)))


def check_address(config: Config) -> None:
    """Refuse to serve everybody from everywhere; raises ConfigError if other machines can reach the address, and there are no keys."""
    if not config.serve.keys and not is_loopback(config.serve.host):
        raise ConfigError(
            f"serve.host = {config.serve.host!r} can be reached by other machines, so serve.keys must name a file of API keys; write one"
            ' with [owners.NAME] and key = "tml-..." for each owner, or listen on 127.0.0.1')


def check_proxies(config: Config) -> None:
    """Raise ConfigError if an entry of serve.trusted_proxies is neither an address nor a network."""
    try:
        trusted_networks(config)
    except ValueError as exc:
        raise ConfigError(f"serve.trusted_proxies must hold addresses or networks such as 10.0.0.0/8: {exc}") from exc


def trusted_networks(config: Config) -> list[IPv4Network | IPv6Network]:
    """Return the networks of proxies that are trusted to name the client of a request, such as 10.0.0.0/8."""
    return [ip_network(proxy) for proxy in config.serve.trusted_proxies]


def is_exempt(config: Config, address: str) -> bool:
    """Whether an address may have any number of connections: addresses of this machine, and proxies, which act for many clients."""
    if is_loopback(address):
        return True
    try:
        asks = ip_network(address)
    except ValueError:
        return False
    return any(network.version == asks.version and network.overlaps(asks) for network in trusted_networks(config))


def names_of(config: Config) -> HostNames:
    """Return the host names that this server answers to.

    Where any key is accepted, these are only this machine's own addresses; otherwise any address and the server's own names.
    """
    if not config.serve.keys:
        return HostNames(config.serve.allowed_hosts)
    return HostNames([config.serve.host, socket.gethostname(), *config.serve.allowed_hosts], any_address=True)


def read_keys(config: Config) -> Keys:
    """Return the accepted keys, with each owner's limits; raises ConfigError if the file of keys cannot be used."""
    given = config.serve
    limits = Limits(
        given.max_models, given.max_queued_tokens, given.max_disk_bytes, given.max_queued_bytes, given.max_sessions, given.max_samplers)
    return Keys.load(Path(given.keys), default=limits) if given.keys else Keys.open_house(default=limits)


def base_model_name(config: Config) -> str:
    """Return the clients' name of the base model: the configured one, the hub ID, or the name of the model's folder."""
    folder = Path(config.model.path).expanduser()
    return config.serve.model_name or (folder.resolve().name if folder.is_dir() else config.model.path)


def tokenizer_id(config: Config, base: Base) -> str:
    """Return the clients' name of the tokenizer: its folder if they are on this machine and can read it, otherwise the model's name."""
    folder = Path(base.tokenizer_folder).expanduser()
    return str(folder.resolve()) if folder.is_dir() and is_loopback(config.serve.host) else base_model_name(config)


def request_images(config: Config, base: Base) -> ImageReader | None:
    """Return what reads the images of requests to the base model; None if it reads none. They are kept below the data folder."""
    store = ImageStore(images_folder(config.run_dir), most_bytes=MOST_STORED_BYTES)
    reader = image_reader(config, base.model, store) if base.build is None else None
    if reader is not None:
        reader.limits = replace(reader.limits, in_data=False)
    return reader


def served_models(
    config: Config, limits: BaseLimits, others: Mapping[str, SamplingModel], *, tokenizer: str, images: ImageReader | None = None,
) -> Served:
    """Return the offered models, and the limits of requests to them; `others` are only sampled, and `images` are the trained one's."""
    base_models = BaseModels.of(base_model_name(config), config.serve)
    max_images = images.limits.max_images if images is not None else 0
    return Served(
        base_models.name, tokenizer, config.model.lora.alpha,
        WireLimits(vocab_size=limits.vocab_size, context=limits.context, max_images=max_images),
        stable_reinforce=config.serve.stable_reinforce, aliases=base_models.aliases,
        sampled={name: WireLimits(vocab_size=_ANY_TOKEN, context=model.context) for name, model in others.items()}, images=images)


def open_record(folder: Path) -> RunRecord:
    """Open the record of the ranks' and engines' logs below the data folder, and lock that folder for this process.

    Raises:
        ConfigError: another process uses the folder.
        StorageError: the folder cannot be written.
    """
    try:
        return RunRecord(folder / _CLUSTER, trace=False, console=Console("quiet"))
    except ConfigError as exc:
        raise ConfigError(f"the data folder {str(folder)!r} is in use by another server; wait for it, or give another --data-dir") from exc
    except StorageError as exc:
        raise StorageError(f"the data folder {str(folder)!r} cannot be written; free space, or give another --data-dir") from exc


def open_store(url: str, folder: Path) -> Store:
    """Open the database that belongs to a data folder, by default the one in it.

    Raises:
        ConfigError: it belongs to another folder, or cannot be used. Nothing was changed.
        StorageError: the database or the folder cannot be read or written.
    """
    store = Store.open(url or f"sqlite:///{folder / 'service.db'}", identify=lambda known: agree(known, folder))
    try:
        keep(folder, store.identity)
    except StorageError:
        store.close()
        raise
    return store


@dataclass(frozen=True)
class Core:
    """Parts of the service without HTTP."""

    service: ServiceCore
    sampling: SamplingService


@asynccontextmanager
async def open_core(
    config: Config, adapters: Adapters, store: Store, keys: Keys, *, others: Mapping[str, SamplingModel] = MappingProxyType({}),
) -> AsyncIterator[Core]:
    """Run the service; when the body ends, no new work begins, and every model is saved. `others`, by name, are only sampled."""
    folder, settings, limits = Path(config.serve.data_dir), config.serve, adapters.limits
    base_models = BaseModels.of(base_model_name(config), settings)
    trained = SamplingModel(base_models.name, adapters.fleet.dispatcher, limits.context, limits.end_token_ids, max_failures=_MAX_FAILURES)
    usage = Usage(keys.limits_of)
    futures = Futures(
        store, Results(folder / "results", after=store.last_segment()), encode=encode,
        owner_of=lambda session: service.sessions.owner_of(session), usage=usage, retention_s=settings.result_retention_s)

    service = ServiceCore(
        adapters, base_models, store, futures, folder=folder, others=others.values(),
        settings=ServiceSettings(
            settings.max_tokens_per_pass, settings.session_timeout_s, settings.gap_patience_s, settings.orphan_retention_s,
            session_retention_s=settings.session_retention_s, max_resident_models=settings.max_resident_models or max_resident(
                read_model_config(config.model.path or str(config.run_dir / "model")), rank=config.model.lora.rank,
                num_ranks=config.train.num_ranks),
            parked_retention_s=settings.parked_retention_s, sampler_timeout_s=settings.sampler_timeout_s))
    sampling = SamplingService(
        service.samplers, engines=trained, others=others, futures=futures, usage=usage,
        max_in_flight=settings.max_samples_in_flight * sum(len(model.dispatcher.pool.states) for model in (trained, *others.values())))
    async with beside(service.run(), _sweep(futures, service.samplers)):
        try:
            yield Core(service, sampling)
        finally:
            await sampling.close()
            await service.close()


async def _sweep(futures: Futures, samplers: Samplers) -> None:
    while True:
        await asyncio.sleep(_SWEEP_EVERY_S)
        try:
            await samplers.sweep()
            await futures.sweep()
        except StorageError as exc:  # the error may pass, and the next sweep catches up
            _log.warning("old samplers or results are still there: %s", exc)


class _Run:
    def __init__(self, config: Config, base: Base, keys: Keys, store: Store, say: Say) -> None:
        self._config = config
        self._base = base
        self._keys = keys
        self._store = store
        self._say = say
        self._name = base_model_name(config)
        BaseModels.of(self._name, config.serve)  # refuses two models with one name before a process is started
        self._ready = False
        self._stop = asyncio.Event()
        self._terminations = Terminations()

    async def serve(self, record: RunRecord, listener: socket.socket) -> None:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None, "runs inside a task"
        loop.add_signal_handler(signal.SIGINT, self._interrupted, task)
        loop.add_signal_handler(signal.SIGTERM, self._terminated, task)
        config = self._config
        num_engines = len(config.inference.urls) or config.inference.num_engines
        incidents = Incidents()
        record.events.listeners.append(incidents.hear)
        self._say(f"starting {self._name} (train ranks: {config.train.num_ranks}, engines: {num_engines})")
        async with (
                beside(tell_while_starting(self._say, is_ready=lambda: self._ready or self._stop.is_set())),
                open_sampling_models(config, record) as others, open_adapters(config, record) as adapters,
                open_core(config, adapters, self._store, self._keys, others=others) as core):
            images = request_images(config, self._base)
            served = served_models(config, adapters.limits, others, tokenizer=tokenizer_id(config, self._base), images=images)
            most = max_connections(config)
            front = open_front(
                core.service, core.sampling, served, tokenizer=self._base.tokenizer, keys=self._keys, incidents=incidents,
                settings=FrontSettings(
                    max_body_bytes=config.serve.max_body_bytes, public_status=config.serve.public_status, names=names_of(config),
                    max_requests_of_one=max(most // _SHARE_OF_ONE, 1)))
            connections = Connections(
                Bounds(connections=most, of_address=config.serve.max_connections_per_address), is_exempt=partial(is_exempt, config))
            server = GuestServer(server_config(
                front.app, keep_alive_s=_KEEP_ALIVE_S, shutdown_s=_GRACE_S, log_config=None, backlog=_BACKLOG,
                log_level="error",  # errors in strangers' requests deserve no warning
                proxy_headers=bool(config.serve.trusted_proxies), forwarded_allow_ips=list(config.serve.trusted_proxies)),
                connections)
            async with beside(front.page.watch()):
                await self._until_stopped(server, listener)
        self._say(f"ended; the models of all tenants are in {config.serve.data_dir}, and the same command serves them again")

    async def _until_stopped(self, server: GuestServer, listener: socket.socket) -> None:
        async def tell_and_wait() -> None:
            await server.ready.wait()
            self._ready = True
            url = url_of(listener)
            _log.info("serving %s at %s", self._name, url)
            self._say(_welcome(url, self._name, open_house=self._keys.any_will_do))
            await self._stop.wait()
            _log.info("ending")
            server.should_exit = True

        await both(server.serve(sockets=[listener]), tell_and_wait())  # a failure of either ends the other

    def _terminated(self, task: asyncio.Task[None]) -> None:
        if self._terminations.asks(now_s=time.monotonic()):
            self._interrupted(task)

    def _interrupted(self, task: asyncio.Task[None]) -> None:
        if self._stop.is_set():
            self._say("ended at once; models are at their last checkpoints")
            os._exit(130)  # ranks and engines see that their parent is gone, and exit
        self._stop.set()
        if self._ready:
            self._say("ending: saving every model; Ctrl-C again ends at once")
        else:
            task.cancel()


def _welcome(url: str, name: str, *, open_house: bool) -> str:
    key = "tml-anything" if open_house else "tml-...  # yours, from the file of keys"
    return "\n".join([
        f"serving {name} at {url}; Ctrl-C ends it, and its status page is {url}/. In the shell of a client:",
        f"  export TINKER_BASE_URL={url}",
        f"  export TINKER_API_KEY={key}",
        f'  python -c "import tinker; print(tinker.ServiceClient().create_lora_training_client({name!r}, rank=8).result().get_info())"'])
