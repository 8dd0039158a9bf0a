"""Whether the tokens that are trained are those that were sampled, over episodes of several turns with a real model and tokenizer.

SmolLM2 (`make smollm2`) plays them at temperature 1 on `offbeat engine`, through the recording proxy over HTTP, half with a tool and half
without. Two kinds of clients are compared: one appends what it was answered, as SDKs do; one writes every answer in words of its own into
the next prompt, as some frameworks do with calls. One JSON line for each says how many sampled tokens are not trained as they were sampled,
after the tokens after which they were; how many answers would be other tokens if their text were encoded again; and how many sequences
an episode becomes. The second kind plays a tenth of the episodes.

    python benchmarks/drift.py [--quick] [--episodes 1000] [--turns 4] [--tokens 16]
"""

import argparse
import asyncio
import json
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from measure import ROOT, note

from offbeat.agents.proxy import Proxy
from offbeat.chat.parsing import AnswerParser
from offbeat.chat.rendering import Renderer
from offbeat.data.tokenizer import Tokenizer, load_tokenizer
from offbeat.data.trajectory import Trajectory
from offbeat.fleet.dispatch import Dispatcher
from offbeat.fleet.pool import EnginePool
from offbeat.inference.client import EngineClient, EngineSession
from offbeat.inference.sampling import Sample, Sampling

MODEL = ROOT / ".models" / "smollm2-135m-instruct"
AT_ONCE = 64
ADD = {"type": "function", "function": {
    "name": "add", "description": "Add two numbers.",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]}}}


@dataclass
class Counts:
    """What was seen of one kind of client."""

    num_episodes: int = 0
    num_sequences: int = 0
    num_answers: int = 0
    num_reencoded: int = 0
    num_tokens: int = 0
    num_changed: int = 0


@dataclass
class Witness:
    """Generates as the dispatcher does, and keeps each prompt with the sample that it was answered with."""

    dispatcher: Dispatcher
    seen: "Counter[tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]]]" = field(default_factory=Counter)

    async def generate(self, prompt: tuple[int, ...], sampling: Sampling, *, n: int, session: str = "") -> list[Sample]:
        samples = await self.dispatcher.generate(prompt, sampling, n=n, session=session)
        self.seen.update((tuple(prompt), sample.token_ids, tuple(np.float32(sample.logprobs).tolist())) for sample in samples)
        return samples

    def count(self, trajectories: list[Trajectory], counts: Counts, tokenizer: Tokenizer) -> None:
        """Compare what an episode trains with what was sampled in it."""
        trained = Counter(of for trajectory in trajectories for of in sampled_in(trajectory))
        counts.num_changed += sum(len(ids) for _, ids, _ in ((self.seen - trained) + (trained - self.seen)).elements())
        for _, ids, _ in self.seen.elements():
            counts.num_answers += 1
            counts.num_tokens += len(ids)
            counts.num_reencoded += tuple(tokenizer.encode(tokenizer.decode(list(ids), skip_special_tokens=False))) != ids
        counts.num_episodes += 1
        counts.num_sequences += len(trajectories)


def sampled_in(trajectory: Trajectory) -> list[tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]]]:
    """Return for each trained run of tokens what comes before it, its tokens and their log-probabilities."""
    edges = np.flatnonzero(np.diff([0, *trajectory.loss_mask.astype(int), 0])).reshape(-1, 2)
    tokens = tuple(trajectory.tokens.tolist())
    return [(tokens[:start], tokens[start:end], tuple(trajectory.rollout_logprobs[start:end].tolist())) for start, end in edges.tolist()]


async def play(url: str, args: argparse.Namespace, num_episodes: int, *, appends: bool) -> Counts:
    """Play all episodes of one kind of client on the engine at `url`."""
    tokenizer = load_tokenizer(MODEL)
    renderer, counts = Renderer(tokenizer), Counts()
    sampling = Sampling(max_new_tokens=args.tokens, temperature=1.0)
    numbers = iter(range(num_episodes))
    async with (
        EngineSession() as engines, Proxy(renderer, AnswerParser(renderer)) as proxy,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http,
    ):
        pool = EnginePool([EngineClient("engine 0", url, engines.session)])
        pool.admit("engine 0", 0)
        dispatcher = Dispatcher(pool, request_timeout_s=600)

        async def client() -> None:
            for number in numbers:
                witness = Witness(dispatcher)
                session = proxy.open(witness.generate, sampling)
                await converse(http, proxy.url, session.key, number, args.turns, appends=appends)
                witness.count(session.chains(1.0, episode=number), counts, tokenizer)
                proxy.close(session)
                if counts.num_episodes % 100 == 0:
                    note(f"{counts.num_episodes} of {num_episodes} episodes")

        await asyncio.gather(*(client() for _ in range(AT_ONCE)))
    return counts


async def converse(http: aiohttp.ClientSession, url: str, key: str, number: int, num_turns: int, *, appends: bool) -> None:
    """Play one episode: ask, answer each call with a number, and ask again."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": f"What is {number} + {7 * number % 100}? Explain it in one sentence."}]
    tools = {"tools": [ADD]} if number % 2 else {}
    for turn in range(num_turns):
        async with http.post(
            f"{url}/v1/chat/completions", json={"messages": messages, **tools}, headers={"Authorization": f"Bearer {key}"},
        ) as answer:
            if answer.status != 200:
                raise RuntimeError(await answer.text())
            message = (await answer.json())["choices"][0]["message"]
        if not appends:
            message = {"role": "assistant", "content": f"In turn {turn} I said: {message['content']}"}
        results = [{"role": "tool", "tool_call_id": call["id"], "content": str(number)} for call in message.get("tool_calls") or ()]
        messages += [message, *(results or [{"role": "user", "content": "Are you sure? Say it in other words."}])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smoke run of 20 episodes")
    parser.add_argument("--episodes", type=int, default=1000, help="episodes of the clients that append (default: 1000)")
    parser.add_argument("--turns", type=int, default=4, help="turns of an episode (default: 4)")
    parser.add_argument("--tokens", type=int, default=16, help="most tokens of an answer (default: 16)")
    args = parser.parse_args()
    if args.quick:
        args.episodes = 20
    with subprocess.Popen(
        [sys.executable, "-m", "offbeat", "engine", "--model", str(MODEL), "--port", "0", "--dtype", "bfloat16"],
        stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parent,
    ) as server:
        assert server.stdout is not None, "is a pipe"
        url = next(word.rstrip(";") for word in server.stdout.readline().split() if word.startswith("http://"))
        try:
            for client, appends, num_episodes in (("appends", True, args.episodes), ("rewrites", False, args.episodes // 10)):
                counts = asyncio.run(play(url, args, num_episodes, appends=appends))
                print(json.dumps({
                    "benchmark": "drift", "client": client, "episodes": counts.num_episodes, "answers": counts.num_answers,
                    "sampled_tokens": counts.num_tokens, "changed_tokens": counts.num_changed,
                    "answers_that_encode_differently": counts.num_reencoded,
                    "sequences_per_episode": round(counts.num_sequences / counts.num_episodes, 3)}), flush=True)
        finally:
            server.terminate()


if __name__ == "__main__":
    main()
