"""Seeds of requests, so that the token that a request samples does not depend on engines, batches, restarts or routing.

The embedded engine draws a token by a number that is a function of the request's seed, the sample and the position. Here the seed is made a
function of the run's seed, the prompt, its try, the episode, the tokens of the request, and how many equal requests came before. Called by
`executor`, `player` and the workflows of agents; pure.
"""

import hashlib
from collections import Counter
from dataclasses import replace

import numpy as np

from offbeat.inference.sampling import Sample, Sampling
from offbeat.rollout.episode import Episode


def mixed(*words: int | str | bytes) -> int:
    """Return a number below 2**63 that depends on all words, such as a run's seed and "0:17", and looks random."""
    digest = hashlib.blake2b(repr(words).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seeded(episode: Episode, seed: int) -> Episode:
    """Return the episode with seeds for its requests that have none. A request that repeats another in it gets another seed."""
    num_equal: Counter[bytes] = Counter()

    async def generate(prompt: tuple[int, ...], sampling: Sampling, *, n: int, session: str = "") -> list[Sample]:
        if sampling.seed is None:
            asked = hashlib.blake2b(np.array(prompt, np.int64).tobytes(), digest_size=16).digest()
            sampling = replace(sampling, seed=mixed(seed, asked, num_equal[asked]))
            num_equal[asked] += 1
        return await episode.generate(prompt, sampling, n=n, session=session)

    return replace(episode, generate=generate, seed=seed)


def of_sample(episode: Episode, index: int) -> Episode:
    """Return the episode of one sample of a group, whose requests depend on its index and not on the others."""
    return episode if episode.seed is None else seeded(episode, mixed(episode.seed, index))
