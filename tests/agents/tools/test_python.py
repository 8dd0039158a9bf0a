"""The tool as a model is given it."""

import asyncio
import importlib
import inspect
import sys
from pathlib import Path

import pytest

from offbeat.agents.pool import PlayPool
from offbeat.agents.tools import sandbox
from offbeat.agents.worker import PlayLoadRequest
from offbeat.config.agent import AgentConfig
from offbeat.errors import MachineError

NAME = "offbeat.agents.tools.python"


@pytest.mark.skipif(sandbox.confinement()[0] == "none", reason="this machine cannot confine programs")
def test_it_is_a_typed_function_and_many_calls_at_once_each_have_their_own_answer() -> None:
    python = importlib.import_module(NAME).python
    assert str(inspect.signature(python)) == "(code: str) -> str"
    assert "no network" in (inspect.getdoc(python) or "")

    async def main() -> list[str]:
        return await asyncio.gather(*(asyncio.to_thread(python, f"{n} ** 2") for n in range(6)))

    assert asyncio.run(main()) == [str(n * n) for n in range(6)]


def test_a_machine_that_cannot_confine_refuses_the_tool_when_it_is_loaded(monkeypatch) -> None:
    monkeypatch.setattr(sandbox, "confinement", lambda: ("none", "unshare: Operation not permitted"))
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    with pytest.raises(MachineError, match="cannot confine programs that a model writes: unshare"):
        importlib.import_module(NAME)


@pytest.mark.skipif(sandbox.confinement()[0] == "none", reason="this machine cannot confine programs")
def test_the_log_of_its_process_says_once_how_programs_are_confined(tmp_path: Path) -> None:
    async def main() -> None:
        async with PlayPool(PlayLoadRequest(stage=(f"{NAME}:python",), tools=True), AgentConfig(), log_dir=tmp_path):
            pass

    asyncio.run(main())
    said = sandbox.described(*sandbox.confinement())[0]
    assert (tmp_path / "play-0.log").read_text().count(said) == 1
