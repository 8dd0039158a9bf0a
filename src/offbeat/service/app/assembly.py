"""Assembles the HTTP application over a core: all routes, the status page and metrics. Called by `service.serve`."""

from dataclasses import dataclass, replace

from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.routing import Route

from offbeat.data.tokenizer import Tokenizer
from offbeat.service.app.app import make_app
from offbeat.service.app.archive import Archives
from offbeat.service.app.auth import LOCAL_NAMES, HostNames
from offbeat.service.app.body import Bodies
from offbeat.service.app.journal import Journal
from offbeat.service.app.metrics import StatusCollector, scrape
from offbeat.service.app.reply import Served
from offbeat.service.app.request_images import RequestImages
from offbeat.service.app.routes_chat import ChatRoutes
from offbeat.service.app.routes_completions import CompletionRoutes
from offbeat.service.app.routes_rest import Exports, RestRoutes
from offbeat.service.app.routes_sampling import SamplingRoutes
from offbeat.service.app.routes_session import SessionRoutes
from offbeat.service.app.routes_training import TrainingRoutes
from offbeat.service.app.status import StatusPage
from offbeat.service.incidents import Incidents
from offbeat.service.keys import Keys
from offbeat.service.sampling import SamplingService
from offbeat.service.service import ServiceCore
from offbeat.service.types import Status


@dataclass(frozen=True)
class Front:
    """The application, and the status page, whose `watch` must run concurrently with it."""

    app: Starlette
    page: StatusPage


@dataclass(frozen=True, kw_only=True)
class FrontSettings:
    """Bounds and access of the application; for `names` and `max_requests_of_one` see `make_app`.

    Attributes:
        max_body_bytes: largest body of a request with training data, such as 64 MiB.
        public_status: whether everybody may see the status page, or programs of this machine alone.
    """

    max_body_bytes: int
    public_status: bool = False
    names: HostNames = LOCAL_NAMES
    max_requests_of_one: int = 2048


def open_front(
    service: ServiceCore, sampling: SamplingService, served: Served, *, tokenizer: Tokenizer, keys: Keys, settings: FrontSettings,
    incidents: Incidents | None = None,
) -> Front:
    """Assemble the application. `tokenizer` is the base model's; `incidents` concern ranks and engines."""
    reading = RequestImages(served.images)
    registry, exports, archives = CollectorRegistry(), Exports(service.library.external_folder), Archives(service.library)
    journal, incidents = Journal(registry), incidents or Incidents()

    def status() -> Status:
        core = service.status()
        failures = sorted((*core.failures, *sampling.failures), key=lambda failure: -failure.time)
        speeds = sampling.speeds.per_s()
        models = tuple(replace(model, sampled_per_s=speeds.get(model.model_id, 0.0)) for model in core.models)
        return replace(
            core, models=models, sampling=sampling.standing(), failures=tuple(failures), incidents=incidents.last, counts=incidents.counts,
            processes=page.processes)

    page = StatusPage(status, journal, public=settings.public_status, names=settings.names)
    registry.register(StatusCollector(status))
    endpoints = [
        *SamplingRoutes(service, sampling, served, reading).endpoints,  # requested most often, and routes are tried in order
        *ChatRoutes(sampling, service.library, served, tokenizer=replace(tokenizer, name=served.base_model), images=reading).endpoints,
        *CompletionRoutes(sampling, served, replace(tokenizer, name=served.base_model)).endpoints,
        *TrainingRoutes(service, served, reading).endpoints, *SessionRoutes(service, served).endpoints,
        *RestRoutes(service, exports).endpoints, archives.endpoint]
    public = [*page.routes, exports.route, archives.route, Route("/metrics", page.shielded(lambda: scrape(registry)))]
    app = make_app(
        endpoints, public, keys=keys, bodies=Bodies(settings.max_body_bytes), journal=journal, names=settings.names,
        max_requests_of_one=settings.max_requests_of_one)
    return Front(app, page)
