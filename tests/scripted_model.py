"""A model that says what a test wants: for tests of episodes, which need certain answers.

Its versions and log-probabilities differ from call to call, so that a test sees whether they come through.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from chats import CHATML, words
from offbeat.agents.opening import open_workflow
from offbeat.config.root import Config
from offbeat.data.row import Row
from offbeat.data.tokenizer import Tokenizer
from offbeat.data.trajectory import Trajectory
from offbeat.inference.sampling import Sample, Sampling
from offbeat.rollout.accounts import Accounts
from offbeat.rollout.episode import Episode
from offbeat.types import NoNotes


@dataclass
class ScriptedModel:
    """Answers by a function from the text of the prompt; `calls` holds all prompts and samples, `accounts` where the time went."""

    tokenizer: Tokenizer
    say: Callable[[str], str]
    latency_s: float = 0.0
    calls: list[tuple[tuple[int, ...], Sample]] = field(default_factory=list)
    accounts: Accounts = field(default_factory=Accounts)

    async def generate(self, prompt: tuple[int, ...], sampling: Sampling, *, n: int, session: str = "") -> list[Sample]:
        await asyncio.sleep(self.latency_s)
        return [self._sample(prompt, sampling) for _ in range(n)]

    def _sample(self, prompt: tuple[int, ...], sampling: Sampling) -> Sample:
        text = self.say(self.tokenizer.decode(prompt, skip_special_tokens=False))
        ids = [*self.tokenizer.encode(text), self.tokenizer.eos_token_id]
        reason = "stop" if len(ids) <= sampling.max_new_tokens else "length"
        ids = ids[: sampling.max_new_tokens]
        number = len(self.calls)
        sample = Sample(
            tuple(ids), tuple(-0.001 * (number + 1) - 1e-5 * i for i in range(len(ids))), (number,) * len(ids), text, reason)
        self.calls.append((prompt, sample))
        return sample

    def episode(
        self, config: Config, row: Row, *, group_size: int = 1, score: Callable[[str], float] = len, context: int = 4096,
    ) -> Episode:
        """An episode of this model; `score` judges texts."""
        async def score_all(texts: Sequence[str], _row: Row) -> list[float]:
            return [float(score(text)) for text in texts]

        sampling = Sampling(config.rollout.max_new_tokens, stop_token_ids=(self.tokenizer.eos_token_id,))
        return Episode(
            row, (), group_size, sampling, self.generate, score_all, self.tokenizer, context, account=partial(self.accounts.open, "0:0"),
            measured=self.accounts.measures.add)


def play_agent(
    row: Row, *, group_size: int = 2, say: Callable[[str], str] = lambda _: "hello", log_dir: Path | None = None, latency_s: float = 0.0,
    **agent,
) -> tuple[list[Trajectory], ScriptedModel]:
    """Play one group of rollout.workflow = "agent", with settings of [agent]; returns also the model that answered."""
    tokenizer = words(CHATML)
    config = Config.model_validate({
        "rollout": {"workflow": "agent", "max_new_tokens": 100}, "agent": agent, "train": {"max_tokens_per_microbatch": 100_000}})
    model = ScriptedModel(tokenizer, say, latency_s)

    async def main() -> list[Trajectory]:
        async with AsyncExitStack() as stack:
            plays = await open_workflow(stack, config, tokenizer=tokenizer, log_dir=log_dir, notes=NoNotes())
            return list(await plays(model.episode(config, row, group_size=group_size)))

    return asyncio.run(main()), model
