"""User code of simulated runs: a reward's name, which nothing calls, and a workflow of several turns."""

from collections.abc import Sequence

from offbeat.data.row import Row
from offbeat.data.trajectory import Trajectory
from offbeat.rollout.builder import TrajectoryBuilder
from offbeat.rollout.episode import Episode

NUM_TURNS = 3


def reward(completion: str, row: Row) -> float:
    """Be found when the run begins; `StandInReward` judges."""
    raise AssertionError(f"the stand-in judges, got {completion!r} for {row}")


async def several_turns(episode: Episode) -> Sequence[Trajectory]:
    """Ask the engine three times for each sample, each time with all that came before."""
    played = []
    for sample in range(episode.group_size):
        builder, text = TrajectoryBuilder(episode.prompt), ""
        for turn in range(NUM_TURNS):
            [answer] = await episode.generate(builder.tokens, episode.sampling, n=1, session=f"{episode.row.prompt} {sample}")
            builder, text = builder.generated(answer), text + answer.text
            if turn + 1 < NUM_TURNS:
                builder = builder.given([5, 6])
        [reward] = await episode.score([text], episode.row)
        played.append(builder.finish(reward))
    return played
