"""A taskset of verifiers 0.4, with a harness in this process."""
import verifiers.v1 as vf
from openai import AsyncOpenAI


class Data(vf.TaskData):
    answer: str


class Shout(vf.Task[Data, vf.State, vf.TaskConfig]):
    @vf.reward
    async def loud(self, trace) -> float:
        return 1.0


class Shouts(vf.Taskset[Shout, vf.TasksetConfig]):
    def load(self):
        for i in range(4):
            yield Shout(Data(prompt=f"word {i}", answer=str(i)), self.config.task)


class InProcess(vf.Harness):
    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, tool_interception_url=None):
        client = AsyncOpenAI(base_url=endpoint, api_key=secret)
        messages = [{"role": "user", "content": data.prompt}]
        for _ in range(2):
            answer = await client.chat.completions.create(model=ctx.model, messages=messages)
            messages += [{"role": "assistant", "content": answer.choices[0].message.content}, {"role": "user", "content": "louder"}]
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


__all__ = ["Shouts", "InProcess"]
