"""docs/http.md lists exactly the routes of the three servers."""

import re
from pathlib import Path
from unittest.mock import MagicMock

from starlette.routing import Route

from offbeat.agents.proxy import Proxy
from offbeat.data.tokenizer import Tokenizer
from offbeat.engine.chats import Chats
from offbeat.engine.completion_endpoints import CompletionEndpoints
from offbeat.engine.served_models import ServedModels
from offbeat.engine.server import EngineServer
from offbeat.service.app.assembly import FrontSettings, open_front

PAGE = (Path(__file__).parents[1] / "docs" / "http.md").read_text(encoding="utf-8")


def listed(title: str) -> set[tuple[str, str]]:
    """The routes in the tables below a heading of the second level, as method and path."""
    section = PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    return {(method, path) for method, path in re.findall(r"^\| `([A-Z]+) ([^`]+)` \|", section, re.MULTILINE)}


def of(routes) -> set[tuple[str, str]]:
    """Method and path of routes; Starlette adds HEAD to every GET."""
    return {(method, route.path) for route in routes if isinstance(route, Route) for method in (route.methods or {"GET"}) - {"HEAD"}}


def test_the_engines_routes_are_listed():
    server = MagicMock()
    server._completions = CompletionEndpoints(MagicMock(), MagicMock(), MagicMock(), max_queued=1)
    server._chats = Chats(MagicMock(), MagicMock(), MagicMock())
    server._models = ServedModels(MagicMock(), folder="m")
    server._guarded = lambda handler, _: handler
    assert of(EngineServer._routes(server)) == listed("The embedded engine")


def test_the_proxys_routes_are_listed_at_the_root_and_exist_below_a_session_too():
    routes = of(Proxy(MagicMock(), MagicMock())._routes())
    assert {route for route in routes if not route[1].startswith("/sessions/")} == listed("The recording proxy")
    assert routes == {(method, before + path) for method, path in listed("The recording proxy") for before in ("", "/sessions/{key}")}


def test_the_services_routes_are_listed():
    front = open_front(
        MagicMock(), MagicMock(), MagicMock(), tokenizer=Tokenizer(MagicMock(), "m"), keys=MagicMock(),
        settings=FrontSettings(max_body_bytes=1))
    assert of(front.app.routes) == listed("The service")
