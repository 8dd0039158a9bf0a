"""An engine for a program: one process that serves a model over HTTP, as the engines of runs do."""

import asyncio
import os
import secrets
import threading
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self, TypeVar, overload

import aiohttp

from offbeat.config.load import load_config
from offbeat.controller.inputs import base_ends, read_base
from offbeat.data.model_folder import check_model_folder
from offbeat.engine.options import EngineOptions
from offbeat.errors import ConfigError, EngineError
from offbeat.fleet.engine_group import serve_one
from offbeat.inference.client import EngineClient
from offbeat.inference.sampling import Sample, Sampling
from offbeat.runs.number_format import engine_format
from offbeat.runs.threads import usable_cores

T = TypeVar("T")

_KEY_BYTES = 32
_NEW_TOKENS = 256
_STOP_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Completion:
    """An answer of a model.

        with offbeat.Engine("models/small") as engine:
            answer = engine.generate("31752046>", max_new_tokens=9)
            print(answer.text, answer.finish_reason, sum(answer.logprobs))

    Attributes:
        text: decoded, without special tokens and without the stop string.
        finish_reason: "stop", or "length" where `max_new_tokens` were not enough.
        tokens: token ids such as (19, 7, 2), the final token included.
        logprobs: log-probability of each token under the distribution it was sampled from; at temperature 0, under that of temperature 1.
    """

    text: str
    finish_reason: str
    tokens: tuple[int, ...] = field(repr=False)
    logprobs: tuple[float, ...] = field(repr=False)

    def __str__(self) -> str:
        return self.text


