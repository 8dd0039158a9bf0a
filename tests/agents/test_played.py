"""The loop of environments and tools: what the model is given and what is trained on, from real processes of user code."""

import asyncio
import json
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

import numpy as np
import pytest

from chats import CHATML, words
from offbeat.agents.opening import open_workflow
from offbeat.config.root import Config
from offbeat.data.row import Row
from offbeat.data.trajectory import Trajectory
from offbeat.errors import CodeError
from offbeat.types import NoNotes
from scripted_model import ScriptedModel

SUPPORT = Path(__file__).parents[1] / "support"
CODE = SUPPORT / "playing.py"
TOKENIZER = words(CHATML)
HERMES_CALL = '<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def call(name: str, **arguments) -> str:
    return HERMES_CALL.format(name=name, arguments=json.dumps(arguments))


def play(
    say: Callable[[str], str], row: Row, *, group_size: int = 1, score: Callable[[str], float] = len, context: int = 8192,
    max_new_tokens: int = 200, latency_s: float = 0.0, **agent,
) -> tuple[list[Trajectory], ScriptedModel]:
    """Play one group, with settings of [agent]."""
    workflow = "tool_loop" if "tools" in agent else "gym"
    config = Config.model_validate({
        "rollout": {"workflow": workflow, "max_new_tokens": max_new_tokens}, "agent": agent,
        "train": {"max_tokens_per_microbatch": 100_000}})
    model = ScriptedModel(TOKENIZER, say, latency_s)

    async def main() -> list[Trajectory]:
        async with AsyncExitStack() as stack:
            plays = await open_workflow(stack, config, tokenizer=TOKENIZER, log_dir=None, notes=NoNotes())
            episode = model.episode(config, row, group_size=group_size, score=score, context=context)
            return list(await plays(episode))

    return asyncio.run(main()), model


def check_exact(trajectories: list[Trajectory], model: ScriptedModel) -> None:
    """Each sampled token is trained once, exactly as it was sampled, after exactly the prompt that it was sampled for."""
    found = []
    for t in trajectories:
        start = 0
        for turn in t.turns:
            mask = t.loss_mask[start : turn.end]
            first = start + int(np.argmax(mask))
            assert mask[first - start :].all(), "the sampled tokens of a turn end it"
            found.append((tuple(t.tokens[:first]), tuple(t.tokens[first : turn.end]), tuple(t.versions[first : turn.end])))
            start = turn.end
        assert t.loss_mask[start:].sum() == 0
    wanted = [(prompt, sample.token_ids, sample.versions) for prompt, sample in model.calls]
    assert sorted(found) == sorted(wanted)


def said(prompt: tuple[int, ...]) -> str:
    return TOKENIZER.decode(prompt, skip_special_tokens=False)


def test_an_environment_of_a_user_answers_each_turn_and_rewards_it() -> None:
    [t], model = play(lambda text: "7" if "no" in text else "3", Row("which?", "", {"seed": "17"}), environment=f"{CODE}:Guess")
    check_exact([t], model)
    assert [turn.reward for turn in t.turns] == [0.25, 0.0] and t.reward == 0.25
    spent = model.accounts.take_stats().values()
    assert spent["rollout/model_share"] > 0 and spent["rollout/tool_share"] > spent["rollout/queue_share"]
    assert said(model.calls[1][0]) == (
        "<|im_start|>system\nguess<|im_end|>\n<|im_start|>user\nwhich?<|im_end|>\n<|im_start|>assistant\n3<|im_end|>\n"
        "<|im_start|>user\nno<|im_end|>\n<|im_start|>assistant\n")


def test_the_deadline_of_an_episode_does_not_count_its_requests_to_a_busy_engine() -> None:
    row = Row("which?", "", {"seed": "17"})
    [t], model = play(lambda text: "7" if "no" in text else "3", row, environment=f"{CODE}:Guess", latency_s=1.5, timeout_s=2.0)
    assert len(model.calls) == 2 and t.reward == 0.25


def test_options_reach_the_environment_and_one_that_is_cut_ends_without_an_outcome() -> None:
    [t], model = play(lambda _: "x", Row("which?", "", {"seed": "17"}), environment=f"{CODE}:Guess", options=["tries=2"])
    assert len(model.calls) == 2 and t.reward == 0.0
    [t], model = play(lambda _: "5", Row("which?", "", {"seed": "17"}), environment=f"{CODE}:Guess", options=["tries=9"], max_turns=4)
    assert len(model.calls) == 4 and t.reward == 0.0 and [turn.reward for turn in t.turns] == [0.25] * 4
    check_exact([t], model)
    [t], model = play(lambda _: "5" * 30, Row("which?", "", {"seed": "17"}), environment=f"{CODE}:Guess", options=["tries=9"], context=150)
    assert 1 < len(model.calls) < 9 and len(t) <= 150


