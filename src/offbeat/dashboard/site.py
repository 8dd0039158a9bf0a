"""The live page over HTTP: its files, and its queries of the runs. Read-only: every route takes GET alone.

Charts and tables come as HTML from the functions of the report, which escape everything; rollouts come as JSON, and are put in as text.
"""

import asyncio
import base64
import json
import math
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from offbeat.dashboard.access import AccessGate
from offbeat.dashboard.cards import cards_html, compared_cards
from offbeat.dashboard.conversation import messages_of
from offbeat.dashboard.library import RunLibrary
from offbeat.dashboard.processes import processes_html
from offbeat.dashboard.report import CHARTS_SCRIPT, STYLE, details_html, overview_html, subtitle, timeline_html
from offbeat.dashboard.rollout_filter import ORDERS, STATUSES, Filter
from offbeat.dashboard.steps import step_facts
from offbeat.data.image_store import find_pictures
from offbeat.data.stored_rollouts import Address, KeptTrajectory, find_group
from offbeat.errors import ConfigError, OffbeatError, UserError

AnswerQuery = Callable[[RunLibrary, Request], Any]
"""Answers a query of the page, such as "runs", with an object that JSON can hold."""

Endpoint = Callable[[Request], Awaitable[Response]]

_FOLDER = Path(__file__).parent
_MOST_COMPARED = 8
_PAGE = 60
_GROUPS = 8
_INTEGERS = ("min_step", "max_step", "min_length", "max_length", "min_version", "max_version")
_NUMBERS = ("min_reward", "max_reward")

T = TypeVar("T", int, float)


def make_site(library: RunLibrary, *, key: str) -> Starlette:
    """Create the application; `key` has to come with every request, and is empty if only this machine can reach the server."""
    page = (_FOLDER / "watch.html").read_text(encoding="utf-8")
    style = STYLE + (_FOLDER / "watch.css").read_text(encoding="utf-8")
    script = CHARTS_SCRIPT + (_FOLDER / "watch.js").read_text(encoding="utf-8")

    files = {"/": (page, "text/html"), "/watch.css": (style, "text/css"), "/watch.js": (script, "text/javascript")}
    asked = {
        "runs": _runs, "stamp": _stamp, "overview": _overview, "step": _one_step, "timeline": _timeline, "records": _records,
        "compare": _compare, "rollouts": _rollouts, "rollout": _rollout}
    endpoints = {path: _serving(*file) for path, file in files.items()} | {
        f"/api/{name}": _answering(answer, library) for name, answer in asked.items()}
    routes = [Route(path, endpoint, methods=["GET"]) for path, endpoint in endpoints.items()]
    return Starlette(routes=routes, middleware=[Middleware(AccessGate, key=key)])


