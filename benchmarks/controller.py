"""What the controller costs: CPU per generated token, the longest block of its event loop, and seconds to batch, spread and encode a step.

    .venv/bin/python benchmarks/controller.py [--quick] [--groups N] [--tokens N] [--engines N] [--kind embedded|vllm]

The controller's own path runs as in a run: clients over real HTTP, dispatcher, executor with gate and checks, `make_batch`, statistics,
`Trainers` with the sharder, and the encoding of every rank's share. Not part of it are what computes elsewhere: 1,024 engines are paths of
two servers in processes of their own, which answer at once with bytes made beforehand (--kind says in whose form); rewards are constants;
ranks take their shares and drop them. One training step takes 512 groups of 8 samples, one version behind.

Prints one JSON line. `us_per_token` is CPU of the whole process (all threads, the kernel's work on its sockets included) by generated
tokens; `batch_cpu_s` that of a step's batch alone, by thread, and `batch_tokens` its size. `longest_callback_ms` is the most CPU time
that one callback took on the event loop, `longest_late_ms` how late a timer was by the wall clock, which on a machine with other work
counts that, too. `rss_growth_mb` compares the end with a third of the way.

`between_s` is the median time from the end of one training step to the ranks' having their shares of the next one, of which `wait_s` is
spent on groups: ranks pretend to train for `--train-s` seconds, while the next batch is made, or with `--no-ahead` is not.

A million groups: `--groups 1000000 --batch 4096 --samples 2 --tokens 8`.
"""

import argparse
import asyncio
import asyncio.events
import json
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import msgspec
import numpy as np
import psutil
from measure import note
from stand_ins import StandIn, http, path_of, serve, servers

from offbeat.aio import cancelled
from offbeat.algorithms.adam import adam_params
from offbeat.algorithms.experience import batch_stats, make_batch
from offbeat.config.rollout import RolloutConfig
from offbeat.config.root import Config
from offbeat.data import wire
from offbeat.data.batch import Batch
from offbeat.data.cost import CostModel
from offbeat.data.dataset import ListDataset
from offbeat.data.row import Row
from offbeat.data.stream import PromptStream
from offbeat.data.tokenizer import character_tokenizer
from offbeat.data.trajectory import Group
from offbeat.fleet.dispatch import Dispatcher
from offbeat.fleet.pool import EnginePool
from offbeat.inference.client import EngineClient, EngineSession
from offbeat.inference.dialects.embedded import EmbeddedDialect
from offbeat.inference.dialects.vllm import VllmDialect
from offbeat.inference.sampling import Sampling
from offbeat.memory import let_go, steady_memory
from offbeat.ranks.ranks import WorkerRanks
from offbeat.ranks.sharding import Sharder
from offbeat.ranks.trainers import Trainers
from offbeat.rollout.episode import Episode
from offbeat.rollout.executor import RolloutExecutor
from offbeat.rollout.player import RolloutParts
from offbeat.rollout.staleness import Gate
from offbeat.rollout.trajectory_checks import TrajectoryChecks
from offbeat.rollout.workflows.single_turn import single_turn
from offbeat.trainer.messages import Trained

