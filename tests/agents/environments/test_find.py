"""Names of environments, and each library's adapter where the library is installed."""

import asyncio
import importlib.util

import pytest

from offbeat.agents.environment import View
from offbeat.agents.environments.find import ADAPTERS, find_stage, read_options
from offbeat.agents.environments.own import OwnStage
from offbeat.agents.environments.tools import ToolStage
from offbeat.chat.messages import Message, ToolCall
from offbeat.data.row import Row
from offbeat.errors import CodeError, ConfigError, MissingExtraError

MODULES = {"textarena": "textarena", "skyrl-gym": "skyrl_gym", "gem": "gem", "openenv": "openenv", "reasoning-gym": "reasoning_gym"}


def play(name: str, answers: list[str], row: Row = Row("2+2?", "4"), *, options: list[str] = [], seed: int = 1) -> list[View]:  # noqa: B006, B008
    """What an environment says, one view for its opening and for each answer."""
    async def main() -> list[View]:
        stage = find_stage([name], options, step_timeout_s=10, tools=False)
        await stage.open()
        environment = stage.environment()
        views = [await environment.reset(row, seed)]
        for answer in answers:
            views.append(await environment.step(Message("assistant", answer)))
        await environment.close()
        return views

    return asyncio.run(main())


def needs(library: str) -> None:
    if importlib.util.find_spec(MODULES[library]) is None:
        pytest.skip(f"{library} is not installed")


def test_options_are_read_as_numbers_truths_and_text() -> None:
    assert read_options(["a=2", "b=0.5", "c=true", "d=x=y"]) == {"a": 2, "b": 0.5, "c": True, "d": "x=y"}
    with pytest.raises(ConfigError, match="got 'a'"):
        read_options(["a"])


@pytest.mark.parametrize("library", ADAPTERS)
def test_a_library_that_is_missing_is_named_with_its_package(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, MODULES[library], None)
    monkeypatch.delitem(__import__("sys").modules, f"offbeat.agents.environments.{ADAPTERS[library][0]}", raising=False)
    with pytest.raises(MissingExtraError, match=f"needs {ADAPTERS[library][2]}, which is not installed .*run pip install"):
        find_stage([f"{library}:x"], [], step_timeout_s=1, tools=False)


def test_a_class_that_is_no_environment_is_refused() -> None:
    with pytest.raises(CodeError, match=r"'collections:Counter' has no method reset; it needs reset\(row, seed\) and step\(text\)"):
        find_stage(["collections:Counter"], [], step_timeout_s=1, tools=False)


def test_an_environment_with_options_keeps_its_tools() -> None:
    class Env:
        @staticmethod
        def look(where: str) -> str:
            """Look."""

        tools = (look,)

        def __init__(self, size: int) -> None:
            self.size = size

        def reset(self, row, seed):
            return f"size {self.size}"

    stage = OwnStage(Env, name="Env", options={"size": 3})
    assert [tool.name for tool in stage.tools] == ["look"]
    assert asyncio.run(stage.environment().reset(Row("", ""), 0)).messages[0].content == "size 3"


def test_reasoning_gym_gives_further_tries() -> None:
    needs("reasoning-gym")
    opened, wrong, right = play("reasoning-gym:chain_sum", ["no idea", "<answer>x</answer>"], options=["tries=2", "max_terms=2"])
    assert opened.messages[0].content.startswith("State the final answer") and not wrong.done and right.done
    question = play("reasoning-gym:chain_sum", [], options=["max_terms=2"], seed=5)[0].messages[0].content
    result = str(eval(question.rpartition(":")[2].rstrip("= ?")))  # noqa: S307 - a sum of numbers
    [_, view] = play("reasoning-gym:chain_sum", [f"It is {result}"], options=["max_terms=2"], seed=5)
    assert view.done and view.outcome == {"": 1.0}


def test_textarena_has_a_conversation_for_each_player() -> None:
    needs("textarena")
    views = play("textarena:TicTacToe-v0", ["[4]", "[0]", "[1]", "[2]", "[7]"])
    assert [view.player for view in views] == ["player 0", "player 1"] * 2 + ["player 0", ""]
    assert views[-1].outcome == {"player 0": 1.0, "player 1": -1.0}
    assert "You are Player 0" in views[0].messages[0].content and "You are Player 1" in views[1].messages[0].content
    assert "You are Player" not in views[2].messages[0].content, "what was said before is not said again"


def test_skyrl_gym_judges_by_the_rows_answer() -> None:
    needs("skyrl-gym")
    opened, wrong, right = play("skyrl-gym:gsm8k_multi_turn", ["#### 5", "#### 4"])
    assert opened.messages == (Message("user", "2+2?"),) and not wrong.done and right.outcome == {"": 1.0}


def test_gem_games_are_played() -> None:
    needs("gem")
    opened, first = play("gem:game:GuessTheNumber-v0-easy", [r"\boxed{3}"], seed=2)
    assert "guess" in opened.messages[0].content.lower() and (first.done or first.messages)


def test_tools_are_played_on_with_the_calls_and_thoughts_that_a_row_begins_with() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    called = {"role": "assistant", "content": "", "tool_calls": [call], "reasoning_content": "hm", "weight": 0}
    prompt = (
        {"role": "user", "content": "?"}, called,
        {"role": "tool", "content": "3", "tool_call_id": "1", "name": "add"})
    view = asyncio.run(ToolStage((), None, (), timeout_s=1).environment().reset(Row(prompt, ""), 0))
    assert view.messages == (
        Message("user", "?"), Message("assistant", calls=(ToolCall("1", "add", '{"a": 1}'),), reasoning="hm"),
        Message("tool", "3", call_id="1", name="add"))
