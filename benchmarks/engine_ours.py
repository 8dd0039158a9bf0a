"""The embedded engine as a contestant of `engine.py` and `real.py`, in this process or behind `offbeat engine` over HTTP.

usage: engine_ours.py {inprocess,uncached,http} MODEL [FORMAT]

`uncached` is in this process without a prefix cache. FORMAT is a dtype, or in this process int8, which is float32 with int8 weights.
"""

import asyncio
import subprocess
import sys
import time
from functools import partial
from typing import Any

import aiohttp
from measure import answer_jobs, claim_stdout

from offbeat.engine.engine import EmbeddedEngine
from offbeat.engine.loader import load_engine
from offbeat.engine.options import EngineOptions
from offbeat.engine.request import Output, Request, SamplingParams
from offbeat.engine.versions import VersionSource

MAX_RUNNING = 256


def run_in_process(model: str, form: str, *, prefix_caching: bool = True) -> None:
    """Keep `in_flight` requests in the engine until all are done."""
    chosen: dict[str, Any] = {"dtype": "float32", "quantization": "int8"} if form == "int8" else {"dtype": form}
    engine = load_engine(EngineOptions(model=model, max_running=MAX_RUNNING, prefix_caching=prefix_caching, **chosen))

    def run(job: dict[str, Any]) -> dict[str, Any]:
        if job.get("do") == "generate":
            return _generate(engine, job)
        if job.get("do") == "forget":
            return _forget(engine, model)
        waiting = [
            Request(id=str(i), prompt=prompt, params=SamplingParams(max_new_tokens=length, ignore_eos=True))
            for i, (prompt, length) in enumerate(zip(job["prompts"], job["lengths"], strict=True))]
        waiting.reverse()
        running = tokens = 0
        start = time.perf_counter()
        while waiting or running:
            while waiting and running < job["in_flight"]:
                engine.submit(waiting.pop())
                running += 1
            for event in engine.step():
                assert isinstance(event.result, Output), event.result
                tokens += len(event.result.logprobs)
                running -= 1
        return {"wall_s": time.perf_counter() - start, "tokens": tokens}

    answer_jobs(pipe, run)


def _generate(engine: EmbeddedEngine, job: dict[str, Any]) -> dict[str, Any]:
    """Sample `n` answers of `length` tokens to each prompt."""
    params = SamplingParams(max_new_tokens=job["length"], ignore_eos=True, seed=0)
    start = time.perf_counter()
    samples = [[output.token_ids for output in outputs] for outputs in engine.generate(job["prompts"], params, n=job["n"])]
    return {"wall_s": time.perf_counter() - start, "samples": samples}


def _forget(engine: EmbeddedEngine, model: str) -> dict[str, Any]:
    """Switch the weights, which empties the prefix cache."""
    version = engine.version + 1
    engine.stage(version, VersionSource(model, str(version)), engine.prepare(model))
    engine.switch(version, "recompute")
    return {}


def run_over_http(model: str, dtype: str) -> None:
    """The same through `offbeat engine`, from one client with `in_flight` connections."""
    command = [
        sys.executable, "-m", "offbeat", "engine", "--model", model, "--port", "0", "--threads", "1", "--max-running", str(MAX_RUNNING),
        "--dtype", dtype]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None, "is a pipe"
    words = server.stdout.readline().split()
    url = next(word.rstrip(";") for word in words if word.startswith("http://"))

    def run(job: dict[str, Any]) -> dict[str, float]:
        return asyncio.run(_load(url, job))

    try:
        answer_jobs(pipe, run)
    finally:
        server.terminate()
        server.wait(15)


async def _load(url: str, job: dict[str, Any]) -> dict[str, float]:
    jobs = list(zip(job["prompts"], job["lengths"], strict=True))
    jobs.reverse()
    tokens = 0
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def client() -> None:
            nonlocal tokens
            while jobs:
                prompt, length = jobs.pop()
                body = {"prompt": prompt, "max_tokens": length, "ignore_eos": True, "logprobs": 0, "return_token_ids": True}
                async with session.post(f"{url}/v1/completions", json=body) as response:
                    answer = await response.json()
                tokens += len(answer["choices"][0]["logprobs"]["token_logprobs"])

        start = time.perf_counter()
        await asyncio.gather(*(client() for _ in range(job["in_flight"])))
        return {"wall_s": time.perf_counter() - start, "tokens": tokens}


if __name__ == "__main__":
    pipe = claim_stdout()
    {
        "inprocess": run_in_process, "uncached": partial(run_in_process, prefix_caching=False), "http": run_over_http,
    }[sys.argv[1]](sys.argv[2], *sys.argv[3:] or ["float32"])
