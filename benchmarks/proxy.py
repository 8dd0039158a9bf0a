"""What recording agents costs: milliseconds per call of one agent, and calls per second of many, through the proxy.

`Generate` answers at once, so that all time is the proxy's and the client's, which runs in a process of its own. Each agent plays chats of
four turns with a system message, appends what it is answered, and has a session per chat; one core serves, one asks. What they are compared
with is what a proxy may cost beside a model: 3 ms and 300 calls per second.
"""

import argparse
import asyncio
import json
import statistics
import sys
import time

import aiohttp
from measure import ROOT, emit, note

from offbeat.agents.proxy import Proxy
from offbeat.chat.parsing import AnswerParser
from offbeat.chat.rendering import Renderer
from offbeat.data.tokenizer import character_tokenizer, load_tokenizer
from offbeat.inference.sampling import Sample, Sampling

MOST_MS, LEAST_PER_S = 3.0, 300.0
TURNS, ANSWER_TOKENS = 4, 64
SYSTEM = "you are a careful assistant, and answer in a few words. " * 12


async def serve(*, chats: int, agents: int) -> dict[str, float]:
    """Serve a client process and return what it measured."""
    folder = ROOT / ".models" / "smollm2-135m-instruct"
    tokenizer = load_tokenizer(folder) if folder.is_dir() else character_tokenizer()
    renderer = Renderer(tokenizer)
    word = tokenizer.encode("word")[0]
    ids = (*[word] * (ANSWER_TOKENS - 1), tokenizer.eos_token_id)
    sample = Sample(ids, (-1.0,) * len(ids), (0,) * len(ids), "", "stop")

    async def generate(_prompt: tuple[int, ...], _sampling: Sampling, *, n: int, session: str = "") -> list[Sample]:  # noqa: ARG001
        return [sample] * n

    async with Proxy(renderer, AnswerParser(renderer)) as proxy:
        sessions = [proxy.open(generate, Sampling(max_new_tokens=ANSWER_TOKENS)) for _ in range(chats)]
        client = await asyncio.create_subprocess_exec(
            sys.executable, __file__, "--client", f"{proxy.url}/v1/chat/completions", "--agents", str(agents),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE)
        printed, _ = await client.communicate(json.dumps([session.key for session in sessions]).encode())
        chains = [session.chains(1.0, episode=index) for index, session in enumerate(sessions)]
    assert all(len(found) == 1 and len(found[0].turns) == TURNS for found in chains), "each chat is one chain"
    return json.loads(printed)


async def ask(url: str, keys: list[str], agents: int) -> None:
    """Play a chat for each key, with this many agents at a time, and print the figures."""
    took: list[float] = []
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:

        async def play() -> None:
            while keys:
                headers = {"Authorization": f"Bearer {keys.pop()}"}
                messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "what is the word?"}]
                for _ in range(TURNS):
                    start = time.perf_counter()
                    async with http.post(url, json={"messages": messages}, headers=headers) as answer:
                        message = (await answer.json())["choices"][0]["message"]
                    took.append(time.perf_counter() - start)
                    messages += [message, {"role": "user", "content": "are you sure?"}]

        start = time.perf_counter()
        await asyncio.gather(*(play() for _ in range(agents)))
        whole_s = time.perf_counter() - start
    print(json.dumps({"ms": 1000 * statistics.median(took), "per_s": len(took) / whole_s}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smoke run")
    parser.add_argument("--client", default="", help=argparse.SUPPRESS)
    parser.add_argument("--agents", type=int, default=1, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.client:
        asyncio.run(ask(args.client, json.load(sys.stdin), args.agents))
        return
    chats = 20 if args.quick else 250
    one = asyncio.run(serve(chats=chats, agents=1))
    note(f"one agent: {one}")
    many = asyncio.run(serve(chats=chats * 4, agents=32))
    note(f"32 agents: {many}")
    emit("proxy", "a call of one agent", ours=one["ms"], peer=MOST_MS, unit="ms", aim=1.0, less_is_better=True)
    emit("proxy", "calls of 32 agents", ours=many["per_s"], peer=LEAST_PER_S, unit="calls/s", aim=1.0)


if __name__ == "__main__":
    main()
