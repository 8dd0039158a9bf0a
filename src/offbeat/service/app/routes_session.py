"""Endpoints about the server and about sessions: capabilities and settings for clients, heartbeats, and the end of a session."""

from starlette.responses import Response

from offbeat.service.app.reply import Call, Endpoint, Served, answer
from offbeat.service.service import ServiceCore
from offbeat.service.wire import rest
from offbeat.service.wire.bodies import CreateSessionBody, FinishSessionBody, SessionBody
from offbeat.service.wire.json_body import metadata_of

# A batch stays one request, so that its gradients do not depend on how a client splits it, and requests arrive in order.
_CLIENT_CONFIG = {
    "pjwt_auth_enabled": False, "credential_default_source": "api_key", "parallel_fwdbwd_chunks": False, "proto_compress_fwdbwd": False,
    "fwdbwd_max_chunk_len": 8192, "fwdbwd_max_chunk_bytes_count": 64_000_000, "fwdbwd_dispatch_bytes_semaphore_size": 200_000_000,
}
_DYNAMIC_CONFIG = {"refresh_interval_sec": 300, "sample_cancel_enabled": False}


class SessionRoutes:
    def __init__(self, service: ServiceCore, served: Served) -> None:
        self._service = service
        self._served = served

    @property
    def endpoints(self) -> list[Endpoint]:
        return [
            Endpoint("POST", "/api/v1/client/config", self._client_config),
            Endpoint("POST", "/api/v1/client/dynamic_config", self._dynamic_config, quiet=True),
            Endpoint("GET", "/api/v1/get_server_capabilities", self._capabilities),
            Endpoint("POST", "/api/v1/telemetry", self._telemetry, quiet=True),
            Endpoint("POST", "/api/v1/create_session", self._create),
            Endpoint("POST", "/api/v1/session_heartbeat", self._heartbeat, quiet=True),
            Endpoint("POST", "/api/v1/sessions/{session}/finish", self._finish),
        ]

    async def _client_config(self, _: Call) -> Response:
        return answer(_CLIENT_CONFIG)

    async def _dynamic_config(self, _: Call) -> Response:
        return answer(_DYNAMIC_CONFIG)

    async def _capabilities(self, _: Call) -> Response:
        served = self._served
        return answer(rest.capabilities(
            dict.fromkeys((served.base_model, *served.aliases), served.limits.context),
            {name: limits.context for name, limits in served.sampled.items()}))

    async def _telemetry(self, _: Call) -> Response:
        # The body is dropped: it may hold stack traces of the user's own program.
        return answer({"status": "accepted"})

    async def _create(self, call: Call) -> Response:
        body = await call.json(CreateSessionBody)
        session_id = await self._service.create_session(
            call.caller, metadata=metadata_of(body.user_metadata), tags=tuple(body.tags), display_name=body.display_name or "")
        return answer({"type": "create_session", "session_id": session_id})

    async def _heartbeat(self, call: Call) -> Response:
        await self._service.heartbeat(call.caller, (await call.json(SessionBody)).session_id)
        return answer({"type": "session_heartbeat"})

    async def _finish(self, call: Call) -> Response:
        body = await call.json(FinishSessionBody)
        await self._service.finish_session(call.caller, call.param("session"), body.reason.type)
        return Response(status_code=204)