VOCAB = 150_000
PROMPT = tuple(range(100, 400))
RANKS = 8
VARIANTS = 8
"""Different answers, by which the groups of a batch differ in length."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=4096, help="groups to play, and to train on")
    parser.add_argument("--batch", type=int, default=512, help="groups per step")
    parser.add_argument("--tokens", type=int, default=4096, help="mean tokens of a sample")
    parser.add_argument("--samples", type=int, default=8, help="samples of a group")
    parser.add_argument("--engines", type=int, default=1024)
    parser.add_argument("--train-s", type=float, default=0.0, help="seconds for which ranks pretend to train")
    parser.add_argument("--no-ahead", action="store_true", help="make each batch when its step begins")
    parser.add_argument("--kind", choices=("embedded", "vllm"), default="embedded")
    parser.add_argument("--quick", action="store_true", help="a smoke run: 24 groups, 16 engines")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.quick:
        options.groups, options.batch, options.tokens, options.engines = 24, 8, 64, 16
    if options.serve:
        answers = Answers(tokens=options.tokens, samples=options.samples, kind=options.kind)
        asyncio.run(serve(lambda: PreparedStandIn(answers)))
    else:
        asyncio.run(measure(options))


# -- engines -------------------------------------------------------------------------------------------------------------------------------


class PreparedStandIn(StandIn):
    """Whatever it is asked, it gives the next of its answers."""

    def __init__(self, answers: "Answers") -> None:
        super().__init__()
        self._answers = answers

    def answer(self, head: bytes, body: bytes) -> None:
        self.transport.write(self._answers.to(head, body))


class Answers:
    """HTTP answers of one version of the weights, of every form, encoded beforehand."""

    def __init__(self, *, tokens: int, samples: int, kind: str) -> None:
        self._tokens, self._samples = tokens, samples
        self._kind = kind
        self._next = 0
        self._take(0)

    def to(self, head: bytes, body: bytes) -> bytes:
        path = path_of(head)
        if path.startswith("/version/"):
            self._take(int(path.rpartition("/")[2]))
            return http(b"{}")
        self._next += 1
        forms = self._arrays if b'"encoding_format":"base64"' in body else self._lists
        return forms[self._next % VARIANTS]

    def _take(self, version: int) -> None:
        rng = np.random.default_rng(version)
        lengths = (rng.lognormal(-0.1, 0.45, (VARIANTS, self._samples)).clip(0.1, 3) * self._tokens).astype(int)
        samples = [[self._sample(rng, length) for length in row] for row in lengths]
        self._arrays, self._lists = (
            [http(msgspec.json.encode({"choices": [_choice(*sample, version, kind) for sample in row]})) for row in samples]
            for kind in ("arrays", self._kind))

    def _sample(self, rng: np.random.Generator, length: int) -> tuple[np.ndarray, np.ndarray]:
        return rng.integers(5, VOCAB, length).astype(np.int32), -rng.random(length).astype(np.float32)


def _choice(tokens: np.ndarray, logprobs: np.ndarray, version: int, kind: str) -> dict[str, Any]:
    """Return a sample as the embedded engine tells it, in arrays or lists, or as vLLM does."""
    choice: dict[str, Any] = {"index": 0, "text": "abcd" * len(tokens), "finish_reason": "stop"}
    versions = np.full(len(tokens), version, np.int32)
    if kind == "arrays":
        return choice | {
            "token_ids": tokens.tobytes(), "versions": versions.tobytes(), "logprobs": {"token_logprobs": logprobs.tobytes()}}
    told = {"token_logprobs": logprobs.tolist()}
    if kind == "vllm":
        told |= {
            "text_offset": list(range(0, 4 * len(tokens), 4)), "tokens": ["abcd"] * len(tokens),
            "top_logprobs": [{"abcd": logprob} for logprob in logprobs.tolist()]}
    return choice | {"token_ids": tokens.tolist(), "versions": versions.tolist(), "logprobs": told}


# -- ranks ---------------------------------------------------------------------------------------------------------------------------------


class Sink:
    """A rank that takes its share and drops it."""

    host = "127.0.0.1"
    disk = None
    alive = True
    given_at = 0.0

    def __init__(self, name: str, train_s: float) -> None:
        self.name = name
        self._train_s = train_s

    async def call(self, *_: object, **_more: object) -> bytes:
        Sink.given_at = time.monotonic()
        await asyncio.sleep(self._train_s)
        return wire.encode(Trained({}, 1.0, 0.0, 1.0))

    async def stack(self) -> str:
        return ""

    async def stop(self, **_more: object) -> None:
        pass


async def no_more() -> Sequence[Sink]:
    return []


# -- the controller ------------------------------------------------------------------------------------------------------------------------


class Callbacks:
    """CPU time of each callback on the event loop, and how late timers are."""

    def __init__(self) -> None:
        self.longest_s = self.late_s = 0.0

    @contextmanager
    def timed(self) -> Iterator[None]:
        run = asyncio.events.Handle._run

        def timed(handle: asyncio.Handle) -> None:
            start = time.thread_time()
            run(handle)
            self.longest_s = max(self.longest_s, time.thread_time() - start)

        asyncio.events.Handle._run = timed  # pyright: ignore
        watching = asyncio.create_task(self._watch())
        try:
            yield
        finally:
            watching.cancel()
            asyncio.events.Handle._run = run

    async def _watch(self) -> None:
        while True:
            due = time.monotonic() + 0.005
            await asyncio.sleep(0.005)
            self.late_s = max(self.late_s, time.monotonic() - due)


async def measure(options: argparse.Namespace) -> None:
    served = ["--tokens", str(options.tokens), "--samples", str(options.samples), "--kind", options.kind]
    with servers(__file__, served) as urls:
        async with EngineSession() as http:
            figures = await play(options, urls, http)
    print(json.dumps({"benchmark": "controller", "kind": options.kind, "engines": options.engines, **figures}), flush=True)


async def play(options: argparse.Namespace, urls: Sequence[str], http: EngineSession) -> dict[str, float]:
    """Play and train on all groups; returns the figures."""
    config = Config.model_validate({"run": {"name": "controller"}, "train": {
        "num_ranks": RANKS, "max_tokens_per_microbatch": 32_768, "optimizer": {"lr": 1e-6}}})
    sharder = Sharder(config.for_ranks, num_ranks=RANKS, prior=CostModel(1e-6, 1e-10))
    sinks = [Sink(f"rank {rank}", options.train_s) for rank in range(RANKS)]
    ranks = WorkerRanks(sinks, config.for_ranks, start_anew=no_more, sharder=sharder)
    trainers, watch, process = Trainers(ranks, config.for_ranks), Callbacks(), psutil.Process()
    num_steps, num_tokens, rss, past_groups = options.groups // options.batch, 0, [], []
    between_s, wait_s, ended = [], [], time.monotonic()

    async def make_ahead(version: int) -> Batch:
        made = await asyncio.to_thread(flatten, await executor.take_ahead(), config, version=version)
        await trainers.spread_ahead(made)
        return made

    ahead: asyncio.Task[Batch] | None = None
    async with executing(options, urls, http, last_version=num_steps) as (executor, publish):
        with steady_memory(), watch.timed():
            start = time.process_time()
            for version in range(num_steps):
                if ahead is not None and not executor.has_ahead:
                    await cancelled(ahead)
                    ahead = None
                groups = await executor.prepare_batch()
                wait_s.append(time.monotonic() - ended)
                batch = await (ahead if ahead is not None else asyncio.to_thread(flatten, groups, config, version=version))
                num_tokens += sum(t.num_generated for group in groups for t in group.trajectories)
                ahead = None if options.no_ahead or version + 1 == num_steps else asyncio.create_task(make_ahead(version + 1))
                await trainers.train_step(batch)
                between_s.append(Sink.given_at - ended)
                ended = time.monotonic()
                await publish(version + 1)
                executor.advance(version + 1)
                executor.serve(version + 1)
                await let_go(past_groups)
                past_groups = list(groups)
                rss.append(process.memory_info().rss / 1e6)
                cpu_s = time.process_time() - start
                note(f"step {version + 1} of {num_steps}: {cpu_s / num_tokens * 1e6:.3f} us per token, {rss[-1]:.0f} MB")
    del batch
    gaps = {"between_s": between_s[1:], "wait_s": wait_s[1:]}
    return {
        "groups": num_steps * options.batch, "tokens": num_tokens, "us_per_token": round(cpu_s / num_tokens * 1e6, 4),
        **{name: round(statistics.median(seconds), 3) for name, seconds in gaps.items() if seconds},
        **alone(past_groups, config, sharder, version=num_steps - 1),
        "longest_callback_ms": round(watch.longest_s * 1e3, 2), "longest_late_ms": round(watch.late_s * 1e3, 2),
        "rss_growth_mb": round(rss[-1] - rss[len(rss) // 3], 1)}


def flatten(groups: Sequence[Group], config: Config, *, version: int) -> Batch:
    """What the loop does on a thread."""
    batch = make_batch(groups, config=config.algorithm, max_new_tokens=config.rollout.max_new_tokens)
    batch_stats(groups, version=version)
    return batch


def alone(groups: Sequence[Group], config: Config, sharder: Sharder, *, version: int) -> dict[str, float]:
    """Batch, spread and encode one step with nothing beside it; the median of three, after one that maps the memory."""
    params, seconds = adam_params(0, config=config.train.optimizer, total_steps=10), []
    for _ in range(4):
        start = time.thread_time()
        shares = sharder.shards(flatten(groups, config, version=version), params, num_minibatches=1, seed=0)
        encoded = [wire.encode_pieces(share) for share in shares]
        seconds.append(time.thread_time() - start)
        del shares, encoded
    return {
        "batch_cpu_s": round(statistics.median(seconds[1:]), 3), "batch_first_cpu_s": round(seconds[0], 3),
        "batch_samples": sum(len(group.trajectories) for group in groups), "batch_tokens": sum(group.num_tokens for group in groups)}


@asynccontextmanager
async def executing(
    options: argparse.Namespace, urls: Sequence[str], http: EngineSession, *, last_version: int,
) -> AsyncIterator[tuple[RolloutExecutor, Callable[[int], Awaitable[None]]]]:
    """Play groups; gives the executor, and what publishes a version to all engines."""
    def dialect() -> EmbeddedDialect:
        return VllmDialect(model="", whole_weights=True, lora=False) if options.kind == "vllm" else EmbeddedDialect()

    clients = [
        EngineClient(f"engine {number}", f"{urls[number % len(urls)]}/{number}", http.session, dialect=dialect())
        for number in range(options.engines)]
    pool, tokenizer = EnginePool(clients), character_tokenizer()
    generate = Dispatcher(pool, request_timeout_s=600.0).generate
    rng = np.random.default_rng(0)

    async def score(completions: Sequence[str], row: Row) -> list[float]:  # noqa: ARG001
        return rng.integers(0, 2, len(completions)).astype(float).tolist()

    def episode(row: Row, group_size: int, sampling: Sampling) -> Episode:
        return Episode(row, PROMPT, group_size, sampling, generate, score, tokenizer)

    async def publish(version: int) -> None:
        for url in urls:
            await EngineClient("server", url, http.session).call("GET", f"/version/{version}")
        for client in clients:
            pool.admit(client.name, version)
            await asyncio.sleep(0)  # each engine proves its version by itself

    await publish(0)
    config = RolloutConfig(
        consumer_batch_size=options.batch, max_concurrent_rollouts=options.engines, max_head_offpolicyness=1, group_size=options.samples)
    gate = Gate(batch_size=options.batch, max_running=options.engines, eta=1, last_version=last_version)
    stream = PromptStream(ListDataset(tuple(Row(f"{number}>", str(number)) for number in range(1000))), seed=0)
    parts = RolloutParts(workflow=single_turn, make_episode=episode, checks=TrajectoryChecks(VOCAB))
    async with RolloutExecutor(gate, stream, parts, config=config, sampling=Sampling(4 * options.tokens)) as executor:
        yield executor, publish


if __name__ == "__main__":
    main()
