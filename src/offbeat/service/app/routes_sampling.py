"""Endpoints of samplers, and of all futures, which clients poll with long waits; a poll without an answer yet returns the reason."""

import asyncio
from dataclasses import dataclass

from starlette.responses import Response

from offbeat.errors import StorageError
from offbeat.service.app.reply import Call, Endpoint, Served, answer, payload
from offbeat.service.app.request_images import RequestImages
from offbeat.service.sampling import SamplingService
from offbeat.service.service import ServiceCore
from offbeat.service.types import Pending, SampleRequest
from offbeat.service.wire import rest
from offbeat.service.wire.bodies import CreateSamplingSessionBody, RetrieveFutureBody
from offbeat.service.wire.chunks import Piece, images_in
from offbeat.service.wire.limits import WireLimits
from offbeat.service.wire.sample_body import SampleBody, SampleWithImages, read_sample

_POLL_S = 25.0  # clients wait for 45 s, and proxies often for 30 s
_PAUSE_S = 2.0
_NOT_YET = 408


@dataclass(frozen=True)
class _Unread:
    """A request whose prompt has images, which have not been read."""

    body: SampleBody
    limits: WireLimits
    pieces: tuple[Piece, ...]


class SamplingRoutes:
    def __init__(self, service: ServiceCore, sampling: SamplingService, served: Served, images: RequestImages) -> None:
        self._service = service
        self._sampling = sampling
        self._served = served
        self._images = images

    @property
    def endpoints(self) -> list[Endpoint]:
        body = SampleWithImages if self._served.limits.max_images else SampleBody
        return [
            Endpoint("POST", "/api/v1/create_sampling_session", self._create),
            Endpoint("GET", "/api/v1/samplers/{sampler}", self._info),
            Endpoint("POST", "/api/v1/asample", self._sample, quiet=True, max_body_bytes=body.max_bytes),
            Endpoint("POST", "/api/v1/retrieve_future", self._retrieve, quiet=True),
        ]

    async def _create(self, call: Call) -> Response:
        body = await call.json(CreateSamplingSessionBody)
        sampler = await self._sampling.samplers.create(
            call.caller, session_id=body.session_id, seq=body.sampling_session_seq_id, base_model=body.base_model,
            model_path=body.model_path)
        return answer({"type": "create_sampling_session", "sampling_session_id": sampler})

    async def _info(self, call: Call) -> Response:
        return answer(rest.sampler(self._sampling.samplers.info(call.caller, call.param("sampler"))))

    async def _sample(self, call: Call) -> Response:
        def read(data: bytes) -> SampleRequest | _Unread:
            body = read_sample(data, takes_images=self._served.limits.max_images > 0)
            model = self._sampling.samplers.find(call.caller, body.sampling_session_id).base_model
            limits = self._served.sampled.get(model, self._served.limits)
            pieces = body.pieces(limits)
            return _Unread(body, limits, pieces) if images_in(pieces) else body.request(limits, pieces)

        request = await call.read(read)
        if isinstance(request, _Unread):
            images = await self._images.read(call.caller.owner, images_in(request.pieces))
            request = request.body.request(request.limits, request.pieces, images)
        return answer(rest.sample_accepted(self._sampling.sample(call.caller, request), num_samples=request.num_samples))

    async def _retrieve(self, call: Call) -> Response:
        request_id = (await call.json(RetrieveFutureBody)).request_id
        try:
            found = await self._service.retrieve(call.caller, request_id, timeout_s=_POLL_S)
        except StorageError:
            await asyncio.sleep(_PAUSE_S)  # clients retry at once and ignore `retry-after`
            raise
        if not isinstance(found, Pending):
            return payload(found)
        return answer(rest.pending(request_id, found), status=_NOT_YET)
