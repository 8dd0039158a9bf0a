"""An environment of verifiers 0.4: one question as a taskset, and a harness that calls the model with one tool."""

import json
from collections.abc import Iterator

import verifiers.v1 as vf
from openai import AsyncOpenAI

TOOLS = [{"type": "function", "function": {"name": "add", "description": "Add two numbers.", "parameters": {
    "type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]}}}]


class SumData(vf.TaskData):
    answer: str


class Sum(vf.Task[SumData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(self.data.answer in (trace.nodes[-1].message.content or ""))


class SumConfig(vf.TasksetConfig):
    task: vf.TaskConfig = vf.TaskConfig()


class Sums(vf.Taskset[Sum, SumConfig]):
    def load(self) -> Iterator[Sum]:
        yield Sum(SumData(prompt="What is 3 + 4?", answer="7"), self.config.task)


class Adder(vf.Harness[vf.HarnessConfig]):
    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, tool_interception_url=None) -> vf.ProgramResult:
        client = AsyncOpenAI(base_url=endpoint, api_key=secret)
        messages = [{"role": "user", "content": data.prompt}]
        for _ in range(4):
            answer = await client.chat.completions.create(model=ctx.model, messages=messages, tools=TOOLS)
            message = answer.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            if not message.tool_calls:
                break
            for call in message.tool_calls:
                try:
                    arguments = json.loads(call.function.arguments)
                    result = str(arguments["a"] + arguments["b"])
                except (KeyError, TypeError, ValueError) as error:
                    result = f"error: {error}"
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


__all__ = ["Adder", "Sums"]