class Engine:
    """A model that answers, in a process of its own.

        with offbeat.Engine("models/small") as engine:
            print(engine.generate("31752046>", temperature=0).text)
            print([answer.text for answer in engine.generate(["1>", "2>"], max_new_tokens=4)])
            print(engine.chat("Sort 31752046.").text)

    Without `with`, call `start` (which the first question does otherwise) and `close`. Several threads may ask at the same time.

    Attributes:
        url: address for requests over HTTP in the dialects of docs/engine.md, such as "http://127.0.0.1:40123"; "" before it has started.
        key: API key for those requests.
    """

    def __init__(
        self, model: str | os.PathLike[str], *, dtype: Literal["auto", "float32", "bfloat16"] = "float32", threads: int = 0,
        device: int | None = None, max_context: int = 0, max_running: int = 256, quantization: Literal["none", "int8"] = "none",
    ) -> None:
        """Describe an engine; nothing is started.

        Args:
            model: folder or hub id, its tokenizer included.
            dtype: number format of weights and cache; "auto" takes bfloat16 where the device or the CPU has instructions for it.
            threads: CPU threads; 0 for one on each core that this process may use.
            device: accelerator to use, by its number; None for the CPU.
            max_context: longest prompt with its answer, in tokens; 0 for the model's.
            max_running: samples that are decoded together.
            quantization: "int8" rounds weights to 8 bits on a CPU: about twice as fast at few samples, and a little less exact. `dtype`
                "auto" is float32 beside it.

        Raises:
            ConfigError: an option is out of range, or int8 weights are asked for on an accelerator.
        """
        if threads < 0:
            raise ConfigError(f"threads must be >= 0, got {threads}; use 0 for one on each core")
        if quantization not in ("none", "int8"):
            raise ConfigError(f"quantization must be 'none' or 'int8', got {quantization!r}")
        if quantization != "none" and device is not None:
            raise ConfigError(f"quantization must be 'none' with device = {device}, got {quantization!r}; it is for engines on CPUs")
        if quantization != "none" and dtype == "auto":
            dtype = "float32"  # products are in int8, and the rest takes little time
        self.url = ""
        self.key = secrets.token_urlsafe(_KEY_BYTES)
        self._model, self._threads, self._device = os.fspath(model), threads, device
        self._options = EngineOptions(
            model=self._model, dtype=engine_format(dtype, device=device), quantization=quantization, max_running=max_running,
            max_context=max_context, api_key=self.key, version=-1)
        self._starting = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._stack = AsyncExitStack()

    def start(self) -> Self:
        """Start the process and load the model, unless it has started.

        Raises:
            ModelError: there is no model or tokenizer, or no fast path that computes it with int8 weights.
            WorkerError, DeadlineError: the process does not start.
        """
        with self._starting:
            if self._loop is not None:
                return self
            folder = check_model_folder(self._model)
            self._base = read_base(load_config(None, values={"model.path": str(folder)}))
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._loop.run_forever, name="offbeat engine", daemon=True)
            self._thread.start()
            try:
                self._run_on_loop(self._open_engine(str(folder)))
            except BaseException:
                self._end()
                raise
        return self

    def close(self) -> None:
        """End the process. It can be started again."""
        with self._starting:
            if self._loop is not None:
                self._end()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    @overload
    def generate(
        self, prompt: str, *, max_new_tokens: int | None = ..., temperature: float = ..., top_p: float = ..., top_k: int = ...,
        stop: Sequence[str] = ..., seed: int | None = ..., timeout_s: float = ...,
    ) -> Completion: ...
    @overload
    def generate(
        self, prompt: Iterable[str], *, max_new_tokens: int | None = ..., temperature: float = ..., top_p: float = ..., top_k: int = ...,
        stop: Sequence[str] = ..., seed: int | None = ..., timeout_s: float = ...,
    ) -> list[Completion]: ...
    def generate(
        self, prompt: str | Iterable[str], *, max_new_tokens: int | None = None, temperature: float = 1.0, top_p: float = 1.0,
        top_k: int = 0, stop: Sequence[str] = (), seed: int | None = None, timeout_s: float = 600.0,
    ) -> Completion | list[Completion]:
        """Continue a prompt, or several at the same time; starts the engine if it has not started.

        Args:
            max_new_tokens: most tokens to generate; None for 256, or as many as the context has room for.
            temperature: 0 is greedy.
            top_k: sample from the k likeliest tokens; 0 from all.
            stop: texts that end an answer, besides the model's own end tokens.
            seed: makes the answer repeatable; prompts after the first have the numbers after it, e.g. 7, 8, 9.

        Raises:
            RefusedError: the engine refuses the request, for example because the prompt is too long.
            EngineError, DeadlineError: the engine failed, or has not answered in time.
        """
        self.start()
        prompts = [prompt] if isinstance(prompt, str) else list(prompt)
        asked = [tuple(self._base.tokenizer.prompt(text)) for text in prompts]
        found = self._ask(
            asked, Sampling(0, temperature, top_p, top_k, _listed(stop), seed), max_new_tokens=max_new_tokens, timeout_s=timeout_s)
        return found[0] if isinstance(prompt, str) else found

    def chat(
        self, messages: str | Sequence[Mapping[str, Any]], *, max_new_tokens: int | None = None, temperature: float = 1.0,
        top_p: float = 1.0, top_k: int = 0, stop: Sequence[str] = (), seed: int | None = None, timeout_s: float = 600.0,
    ) -> Completion:
        """Answer a user's message, or a chat of messages with `role` and `content`, by the model's chat template.

        Arguments and errors are as in `generate`. Chats with tools are answered at `url`.

        Raises:
            ModelError: the model has no chat template, or it refuses the messages.
        """
        self.start()
        said = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
        [answer] = self._ask(
            [tuple(self._base.tokenizer.chat(said))], Sampling(0, temperature, top_p, top_k, _listed(stop), seed),
            max_new_tokens=max_new_tokens, timeout_s=timeout_s)
        return answer

    def _ask(
        self, prompts: Sequence[tuple[int, ...]], sampling: Sampling, *, max_new_tokens: int | None, timeout_s: float,
    ) -> list[Completion]:
        """Answer prompts; `sampling` has neither a length nor the model's own ends yet, and the first prompt's seed."""
        ends = base_ends(self._base, stop=sampling.stop)

        def sampling_of(index: int) -> Sampling:
            room = (self._options.max_context or self._base.context) - len(prompts[index])
            most = max(1, min(_NEW_TOKENS, room)) if max_new_tokens is None else max_new_tokens
            seed = None if sampling.seed is None else sampling.seed + index
            return replace(sampling, max_new_tokens=most, seed=seed, stop=ends.strings, stop_token_ids=ends.token_ids)

        async def ask() -> list[list[Sample]]:
            return await asyncio.gather(*(
                self._client.generate(prompt, sampling_of(index), n=1, timeout_s=timeout_s) for index, prompt in enumerate(prompts)))

        return [
            Completion(sample.text, sample.finish_reason, tuple(sample.tokens.tolist()), tuple(sample.token_logprobs.tolist()))
            for [sample] in self._run_on_loop(ask())]

    async def _open_engine(self, folder: str) -> None:
        options = replace(self._options, model=folder)
        self.url, self._worker = await self._stack.enter_async_context(serve_one(
            options, host="127.0.0.1", port=0, threads=self._threads or usable_cores(), device=self._device))
        session = await self._stack.enter_async_context(aiohttp.ClientSession())
        self._client = EngineClient("the engine", self.url, session, api_key=self.key)

    def _run_on_loop(self, work: Coroutine[Any, Any, T]) -> T:
        loop = self._loop
        if loop is None:
            work.close()
            raise EngineError("the engine was closed during a request")
        future = asyncio.run_coroutine_threadsafe(work, loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # also where this thread is interrupted
            raise

    def _end(self) -> None:
        loop, thread = self._loop, self._thread
        assert loop is not None and thread is not None, "it has started"
        try:
            asyncio.run_coroutine_threadsafe(self._stack.aclose(), loop).result(_STOP_TIMEOUT_S)
        finally:
            self._loop, self.url, self._stack = None, "", AsyncExitStack()
            loop.call_soon_threadsafe(loop.stop)
            thread.join(_STOP_TIMEOUT_S)
            loop.close()


def _listed(stop: Sequence[str]) -> tuple[str, ...]:
    if isinstance(stop, str):
        raise ConfigError(f"stop must be a list of texts, got {stop!r}; write [{stop!r}]")
    return tuple(stop)
