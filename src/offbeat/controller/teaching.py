"""Who scores a batch as its teacher: the model of [teacher] on the train ranks or on an engine, or the policy itself. Torch-free.

All of them are called by the score step on every process that runs the loop, with the batch that this process has drawn.
"""

import asyncio
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from offbeat.aio import gather_all
from offbeat.algorithms.distillation import TeacherScores
from offbeat.config.data import DataConfig
from offbeat.config.teacher import ANSWER, PROMPT, TeacherConfig
from offbeat.data.batch import Batch
from offbeat.data.prompt import render
from offbeat.data.ranges import bounds, gather_ranges
from offbeat.data.row import Row
from offbeat.data.tokenizer import Tokenizer
from offbeat.errors import ConfigError, DeadlineError, EngineError, RefusedError
from offbeat.inference.client import EngineClient
from offbeat.inference.sampling import PromptScore, Sampling
from offbeat.ranks.trainers import Trainers
from offbeat.trainer.messages import Policy

RowOf = Callable[[int], Row]
"""Returns the row of a group id: its prompt is the one that the group's sequences were sampled from."""

_PROBED_TOKENS = 32
_FIRST_PAUSE_S = 0.5


class Teacher(Protocol):
    """Scores the targets of batches."""

    async def score(self, batch: Batch, row_of: RowOf) -> TeacherScores:
        """Score a batch of `make_batch`, which may be empty. In SPMD mode every rank calls this with its own.

        Raises:
            RunError: ranks or the engine failed.
        """
        ...


class RankTeacher:
    """The model of `teacher.path`, which the train ranks hold beside the policy."""

    def __init__(self, trainers: Trainers, *, top_k: int) -> None:
        """`trainers` hold the part "teacher"."""
        self._trainers = trainers
        self._top_k = top_k

    async def score(self, batch: Batch, row_of: RowOf) -> TeacherScores:  # noqa: ARG002
        columns = (await self._trainers.score(batch)).columns
        nothing = np.zeros((batch.num_targets, 0), np.float32)
        tokens, logprobs = (
            np.stack([columns[f"top_{what}_{i}"] for i in range(self._top_k)], axis=1) if self._top_k else nothing
            for what in ("tokens", "logprobs"))
        return TeacherScores(columns["logprobs"], np.zeros(len(batch), np.bool_), tokens.astype(np.int32), logprobs)


class EngineTeacher:
    """The model that an engine serves at `teacher.url`."""

    def __init__(self, client: EngineClient, config: TeacherConfig) -> None:
        self._client = client
        self._config = config
        self._slots = asyncio.Semaphore(config.max_concurrent)

    async def check(self, tokenizer: Tokenizer, prompt: tuple[int, ...]) -> None:
        """Raise ConfigError unless the engine scores the policy's tokens, and both decode its continuation of `prompt` to the same text."""
        timeout_s = self._config.timeout_s
        try:
            await self._client.score((*prompt, *prompt)[: max(len(prompt), 2)], top_k=self._config.top_k, timeout_s=timeout_s)
            sampling = Sampling(_PROBED_TOKENS, seed=0, ignore_eos=True)
            (sample,) = await self._client.generate(prompt, sampling, n=1, timeout_s=timeout_s)
        except (EngineError, DeadlineError) as exc:
            raise ConfigError(f"teacher.url names {self._client.url}, but {exc}") from exc
        ours = tokenizer.decode(sample.token_ids)
        if _letters(ours) != _letters(sample.text):
            raise ConfigError(
                f"teacher.url = {self._client.url!r} has another tokenizer than the policy: tokens that it reads as {sample.text[:40]!r}"
                f" are {ours[:40]!r} here; give a teacher of the policy's family")

    async def score(self, batch: Batch, row_of: RowOf) -> TeacherScores:  # noqa: ARG002
        """See `Teacher.score`. A sequence that fails on the engine is left out; raises EngineError if all do."""
        found = await gather_all(
            self._score_one(tuple(batch.tokens[start:stop].tolist()))
            for start, stop in zip(batch.offsets[:-1], batch.offsets[1:], strict=True))
        if found and not any(isinstance(one, PromptScore) for one in found):
            raise EngineError(f"the teacher scored none of {len(found)} samples; the first: {found[0]}")
        scores = TeacherScores(
            np.full(batch.num_targets, np.nan, np.float32), np.zeros(len(batch), np.bool_),
            np.zeros((batch.num_targets, self._config.top_k), np.int32),
            np.full((batch.num_targets, self._config.top_k), -np.inf, np.float32))
        for i, one in enumerate(found):
            if isinstance(one, PromptScore):
                _put(scores, batch, i, one)
        return scores

    async def _score_one(self, tokens: tuple[int, ...]) -> PromptScore | EngineError | DeadlineError:
        """Score one sequence, or return why it cannot be scored."""
        async with self._slots:
            for attempt in range(self._config.max_retries + 1):
                if attempt:
                    await asyncio.sleep(_FIRST_PAUSE_S * 2 ** (attempt - 1))
                try:
                    return await self._client.score(tokens, top_k=self._config.top_k, timeout_s=self._config.timeout_s)
                except RefusedError as exc:
                    return exc
                except (EngineError, DeadlineError) as exc:
                    error = exc
            return error


