"""Endpoints of models: creation, passes, steps, saving and loading. All but one answer with the ID of a future.

Requests with higher numbers must not wait for one that was refused, so the core is told of every final refusal.
"""

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Protocol, TypeVar

from starlette.responses import Response

from offbeat.listening import ReadBody
from offbeat.service.app.reply import Call, Endpoint, Handler, Served, accepted, answer
from offbeat.service.app.request_images import RequestImages
from offbeat.service.errors import BadRequestError, RequestError, UnknownError
from offbeat.service.ids import model_id
from offbeat.service.service import ServiceCore
from offbeat.service.types import Caller
from offbeat.service.wire import rest
from offbeat.service.wire.bodies import (
    CreateModelBody,
    LoadWeightsBody,
    ModelBody,
    OptimStepBody,
    SaveExternalBody,
    SaveForSamplerBody,
    SaveWeightsBody,
)
from offbeat.service.wire.json_body import metadata_of, read_json
from offbeat.service.wire.training import ForwardBackward, UnreadPass, read_forward_backward


class Ordered(Protocol):
    """A request with its place in a model's order; loading into a new model has no place."""

    @property
    def model_id(self) -> str | None: ...

    @property
    def seq_id(self) -> int | None: ...


R = TypeVar("R", bound=Ordered)
Act = Callable[[Caller, R], Awaitable[str]]


class TrainingRoutes:
    def __init__(self, service: ServiceCore, served: Served, images: RequestImages) -> None:
        self._service = service
        self._served = served
        self._images = images

    @property
    def endpoints(self) -> list[Endpoint]:
        service = self._service
        ordered: dict[str, Handler] = {
            "optim_step": self._json(OptimStepBody, lambda caller, body: service.optim_step(
                caller, model_id=body.model_id, seq_id=body.seq_id, params=body.params())),
            "save_weights": self._json(SaveWeightsBody, lambda caller, body: service.save_weights(
                caller, model_id=body.model_id, seq_id=body.seq_id, name=body.path, ttl_s=body.ttl_seconds, overwrite=body.overwrite,
                metadata=metadata_of(body.user_metadata))),
            "save_weights_for_sampler": self._json(SaveForSamplerBody, lambda caller, body: service.save_for_sampler(
                caller, model_id=body.model_id, seq_id=body.seq_id, name=body.path, sampling_session_seq_id=body.sampling_session_seq_id,
                ttl_s=body.ttl_seconds, metadata=metadata_of(body.user_metadata))),
            "save_weights_external": self._json(SaveExternalBody, lambda caller, body: service.save_external(
                caller, model_id=body.model_id, seq_id=body.seq_id, name=body.path, ttl_s=body.ttl_seconds,
                recipients=tuple(body.age_encryption_recipients or ()))),
            "load_weights": self._json(LoadWeightsBody, self._load_weights),
        }
        return [
            Endpoint("POST", "/api/v1/create_model", self._create_model), Endpoint("POST", "/api/v1/get_info", self._get_info),
            Endpoint("POST", "/api/v1/forward", self._forward),
            *(Endpoint("POST", f"/api/v1/{name}", handler) for name, handler in ordered.items()),
            Endpoint("POST", "/api/v1/forward_backward", self._forward_backward, max_body_bytes=None)]

    def _json(self, kind: type[R], act: Act[R]) -> Handler:
        """Return a handler of ordered requests with JSON bodies."""

        async def handler(call: Call) -> Response:
            return await self._submit(call, lambda body: read_json(kind, body), act)

        return handler

    async def _forward_backward(self, call: Call) -> Response:
        if not call.http.headers.get("content-type", "").startswith("application/x-protobuf"):
            raise BadRequestError("forward_backward takes application/x-protobuf; update the tinker SDK to 0.26 or later")
        return await self._submit(
            call, partial(read_forward_backward, limits=self._served.limits, stable_reinforce=self._served.stable_reinforce),
            lambda _, request: self._pass(call, request))

    async def _pass(self, call: Call, request: ForwardBackward | UnreadPass) -> str:
        if isinstance(request, ForwardBackward):
            return await self._service.forward_backward(
                call.caller, model_id=request.model_id, seq_id=request.seq_id, data=request.data, forward_only=request.forward_only)
        with self._service.expecting(call.caller, request.model_id, request.seq_id):
            images = await self._images.read(call.caller.owner, request.images)
            return await self._pass(call, await call.beside(request.read, images))

    async def _forward(self, _: Call) -> Response:
        raise UnknownError(
            "this server has no /api/v1/forward, which only SDKs before 0.25 call: passes that only score are forward_backward's; update "
            "the tinker SDK to 0.26 or later")

    async def _submit(self, call: Call, read: ReadBody[R], act: Act[R]) -> Response:
        model, seq = None, None
        try:
            request = await call.read(read)
            model, seq = request.model_id, request.seq_id
            return accepted(await act(call.caller, request), **({"model_id": model} if model else {}))
        except RequestError as exc:
            model, seq = exc.model_id or model, exc.seq_id or seq
            if model and seq:
                self._service.skip(call.caller, model, seq)
            raise

    async def _create_model(self, call: Call) -> Response:
        body = await call.json(CreateModelBody)
        request_id = await self._service.create_model(
            call.caller, session_id=body.session_id, model_seq_id=body.model_seq_id, base_model=body.base_model,
            lora=body.lora(alpha=self._served.alpha), metadata=metadata_of(body.user_metadata))
        return accepted(request_id, model_id=model_id(body.session_id, body.model_seq_id))

    async def _load_weights(self, caller: Caller, body: LoadWeightsBody) -> str:
        if not body.creates:
            return await self._service.load_weights(
                caller, model_id=_there(body.model_id), seq_id=_there(body.seq_id), path=body.path, optimizer=body.optimizer)
        return await self._service.create_from_weights(
            caller, session_id=_there(body.session_id), model_seq_id=_there(body.model_seq_id), path=body.path, optimizer=body.optimizer,
            base_model=body.base_model, metadata=metadata_of(body.user_metadata))

    async def _get_info(self, call: Call) -> Response:
        info = self._service.model_info(call.caller, (await call.json(ModelBody)).model_id)
        return answer(rest.model_info(info, tokenizer_id=self._served.tokenizer_id))


def _there(value: Any) -> Any:
    assert value is not None, "checked when the body was read"
    return value