class _EscapedJson(JSONResponse):
    """JSON with lone surrogates escaped, such as "\\ud83d"; UTF-8 cannot encode them, and a damaged file may hold some."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode(errors="backslashreplace")


def _serving(content: str, media_type: str) -> Endpoint:
    async def endpoint(_: Request) -> Response:
        return Response(content, media_type=media_type)

    return endpoint


def _answering(answer: AnswerQuery, library: RunLibrary) -> Endpoint:
    """Make an endpoint of a function, which is called on a thread because it reads files."""

    async def endpoint(http: Request) -> Response:
        try:
            return _EscapedJson(await asyncio.to_thread(answer, library, http))
        except UserError as exc:
            return _EscapedJson({"error": str(exc)}, 400)
        except OffbeatError as exc:
            return _EscapedJson({"error": str(exc)}, 500)

    return endpoint


def _runs(library: RunLibrary, _: Request) -> Any:
    return [asdict(each) for each in library.summaries()]


def _stamp(library: RunLibrary, http: Request) -> Any:
    return {"stamp": library.stamp(_name(http))}


def _overview(library: RunLibrary, http: Request) -> Any:
    run = library.read(_name(http))
    return {"subtitle": subtitle(run), "html": overview_html(run)}


def _one_step(library: RunLibrary, http: Request) -> Any:
    name, first = _name(http), _number_of(http, "first", int) or 0
    return step_facts(library.read(name), library.folder(name), step=_number_of(http, "step", int), first=max(first, 0), most=_GROUPS)


def _timeline(library: RunLibrary, http: Request) -> Any:
    run, is_live = library.read(_name(http)), library.is_live(_name(http))
    return {"html": processes_html(run, is_live=is_live) + timeline_html(run)}


def _records(library: RunLibrary, http: Request) -> Any:
    return {"html": details_html(library.read(_name(http))) or '<p class="empty">Nothing was recorded yet.</p>'}


def _compare(library: RunLibrary, http: Request) -> Any:
    names = list(dict.fromkeys(http.query_params.getlist("run")))
    if not 1 <= len(names) <= _MOST_COMPARED:
        raise ConfigError(f"between 1 and {_MOST_COMPARED} runs can be compared, got {len(names)}")
    cards = cards_html(compared_cards([library.read(name) for name in names]))
    empty = f'<p class="empty">{escape(", ".join(names))}: no metrics yet.</p>'
    return {"html": f'<div class="cards">{cards}</div>' if cards else empty}


def _rollouts(library: RunLibrary, http: Request) -> Any:
    """Answer with a page of rollouts, and how many there are."""
    index, progress = library.rollouts(_name(http))
    wanted, order = _filter(http), http.query_params.get("order", "newest")
    if order not in ORDERS:
        raise ConfigError(f"order must be one of {', '.join(ORDERS)}, got {order[:40]!r}")
    offset = _number_of(http, "offset", int) or 0
    found = index.find_rollouts(wanted, order=order, limit=_PAGE, offset=min(max(offset, 0), 10**9))
    return {
        "rollouts": [asdict(each) for each in found], "total": index.num_found(wanted), "page": _PAGE, "progress": asdict(progress),
        "reasons": index.reasons() if not offset else None}


def _rollout(library: RunLibrary, http: Request) -> Any:
    """Answer with one rollout, and the other samples of its group."""
    address = Address.parse(http.query_params.get("id", ""))
    group = find_group(library.folder(_name(http)), address)
    others = [
        {"address": str(Address(address.step, address.is_rejected, address.group, place)), "reward": t.reward, "advantage": t.advantage,
         "reason": t.reason, "length": t.num_generated, "agent": t.agent, "episode": t.episode, "preview": t.completion[:400]}
        for place, t in enumerate(group.trajectories)]
    shown = _shown(group.trajectories[address.place]) if group.trajectories else None
    if shown is not None:
        shown["images"] = {}
        for each, path in find_pictures(library.folder(_name(http)), shown["ids"]).items():
            with suppress(OSError):  # removed meanwhile, by `offbeat data prune`
                shown["images"][each] = f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}"
    facts = ("step", "prompt_id", "prompt", "answer", "rejected", "why", "drawn_again", "admitted_version")
    return {"address": str(address), "group": {name: getattr(group, name) for name in facts}, "samples": others, "rollout": shown}


def _shown(t: KeptTrajectory) -> dict[str, Any]:
    """Return a trajectory with its tokens as texts; values of tokens that the policy did not generate are null."""

    def generated(values: list[Any]) -> list[Any]:
        return [value if own else None for value, own in zip(values, t.loss_mask, strict=True)] if len(values) == len(t.tokens) else []

    logprobs = generated(t.rollout_logprobs)
    ratios = [
        None if new is None or old is None else round(math.exp(min(new - old, 20.0)), 4)
        for new, old in zip(generated(t.prox_logprobs), logprobs, strict=False)]
    return {
        "pieces": t.pieces, "messages": [asdict(message) for message in messages_of(t)], "ids": t.tokens, "logprobs": logprobs,
        "advantages": generated(t.advantages), "versions": generated(t.versions), "ratios": ratios, "reward": t.reward,
        "named_rewards": t.named_rewards, "advantage": t.advantage, "reason": t.reason, "trained": t.trained, "agent": t.agent,
        "episode": t.episode, "length": t.num_generated, "retries": t.num_retries, "malformed_calls": t.malformed_calls,
        "turn_rewards": [turn.reward for turn in t.turns]}


def _filter(http: Request) -> Filter:
    asked = http.query_params
    bounds: dict[str, Any] = {name: _number_of(http, name, int) for name in _INTEGERS}
    bounds |= {name: _number_of(http, name, float) for name in _NUMBERS}
    status = asked.get("status", "")
    if status and status not in STATUSES:
        raise ConfigError(f"status must be one of {', '.join(STATUSES)}, got {status[:40]!r}")
    same = asked.get("same_prompt", "")
    return Filter(
        **bounds, prompt=asked.get("prompt", ""), text=asked.get("text", ""), reason=asked.get("reason", ""), status=status,  # pyright: ignore[reportArgumentType]
        same_prompt=Address.parse(same) if same else None)


def _number_of(http: Request, name: str, kind: type[T]) -> T | None:
    text = http.query_params.get(name, "")
    if not text:
        return None
    try:
        value = kind(text)
    except ValueError as exc:
        raise ConfigError(f"{name} must be a number, got {text[:40]!r}") from exc
    if not -(2**53) <= value <= 2**53:
        raise ConfigError(f"{name} must be a number within 2^53, got {text[:40]!r}")
    return value


def _name(http: Request) -> str:
    return http.query_params.get("run", "")