def _put(scores: TeacherScores, batch: Batch, i: int, found: PromptScore) -> None:
    """Write the teacher's log-probabilities of sequence i to the entries of its targets."""
    for m in range(batch.target_offsets[i], batch.target_offsets[i + 1]):
        place = int(batch.positions[m] - batch.offsets[i]) + 1
        scores.logprobs[m] = found.logprobs[place]
        for rank, (token, logprob) in enumerate(found.top[place] if found.top else ()):
            scores.top_tokens[m, rank], scores.top_logprobs[m, rank] = token, logprob


def _letters(text: str) -> str:
    """Return a text without white space, which engines strip, and without halves of characters at its ends."""
    return "".join(text.split()).replace("\ufffd", "")


@dataclass(frozen=True)
class Contexts:
    """How the teacher sees a prompt: with its answer; a context and an answer may have `max_tokens` tokens together."""

    tokenizer: Tokenizer
    data: DataConfig
    template: str
    max_tokens: int

    def prompt(self, row: Row) -> list[int]:
        """Return the token ids of a row's prompt with its answer in it."""
        def shown(prompt: str) -> str:
            texts = {PROMPT: prompt, ANSWER: row.solution or row.answer}
            return re.sub("|".join(map(re.escape, texts)), lambda match: texts[match[0]], self.template)

        if isinstance(row.prompt, str):
            return render(replace(row, prompt=shown(row.prompt)), self.tokenizer, self.data)
        last = max((i for i, message in enumerate(row.prompt) if message["role"] == "user"), default=len(row.prompt) - 1)
        messages = tuple(message | {"content": shown(message["content"])} if i == last else message for i, message in enumerate(row.prompt))
        return render(replace(row, prompt=messages), self.tokenizer, self.data)

    def batch(self, batch: Batch, row_of: RowOf) -> tuple[Batch, np.ndarray]:
        """Return the N sequences that fit, with other prompts and the same targets; and their indices, [N] int64 such as [0, 1, 3]."""
        prompts = {group: self.prompt(row_of(group)) for group in sorted(set(batch.group_ids.tolist()))}
        kept, tokens, positions, prefix_lens = [], [], [], []
        start = 0
        for i, group in enumerate(batch.group_ids.tolist()):
            own = batch.positions[batch.target_offsets[i] : batch.target_offsets[i + 1]]
            first = int(own[0]) + 1 if len(own) else int(batch.offsets[i + 1])  # where the answer begins
            prompt, answer = prompts[group], batch.tokens[first : batch.offsets[i + 1]]
            if len(prompt) + len(answer) > self.max_tokens:
                continue
            kept.append(i)
            tokens.append(np.concatenate([np.array(prompt, np.int32), answer]))
            positions.append(own - first + len(prompt) + start)
            prefix_lens.append(len(prompt))
            start += len(tokens[-1])
        which = np.array(kept, np.int64)
        targets = gather_ranges(batch.target_offsets, which)
        return Batch(
            tokens=np.concatenate([np.zeros(0, np.int32), *tokens]), offsets=bounds([len(each) for each in tokens]),
            positions=np.concatenate([np.zeros(0, np.int64), *positions]), targets=batch.targets[targets],
            columns={"loss_weights": batch.columns["loss_weights"][targets]},
            sequences={"group_ids": batch.group_ids[which], "prefix_lens": np.array(prefix_lens, np.int64)}, losses=batch.losses), which


class SelfTeacher:
    """The policy, or its reference, with the answer in its context."""

    def __init__(self, trainers: Trainers, contexts: Contexts, *, of: Policy) -> None:
        self._trainers = trainers
        self._contexts = contexts
        self._of: Policy = of

    async def score(self, batch: Batch, row_of: RowOf) -> TeacherScores:
        """See `Teacher.score`. A sequence whose context is too long is left out."""
        shown, kept = self._contexts.batch(batch, row_of)
        found = (await self._trainers.score(shown, of=self._of)).columns["logprobs"]
        logprobs, too_long = np.full(batch.num_targets, np.nan, np.float32), np.ones(len(batch), np.bool_)
        logprobs[gather_ranges(batch.target_offsets, kept)] = found
        too_long[kept] = False
        return TeacherScores.of_targets(logprobs, too_long)
