"""A small server that answers as SGLang's documented interface says, over an embedded engine with a real model.

Weights and tokens are real; endpoints, refusals and the shapes of answers are SGLang 0.5.23's as far as its documentation and source say.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import groupby
from typing import Any

import aiohttp
from aiohttp import web


class SGLangServer:
    """Translates requests for the engine at `engine_url`.

    Attributes:
        asked: (path, body) of all requests, in order.
        drops: fields that are left out of `meta_info`, as an older server would.
        before_update: awaited before weights are updated.
    """

    def __init__(self, engine_url: str, http: aiohttp.ClientSession) -> None:
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.drops: tuple[str, ...] = ()
        self.before_update: Callable[[], Awaitable[object]] | None = None
        self._engine_url = engine_url
        self._http = http
        self._paused = ""
        self._adapters: dict[str, str] = {}
        self._labels: dict[int, str] = {-1: "default"}  # of the engine's versions, which unlike SGLang's are bound for good

    def bodies(self, path: str) -> list[dict[str, Any]]:
        """What an endpoint was asked."""
        return [body for asked, body in self.asked if asked == path]

    async def answer(self, request: web.Request) -> web.Response:
        """Any request."""
        body = await request.json() if request.can_read_body else {}
        self.asked.append((request.path, body))
        handlers = {
            "/health": self._health, "/model_info": self._model_info, "/v1/models": self._models, "/generate": self._generate,
            "/pause_generation": self._pause, "/continue_generation": self._continue, "/update_weights_from_disk": self._update,
            "/load_lora_adapter": self._load, "/unload_lora_adapter": self._unload}
        if request.path not in handlers:
            return web.json_response({"detail": "Not Found"}, status=404)
        return await handlers[request.path](body)

    async def _call(self, path: str, body: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        async with self._http.request("GET" if body is None else "POST", self._engine_url + path, json=body) as response:
            return response.status, await response.json()

    def _label(self, version: int) -> str:
        return self._labels.get(version, str(version))

    async def _health(self, _: dict[str, Any]) -> web.Response:
        return web.Response()

    async def _model_info(self, _: dict[str, Any]) -> web.Response:
        label = self._label((await self._call("/health"))[1]["version"])
        return web.json_response({"model_path": "model", "is_generation": True, "weight_version": label})

    async def _models(self, _: dict[str, Any]) -> web.Response:
        base = {"id": "model", "object": "model", "root": "model", "parent": None}
        adapters = [{"id": name, "object": "model", "root": folder, "parent": "model"} for name, folder in self._adapters.items()]
        return web.json_response({"object": "list", "data": [base, *adapters]})

    async def _generate(self, body: dict[str, Any]) -> web.Response:
        adapter = body.get("lora_path", "")
        if adapter and adapter not in self._adapters:
            return web.json_response({"error": {"message": f"The following requested LoRA adapters are not loaded: {adapter}"}}, status=400)
        prompt, params = body["input_ids"], body["sampling_params"]
        renamed = {"max_tokens": params["max_new_tokens"], "seed": params.get("sampling_seed")}
        shared = {
            name: params[name] for name in ("temperature", "top_p", "top_k", "stop", "stop_token_ids", "ignore_eos") if name in params}
        num_top = body.get("top_logprobs_num", 0)
        status, answer = await self._call("/v1/completions", {
            "prompt": prompt, "logprobs": num_top, "return_token_ids": True, **renamed, **shared,
            **({"model": adapter} if adapter else {})})
        if status != 200:
            return web.json_response(answer, status=status)
        (choice,) = answer["choices"]
        logprobs = zip(choice["logprobs"]["token_logprobs"], choice["token_ids"], strict=True)
        spans, end = [], 0
        for version, tokens in groupby(choice["versions"]):
            start, end = end, end + len(list(tokens))
            spans.append({"version": self._label(version), "start": start, "end": end})
        meta = {
            "id": "1", "finish_reason": {"type": choice["finish_reason"]}, "prompt_tokens": len(prompt), "completion_tokens": end,
            "weight_version": spans[-1]["version"], "weight_versions": spans,
            "output_token_logprobs": [[logprob, token, None] for logprob, token in logprobs]}
        if num_top:
            meta["output_top_logprobs"] = [
                [[logprob, int(name.removeprefix("token_id:")), None] for name, logprob in row.items()]
                for row in choice["logprobs"]["top_logprobs"]]
        if body.get("logprob_start_len") == 0:
            score = (await self._call("/v1/score", {"tokens": prompt, "top_k": num_top} | ({"adapter": adapter} if adapter else {})))[1]
            meta["input_top_logprobs"] = [
                None, *([[logprob, token, None] for token, logprob in row] for row in score.get("top_logprobs", []))]
            meta["input_token_logprobs"] = [
                [logprob, token, None] for logprob, token in zip([None, *score["logprobs"]], prompt, strict=True)]
        meta = {name: value for name, value in meta.items() if name not in self.drops}
        return web.json_response({"text": choice["text"], "output_ids": choice["token_ids"], "meta_info": meta})

    async def _pause(self, body: dict[str, Any]) -> web.Response:
        self._paused = body["mode"]
        await self._call("/pause", {"mode": "keep"})
        return web.json_response({"status": "ok"})

    async def _continue(self, _: dict[str, Any]) -> web.Response:
        self._paused = ""
        await self._call("/resume", {})
        return web.json_response({"status": "ok"})

    async def _update(self, body: dict[str, Any]) -> web.Response:
        if self.before_update is not None:
            await self.before_update()
        if self._paused == "in_place" and body["flush_cache"] and (await self._call("/health"))[1]["running"]:
            return self._outcome("flush_cache failed: requests are running")
        version = 1000 + len(self._labels)
        status, answer = await self._call("/v1/weights/stage", {"version": version, "folder": body["model_path"]})
        if status != 200:
            return self._outcome(answer["error"]["message"])
        interrupt = {"": "drain", "retract": "recompute", "in_place": "keep"}[self._paused]
        self._labels[version] = body["weight_version"]
        await self._call("/v1/weights/switch", {"version": version, "interrupt": interrupt})
        return self._outcome("")

    async def _load(self, body: dict[str, Any]) -> web.Response:
        name, folder = body["lora_name"], body["lora_path"]
        if name in self._adapters:
            return self._adapter_outcome(f"LoRA with name {name} already exists")
        status, answer = await self._call("/v1/load_lora_adapter", body)
        if status != 200:
            return self._adapter_outcome(answer["error"]["message"])
        self._adapters[name] = folder
        return self._adapter_outcome("")

    async def _unload(self, body: dict[str, Any]) -> web.Response:
        if self._adapters.pop(body["lora_name"], None) is None:
            return self._adapter_outcome(f"LoRA with name {body['lora_name']} does not exist")
        await self._call("/v1/unload_lora_adapter", body)
        return self._adapter_outcome("")

    def _outcome(self, problem: str) -> web.Response:
        answer = {"success": not problem, "message": problem or "Succeeded", "num_paused_requests": 0}
        return web.json_response(answer, status=400 if problem else 200)

    def _adapter_outcome(self, problem: str) -> web.Response:
        answer = {"success": not problem, "error_message": problem or None, "loaded_adapters": self._adapters}
        return web.json_response(answer, status=400 if problem else 200)


@asynccontextmanager
async def serve_sglang(engine_url: str) -> AsyncIterator[tuple[SGLangServer, str]]:
    """Serve on a free port of this machine; gives the server and its URL."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        server = SGLangServer(engine_url, http)
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", server.answer)
        runner = web.AppRunner(app)
        await runner.setup()
        try:
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            yield server, f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()
