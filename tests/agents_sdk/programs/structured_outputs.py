"""Ask for structured outputs through openai-agents and pydantic-ai, over both of OpenAI's APIs; prints what each has got."""

import asyncio
import sys
from typing import Literal

from openai import AsyncOpenAI
from pydantic import BaseModel
from pydantic_ai import Agent as PydanticAgent
from pydantic_ai import NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.models.openai import OpenAIResponsesModel as PydanticResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

from agents import Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, set_tracing_disabled


class Answer(BaseModel):
    letter: Literal["x", "y"]


async def main() -> None:
    client = AsyncOpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none", max_retries=0)
    set_tracing_disabled(True)
    for kind in (OpenAIResponsesModel, OpenAIChatCompletionsModel):
        done = await Runner.run(Agent(name="a", model=kind("", client), output_type=Answer), "3?")
        print("openai-agents", kind.__name__, done.final_output.letter)
    for kind in (OpenAIChatModel, PydanticResponsesModel):
        agent = PydanticAgent(kind("", provider=OpenAIProvider(openai_client=client)), output_type=NativeOutput(Answer))
        print("pydantic-ai", kind.__name__, (await agent.run("3?")).output.letter)


asyncio.run(main())