def test_typed_functions_are_tools_whose_results_and_mistakes_the_model_reads() -> None:
    answers = iter([
        "let me see " + call("add", a=2, b=3) + call("look_up", words=["ab", "c"]), call("add", b=1), call("subtract", a=1),
        "the sum is 5"])
    [t], model = play(
        lambda _: next(answers), Row("2+3?", "5"), tools=[f"{CODE}:add", f"{CODE}:look_up"], score=lambda text: len(text) / 100)
    check_exact([t], model)
    assert t.reward == pytest.approx(0.12) and t.malformed_calls == 0
    last = said(model.calls[-1][0])
    assert '"name": "add", "description": "Add two numbers."' in last and '"the first number, which may be negative"' in last
    assert "<tool_response>\n5\n</tool_response>\n<tool_response>\n{\"ab\": 2, \"c\": 1}\n</tool_response>" in last
    assert "Error: a: Field required" in last and "Error: there is no tool 'subtract'; there are add, look_up" in last


def test_a_call_that_cannot_be_read_is_text_and_is_counted() -> None:
    [t], model = play(lambda _: '<tool_call>\n{"name": "add", "arguments": {"a": \n</tool_call>', Row("2+3?", "5"), tools=[f"{CODE}:add"])
    assert len(model.calls) == 1 and t.malformed_calls == 1
    check_exact([t], model)


def test_a_slow_tool_is_given_up_and_the_model_told() -> None:
    answers = iter([call("slow", seconds=2), "never mind"])
    [t], model = play(lambda _: next(answers), Row("go", ""), tools=[f"{CODE}:slow"], step_timeout_s=0.5)
    assert "Error: it did not answer within 0.5 s" in said(model.calls[1][0]) and t.unusable is None


def test_a_class_with_tools_is_an_environment_for_each_episode() -> None:
    trajectories, model = play(
        lambda text: "done" if "It is 6" in text else call("increment", by=3), Row("count", "", {"start": "0"}), group_size=3,
        tools=[f"{CODE}:Counter"])
    assert [t.reward for t in trajectories] == [6.0] * 3 and [t.episode for t in trajectories] == [0, 1, 2]
    check_exact(trajectories, model)
    assert "<|im_start|>user\ncount It is 0.<|im_end|>" in said(model.calls[0][0])


def test_an_episode_that_fails_costs_only_itself_and_a_group_of_failures_is_one() -> None:
    turn = iter(range(100))
    trajectories, _ = play(
        lambda _: "boom" if next(turn) == 1 else "7", Row("which?", ""), group_size=3, environment=f"{SUPPORT}/playing_failures.py:Fragile")
    assert sorted(t.unusable or "" for t in trajectories) == ["", "", "episode failed"]
    assert "Fragile raised RuntimeError: it broke at" in next(t.reason for t in trajectories if t.unusable)
    with pytest.raises(CodeError, match="it broke"):
        play(lambda _: "boom", Row("which?", ""), group_size=3, environment=f"{SUPPORT}/playing_failures.py:Fragile")
    with pytest.raises(CodeError, match="must return what the model sees next, a reward and whether it is over, got 'no'"):
        play(lambda _: "x", Row("which?", ""), environment=f"{CODE}:Wrong")


def test_an_environment_that_says_nothing_is_told(tmp_path: Path) -> None:
    code = tmp_path / "mute.py"
    code.write_text("class Mute:\n    def reset(self, row, seed): return 'go'\n    def step(self, text): return None, 0.0, False\n")
    with pytest.raises(CodeError, match="must return a message for the next player"):
        play(lambda _: "x", Row("", ""), environment=f"{code}:Mute")


def test_players_have_conversations_roles_and_outcomes_of_their_own() -> None:
    trajectories, model = play(lambda _: "1", Row("nim", ""), environment=f"{SUPPORT}/playing_failures.py:Nim", max_turns=20)
    check_exact(trajectories, model)
    assert {t.agent: t.reward for t in trajectories} == {"first": 1.0, "second": -1.0}
    orders = sorted(turn.order for t in trajectories for turn in t.turns)
    assert orders == list(range(len(model.calls))) and {t.episode for t in trajectories} == {0}
    assert {t.turns[0].order for t in trajectories} == {0, 1}


def test_long_results_lose_their_middle() -> None:
    answers = iter([call("look_up", words=["a" * 3000]), "ok"])
    _, model = play(
        lambda _: next(answers), Row("go", ""), tools=[f"{CODE}:look_up"], max_new_tokens=5000, context=20_000, max_result_chars=100)
    assert "characters left out]" in said(model.calls[1][0]).rpartition("<tool_response>")[2]
