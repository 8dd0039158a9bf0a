"""The tool as a model is given it."""

import asyncio
import inspect

import pytest

from offbeat.agents.tools.python import python
from offbeat.agents.tools.sandbox import confinement


def test_it_is_a_typed_function_that_tells_the_model_what_it_does() -> None:
    assert str(inspect.signature(python)) == "(code: str) -> str"
    assert "no network" in (inspect.getdoc(python) or "")


@pytest.mark.skipif(confinement()[0] == "none", reason="this machine cannot confine programs")
def test_many_calls_at_once_each_have_their_own_answer() -> None:
    async def main() -> list[str]:
        return await asyncio.gather(*(asyncio.to_thread(python, f"{n} ** 2") for n in range(6)))

    assert asyncio.run(main()) == [str(n * n) for n in range(6)]
