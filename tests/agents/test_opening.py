"""Names of workflows."""

import asyncio
from contextlib import AsyncExitStack

import pytest
from pydantic import ValidationError

from chats import CHATML, words
from offbeat.agents.opening import open_workflow
from offbeat.agents.played import PlayedWorkflow
from offbeat.config.root import Config
from offbeat.data.tokenizer import character_tokenizer
from offbeat.errors import CodeError, ConfigError, ModelError
from offbeat.rollout.workflows.single_turn import single_turn
from offbeat.types import NoNotes


def open_named(workflow: str, tokenizer=None, **agent):
    config = Config.model_validate({"rollout": {"workflow": workflow}, "agent": agent})

    async def main():
        async with AsyncExitStack() as stack:
            return await open_workflow(stack, config, tokenizer=tokenizer or words(CHATML), log_dir=None, notes=NoNotes())

    return asyncio.run(main())


def test_short_and_dotted_names_lead_to_workflows() -> None:
    assert open_named("single_turn") is single_turn is open_named("offbeat.rollout.workflows.single_turn:single_turn")
    with pytest.raises(ValidationError, match="there is no workflow 'single_tern'; .* did you mean 'single_turn'"):
        open_named("single_tern")
    played = open_named("gym", environment="reasoning-gym:chain_sum", options=["tries=2"])
    assert isinstance(played, PlayedWorkflow) and played.pool.tools == ()


def test_mistakes_are_found_before_anything_is_played() -> None:
    with pytest.raises(CodeError, match="has no function 'nothing'"):
        open_named("tool_loop", tools=["json:nothing"])
    with pytest.raises(ConfigError, match="agent.options must each be NAME=VALUE"):
        open_named("gym", environment="reasoning-gym:chain_sum", options=["tries"])
    with pytest.raises(ModelError, match="chat template"):
        open_named("gym", tokenizer=character_tokenizer(chat_template=None), environment="reasoning-gym:chain_sum")
