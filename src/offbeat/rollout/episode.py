"""Input and output of workflows.

A workflow is an async function, `async def workflow(episode: Episode) -> Sequence[Trajectory]`: it plays the G samples of one prompt and
may call the engines and the reward as often as it likes. `builder.TrajectoryBuilder` builds the trajectories that it returns.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from offbeat.aio import HaltingClock
from offbeat.data.row import Row
from offbeat.data.tokenizer import Tokenizer
from offbeat.data.trajectory import Trajectory
from offbeat.inference.sampling import Sample, Sampling
from offbeat.rollout.accounts import Account
from offbeat.user_code.places import Waiting, on_the_clock


class Generate(Protocol):
    """Generates n continuations of a prompt of token IDs. Calls of one session, such as a chat's, go to one engine if the load allows."""

    def __call__(self, prompt: tuple[int, ...], sampling: Sampling, *, n: int, session: str = "") -> Awaitable[list[Sample]]: ...


@dataclass(frozen=True)
class Episode:
    """One prompt to play.

    Attributes:
        row: the dataset's row, including the reference answer.
        prompt: token IDs of the prompt, with the chat template applied.
        group_size: number of samples wanted, G.
        sampling: the configured sampling parameters.
        generate: calls the engines.
        score: returns one reward per completion, from the reward processes; the sum of several rewards that have names carries them
            (`NamedReward`); where scoring failed, a NaN with the reason (`FailedReward`), which makes a trajectory that is not trained on.
        tokenizer: encodes further turns.
        context: largest number of tokens of a prompt and its `max_new_tokens` together; `generate` refuses more.
        off_the_clock: waits for something that is no part of playing, such as a place to play in; it does not count towards the group's
            deadline.
        measured: takes numbers by name that were measured of one sample beside its reward; their means over a step are metrics.
        timeout_s: seconds for the group, `rollout.episode_timeout_s`.
        engines: the clock on which they stand still while engines sleep.
        seed: of the random numbers of its samples; None leaves them to the engines.
        account: opens the account of where the time of an episode goes, by its index in the group; `accounted` keeps it.
    """

    row: Row
    prompt: tuple[int, ...]
    group_size: int
    sampling: Sampling
    generate: Generate
    score: Callable[[Sequence[str], Row], Awaitable[list[float]]]
    tokenizer: Tokenizer
    context: int = 2**31
    off_the_clock: Waiting = on_the_clock
    measured: Callable[[Mapping[str, float]], None] = lambda _metrics: None
    timeout_s: float = 7 * 86_400.0
    engines: HaltingClock = field(default_factory=HaltingClock)
    seed: int | None = None
    account: Callable[[int], Account] = lambda _index: Account()


def accounted(episode: Episode, account: Account) -> Episode:
    """Return the episode of one sample of a group: its calls of engines and rewards count in `account`."""

    async def generate(prompt: tuple[int, ...], sampling: Sampling, *, n: int, session: str = "") -> list[Sample]:
        with account.doing("model"):
            return await episode.generate(prompt, sampling, n=n, session=session)

    async def score(completions: Sequence[str], row: Row) -> list[float]:
        with account.doing("reward"):
            return await episode.score(completions, row)

    async def off_the_clock(waiting: Awaitable[Any]) -> Any:
        with account.doing("queue"):
            return await episode.off_the_clock(waiting)

    return replace(episode, generate=generate, score=score, off_the_clock=off_the_clock)


Workflow = Callable[[Episode], Awaitable[Sequence[Trajectory]]]
