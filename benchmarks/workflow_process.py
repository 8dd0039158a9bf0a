"""What a workflow of one's own would cost in a process of its own: CPU per episode, in the controller's process and in a child.

    python benchmarks/workflow_process.py [--groups 400] [--samples 8] [--tokens 256]

The workflow is `single_turn`, which computes next to nothing. Engines and rewards answer at once with what was made beforehand, so only the
episode itself is counted. In a child, it takes the least number of messages that can carry it: the prompt and back the request to the
engines, their samples and back the texts, the rewards and back the trajectories, all encoded as everything is that crosses a process. CPU
is that of both processes. Prints one JSON line.
"""

import argparse
import asyncio
import json
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import numpy as np
import psutil
from measure import note

from offbeat.data import wire
from offbeat.data.row import Row
from offbeat.data.tokenizer import character_tokenizer
from offbeat.data.trajectory import Trajectory
from offbeat.inference.sampling import Sample, Sampling
from offbeat.process.child import Child, ChildSpec
from offbeat.rollout.builder import TrajectoryBuilder
from offbeat.rollout.episode import Episode
from offbeat.rollout.workflows.single_turn import single_turn

ROW, PROMPT = Row("sort 3 1 2: ", "1 2 3"), tuple(range(10, 74))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=400, help="episodes to play on each side (default: 400)")
    parser.add_argument("--samples", type=int, default=8, help="samples of a prompt (default: 8)")
    parser.add_argument("--tokens", type=int, default=256, help="tokens of a sample (default: 256)")
    args = parser.parse_args()
    samples = [_sample(args.tokens) for _ in range(args.samples)]
    inside = asyncio.run(_cpu_inside(samples, args.groups))
    note(f"in the controller's process: {1e6 * inside:.0f} us of CPU an episode")
    child = asyncio.run(_cpu_in_child(samples, args.groups))
    print(json.dumps({
        "benchmark": "workflow_process", "samples": args.samples, "tokens": args.tokens, "inside_us": round(1e6 * inside),
        "child_us": round(1e6 * child), "ratio": round(child / inside, 1)}))


def _sample(num_tokens: int) -> Sample:
    tokens = np.arange(num_tokens, dtype=np.int32)
    return Sample(tokens, np.full(num_tokens, -0.5, np.float32), np.full(num_tokens, 3, np.int32), "3 1 2 " * (num_tokens // 6), "stop")


async def _cpu_inside(samples: list[Sample], num_groups: int) -> float:
    async def generate(prompt: tuple[int, ...], sampling: Sampling, *, n: int, session: str = "") -> list[Sample]:  # noqa: ARG001
        return samples

    async def score(texts: Sequence[str], _row: Row) -> list[float]:
        return [1.0] * len(texts)

    episode = Episode(ROW, PROMPT, len(samples), Sampling(max_new_tokens=256), generate, score, character_tokenizer())

    async def play() -> None:
        await single_turn(episode)

    return await _per_episode(play, num_groups, [psutil.Process()])


async def _cpu_in_child(samples: list[Sample], num_groups: int) -> float:
    environment = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])}
    child = await Child.start(ChildSpec("player", "workflow_process:Player", environment, None), timeout_s=300)

    async def play() -> None:
        await child.call("prompt", wire.encode((ROW, PROMPT)), timeout_s=60)
        texts = wire.decode(list[str], await child.call("samples", wire.encode(samples), timeout_s=60))
        wire.decode(list[Trajectory], await child.call("rewards", wire.encode([1.0] * len(texts)), timeout_s=60))

    try:
        return await _per_episode(play, num_groups, [psutil.Process(), psutil.Process(child.pid)])
    finally:
        await child.stop(timeout_s=5)


async def _per_episode(play: Callable[[], Awaitable[None]], num_groups: int, processes: Sequence[psutil.Process]) -> float:
    for _ in range(20):
        await play()
    before, start = _cpu_s(processes), time.monotonic()
    for _ in range(num_groups):
        await play()
    note(f"{num_groups} episodes in {time.monotonic() - start:.1f} s")
    return (_cpu_s(processes) - before) / num_groups


def _cpu_s(processes: Sequence[psutil.Process]) -> float:
    return sum(times.user + times.system for times in (process.cpu_times() for process in processes))


class Player:
    """Handler of the child: plays one episode at a time, between calls that carry its requests and their answers."""

    def __init__(self) -> None:
        self._prompt: tuple[int, ...] = ()
        self._samples: list[Sample] = []

    def handle(self, method: str, payload: bytes) -> bytes:
        """Take the answer to the workflow's last request, and return the next one; after "rewards" the trajectories."""
        if method == "prompt":
            _, self._prompt = wire.decode(tuple[Row, tuple[int, ...]], payload)
            return wire.encode(self._prompt)
        if method == "samples":
            self._samples = wire.decode(list[Sample], payload)
            return wire.encode([sample.text for sample in self._samples])
        rewards, prompt = wire.decode(list[float], payload), np.array(self._prompt)
        return wire.encode([
            TrajectoryBuilder(prompt).generated(sample).finish(reward) for sample, reward in zip(self._samples, rewards, strict=True)])


if __name__ == "__main__":
    main()
