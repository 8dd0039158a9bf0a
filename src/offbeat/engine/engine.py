"""The engine takes requests and gives sampled tokens, one `step()` at a time: schedule, run, postprocess.

Single-threaded: `loop.EngineLoop` calls it from one thread; tests and benchmarks call it directly (`generate`). Between two steps it can
be paused, put to sleep, given new weights, or asked to score tokens. It promises that every token carries the version of the weights that
sampled it, that a staged version never changes, and that a sample with a seed does not depend on the rest of its batch.
"""

import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from offbeat.data.tokenizer import Tokenizer
from offbeat.engine.adapters import EngineAdapters
from offbeat.engine.budget import default_cache_bytes
from offbeat.engine.cache import SlotCache
from offbeat.engine.forward import Forward
from offbeat.engine.options import EngineOptions
from offbeat.engine.prefixes import PrefixCache
from offbeat.engine.request import Event, FinishReason, Output, Request, SamplingParams, Scored, ScoreJob
from offbeat.engine.rows import Rows
from offbeat.engine.runner import Runner
from offbeat.engine.sampler import row_keys, sample
from offbeat.engine.scheduler import RoundPrompts, Scheduler
from offbeat.engine.scoring import Scorer
from offbeat.engine.sleep import EngineSleep
from offbeat.engine.structure import Grammars
from offbeat.engine.versions import PendingSwitch, VersionSource, VersionStore, read_version
from offbeat.errors import EngineError, RefusedError
from offbeat.model.peft_io import Adapter
from offbeat.sync.platform import current_platform
from offbeat.types import Version
from offbeat.weights.protocol import Interrupt

_DIVERGED = "the logits of adapter {adapter} are not finite: it has diverged or is damaged"
_NOTHING_LEFT = (
    "no token may follow: allowed_token_ids, bad_words and min_tokens together leave none; allow the end token, or leave them out")


class EmbeddedEngine:
    """One model, its cache and its running samples.

    Attributes:
        grammars: compiles the structures of answers, on any thread.
        finished: number of ended samples by finish reason.
        num_prompt_tokens, num_generated_tokens: token counts since the start.
        switch_s: duration of the last switch, measured from its request.
    """

    def __init__(self, forward: Forward, tokenizer: Tokenizer, options: EngineOptions) -> None:
        self.version: Version = options.version
        self.max_context = min(options.max_context or forward.max_positions, forward.max_positions)
        self.paused = False
        self.finished: Counter[str] = Counter()
        self.num_prompt_tokens = 0
        self.num_generated_tokens = 0
        self.switch_s = 0.0
        self._forward = forward
        self.tokenizer = tokenizer
        self.grammars = Grammars(tokenizer)
        cache_bytes = options.max_cache_bytes or default_cache_bytes(forward.device, num_engines=options.num_engines)
        self._prefixes = PrefixCache(forward.cache_shape, device=forward.device, max_bytes=cache_bytes if options.prefix_caching else 0)
        self._cache = SlotCache(
            forward.cache_shape, device=forward.device, max_slots=options.max_running, max_positions=self.max_context,
            max_bytes=cache_bytes, beside=self._prefixes,
        )
        self._scheduler = Scheduler(
            max_running=options.max_running, max_queued=options.max_queued, max_prefill_tokens=options.max_prefill_tokens,
            max_prefill_per_round=options.max_prefill_per_round, max_cache_tokens=self._cache.max_tokens,
        )
        self._rows = Rows(max_rows=options.max_running, device=forward.device)
        self.adapters = EngineAdapters(forward, options, requests=self)
        self._runner = Runner(
            forward, self._cache, self._rows, self.adapters, prefixes=self._prefixes, max_prefill_tokens=options.max_prefill_tokens)
        self._scorer = Scorer(
            forward, self.adapters, max_context=self.max_context, max_queued=options.max_queued,
            max_tokens=min(options.max_prefill_tokens, forward.max_score_tokens),
        )
        self._scores_from_s = 0.0
        self._versions = VersionStore(live=options.version, folder=options.model)
        self._sleep = EngineSleep(forward, (self._cache, self._prefixes), self._versions)
        self._rng = np.random.default_rng(options.seed)
        self._starting: list[Request] = []
        self._pending: PendingSwitch | None = None

    # -- requests ----------------------------------------------------------------------------------------------------------------------

    @property
    def num_running(self) -> int:
        return len(self._rows)

    @property
    def num_waiting(self) -> int:
        return self._scheduler.num_waiting

    @property
    def num_scores_waiting(self) -> int:
        return self._scorer.num_waiting

    @property
    def cache_bytes(self) -> int:
        """Memory that keys and values take now, in bytes."""
        return self._cache.size_bytes + self._prefixes.size_bytes

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that were not computed, because earlier samples began with them, since the start."""
        return self._runner.num_cached_tokens

    @property
    def has_work(self) -> bool:
        return self._has_samples or self._has_scores

    @property
    def _has_samples(self) -> bool:
        waiting = self.num_waiting > 0 and self._pending is None
        return not (self.paused or self.asleep) and (self.num_running > 0 or waiting)

    @property
    def _has_scores(self) -> bool:
        return not self.asleep and self.num_scores_waiting > 0

    def submit(self, request: Request | ScoreJob) -> None:
        """Queue a request; raises RefusedError, with the reason, if it can never be served, BusyError if too many are waiting."""
        if isinstance(request, ScoreJob):
            self._scorer.submit(request)
        else:
            request.check(
                vocab_size=self._forward.vocab_size, max_context=self.max_context, max_running=self._scheduler.max_running,
                images=self._forward.reads_images)
            self._runner.check(request)
            self._scheduler.check(request)
            if (structure := request.params.shaping.structure) is not None and request.grammar is None:
                request = replace(request, grammar=self.grammars.compile(structure))
            self.adapters.use(request.adapter)
            self._scheduler.add(request)

    def adapters_in_use(self) -> set[str]:
        waiting = {request.adapter for request in self._scheduler.waiting()}
        return waiting.union(self._rows.adapters(), self._scorer.adapters_in_use())

    def abort(self, request_id: str) -> None:
        """Drop a request whose client is gone; no event reports it."""
        self._scorer.remove_job(request_id)
        if (begun := self._scheduler.begun) is not None and begun.request.id == request_id:
            self._restart_prompt()
        if not self._scheduler.remove_request(request_id):
            rows = [row for row, running in enumerate(self._rows.samples) if running.request.id == request_id]
            self.finished["abort"] += len(rows)
            self._release(rows)
        self.adapters.drop_leaving()

    def running(self, have: Mapping[str, Sequence[int]]) -> dict[str, list[Output]]:
        return self._rows.running(have)

    def generate(self, prompts: Sequence[Sequence[int]], params: SamplingParams, *, n: int = 1) -> list[list[Output]]:
        """Run prompts to completion in this thread; returns [P][n] outputs in the order of the prompts. For tests and benchmarks."""
        results: dict[str, list[Output]] = {f"generate-{i}": [] for i in range(len(prompts))}
        pending = [Request(id=name, prompt=list(p), params=params, n=n) for name, p in zip(results, prompts, strict=True)]
        pending.reverse()
        while pending or self.has_work:
            while pending and self.num_waiting < self._scheduler.max_queued:
                self.submit(pending.pop())
            for event in self.step():
                if isinstance(event.result, EngineError):
                    raise event.result
                assert isinstance(event.result, Output), "nothing is scored beside"
                results[event.request_id].append(event.result)
        return [sorted(outputs, key=lambda o: o.index) for outputs in results.values()]

    # -- the step ----------------------------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self) -> list[Event]:
        """Sample one token for each running sample and the first token of each newly admitted one; run one batch of waiting scores.

        Prompts that are long are computed in parts beside it, one part a step.
        """
        if (at_s := self.shrinks_at_s) is not None and time.monotonic() >= at_s:
            self.shrink_cache()
        events = self._score_step() if self._has_scores else []
        if not self._has_samples:
            return events
        logits = self._runner.next_logits(self._schedule())
        self._starting = []
        return events if logits is None else events + self._postprocess(logits)

    def _score_step(self) -> list[Event]:
        """Score one waiting batch. While samples run, scoring takes at most half of the time; a pause does not hold it up."""
        start_s = time.monotonic()
        if self._has_samples and start_s < self._scores_from_s:
            return []
        events = self._scorer.run(self.version, beside=self._rows.adapters())
        self.adapters.drop_leaving()
        end_s = time.monotonic()
        self._scores_from_s = end_s + (end_s - start_s)
        return events

    def _schedule(self) -> RoundPrompts:
        prompts = RoundPrompts() if self._pending else self._scheduler.admit(self._runner)
        self._starting = prompts.requests
        for request in prompts.requests:
            params = request.params
            seed = params.seed if params.seed is not None else int(self._rng.integers(2**63))
            self._rows.add(request, keys=row_keys(seed, request.n), tokenizer=self.tokenizer)
            self.num_prompt_tokens += len(request.prompt)
        return prompts

    def _postprocess(self, logits: Tensor) -> list[Event]:
        """Sample from logits [B, V], account for the tokens, report events and free finished slots."""
        drawn = sample(logits, self._rows.sampling(), self._rows.uniforms())
        stopped, full = self._rows.append(drawn, version=self.version)
        self.num_generated_tokens += len(drawn.tokens)
        empty = self._rows_of([self._rows.samples[row].request for row in drawn.empty])
        drawn.valid[empty] = True
        trouble = "".join(self._rows.trouble(row) for row in drawn.empty[:1])
        diverged = [] if drawn.valid.all() else self._diverged(drawn.valid)
        failed = empty + diverged
        events = []
        for row in self._rows.watched():
            running = self._rows.samples[row]
            if running.text is not None:
                running.text.push(int(drawn.tokens[row]))
                stopped[row] |= running.text.stopped
            if running.request.stream and not (stopped[row] or full[row] or row in failed):
                events.append(Event(running.request.id, self._rows.output(row, None)))
        ended = [row for row in np.flatnonzero(stopped | full).tolist() if row not in failed]
        events += [self._end(row, "stop" if stopped[row] else "length") for row in ended]
        self._runner.keep(ended)
        if diverged:
            self._cache.clear(diverged)
            events += self._fail_rows(diverged, EngineError, _DIVERGED)
        if empty:
            events += self._fail_rows(empty, RefusedError, trouble or _NOTHING_LEFT)
        self._release(ended + failed)
        return events

    def _diverged(self, valid: np.ndarray) -> list[int]:
        """Return the rows of requests whose adapters diverged, given `valid` [B] bool. Raises EngineError for the base model's."""
        broken = {self._rows.samples[row].request for row in np.flatnonzero(~valid)}
        if not all(request.adapter for request in broken):
            raise EngineError("the model's logits are not finite: its weights have diverged or are damaged")
        return self._rows_of(broken)

    def _rows_of(self, requests: Collection[Request]) -> list[int]:
        return [row for row, sample in enumerate(self._rows.samples) if sample.request in requests] if requests else []

    def _fail_rows(self, rows: list[int], error: type[EngineError], text: str) -> list[Event]:
        """End the requests of these rows with an error; `{adapter}` in its text is replaced by their adapter's name."""
        self.finished["error"] += len(rows)
        requests = dict.fromkeys(self._rows.samples[row].request for row in rows)
        return [Event(request.id, error(text.replace("{adapter}", request.adapter))) for request in requests]

    def _end(self, row: int, reason: FinishReason) -> Event:
        self.finished[reason] += 1
        output = replace(self._rows.output(row, reason), routes=self._runner.routes_of(row))
        return Event(self._rows.samples[row].request.id, output)

    @torch.inference_mode()
    def _release(self, rows: list[int]) -> None:
        """Free slots and keep the remaining rows dense; when the last sample ends, a draining switch takes place."""
        if rows:
            longest, slots = int(self._rows.length[: len(self._rows)].max()), len(self._rows)
            sources, targets = self._scheduler.compact(rows)
            self._cache.move(sources, targets, positions=longest)
            self._rows.compact(sources, targets, running=self._scheduler.running)
            if (begun := self._scheduler.begun) is not None:
                self._cache.move([slots], [len(self._rows)], positions=begun.stop)
                self._cache.clear([slots])
            self.adapters.drop_leaving()
            self.shrink_cache()
            self._finish_drain()

    @property
    def shrinks_at_s(self) -> float | None:
        """When `shrink_cache` would free something, by the monotonic clock, if nothing else comes; None if it would not."""
        return self._cache.shrinks_at_s

    @torch.inference_mode()
    def shrink_cache(self) -> None:
        """Return the memory of samples that have ended, such as those of an evaluation, if it was not needed for a while."""
        begun = self._scheduler.begun
        longest = max(int(self._rows.length[: len(self._rows)].max(initial=0)), 0 if begun is None else begun.stop)
        if self._cache.shrink(slots=len(self._rows) + (begun is not None), positions=longest, now_s=time.monotonic()):
            current_platform.return_memory()

    @torch.inference_mode()
    def _restart_prompt(self) -> None:
        """Compute the prompt of which a part is computed from its beginning, later."""
        if self._scheduler.begun is not None:
            self._scheduler.begun = None
            self._cache.clear([len(self._rows)])

    # -- control, between two steps ----------------------------------------------------------------------------------------------------

    def pause(self, mode: Literal["keep", "abort"]) -> list[Event]:
        """Stop stepping. "keep" leaves requests as they are; "abort" ends them all with the tokens that they have."""
        self.paused = True
        if mode == "keep":
            return []
        events = [self._end(row, "abort") for row in range(len(self._rows))]
        self._restart_prompt()
        self._release(list(range(len(self._rows))))
        for request in self._scheduler.drop_waiting():
            self.finished["abort"] += request.n
            events += [Event(request.id, Output(index, [], [], [], "abort")) for index in range(request.n)]
        self.adapters.drop_leaving()
        return events

    def resume(self) -> None:
        self.paused = False

    @property
    def asleep(self) -> bool:
        """Whether it computes nothing, because its memory is free for others."""
        return self._sleep.asleep

    def sleep(self, *, keep_weights: bool) -> None:
        """Stop stepping and scoring, and free the memory of the cache and of the weights; requests wait.

        The next switch wakes it, or, with `keep_weights`, which keeps the weights in host memory, `wake`. Samples in flight go on from
        there, with their cache recomputed. Raises EngineError if a switch is draining.
        """
        if self._pending is not None:
            raise EngineError(f"a switch to version {self._pending.version} is draining; wait for it before it is put to sleep")
        self._restart_prompt()
        if not self.asleep:
            self._runner.keep_routes()
        self._sleep.free_memory(keep_weights=keep_weights)

    def wake(self) -> None:
        """End a sleep with the weights that it has kept; raises RefusedError if it has not kept them."""
        if self.asleep:
            self._sleep.restore()
            self._runner.recompute()

    def fail(self, error: EngineError) -> list[Event]:
        """End every request and any pending switch with an error; the engine must not be used afterwards."""
        known = dict.fromkeys([request.id for request in self._starting])  # a failed step may not have added rows for them yet
        known |= dict.fromkeys([running.request.id for running in self._rows.samples])
        known |= dict.fromkeys([request.id for request in self._scheduler.drop_waiting()])
        known |= dict.fromkeys([job.id for job in self._scorer.drop_waiting()])
        if self._pending is not None:
            self._pending.done.set_exception(error)
        return [Event(request_id, error) for request_id in known]

    def is_staged(self, version: Version, source: VersionSource) -> bool:
        return self._versions.has(version, source)

    def base_for(self, folder: str) -> str:
        return self._versions.base_for(folder)

    def prepare(self, folder: str, broadcast: str = "", *, live: str = "") -> object:
        """Read a version's weights into the form that `stage` takes; see `read_version`. May run on any thread."""
        return read_version(self._forward, folder, broadcast, live=live)

    def stage(self, version: Version, source: VersionSource, prepared: object) -> None:
        """Keep prepared weights beside the live ones as `version`, replacing others staged under that number."""
        if not self.is_staged(version, source):
            self._versions.add(version, source, prepared)

    def switch(self, version: Version, interrupt: Interrupt) -> "Future[float]":
        """Serve a staged version; switching to the live one again changes nothing, unless other weights were staged under its number.

        Samples in flight continue under the new weights with their cache recomputed ("recompute") or as it is ("keep"), or finish first
        under the old weights while no new ones start ("drain"). Returns a future of the duration in seconds, which with "drain" completes
        after later steps.

        Raises:
            RefusedError: the version is not staged.
            EngineError: another switch is draining.
        """
        if self._pending is not None:
            raise EngineError(f"a switch to version {self._pending.version} is draining; wait for it before switching to {version}")
        done: Future[float] = Future()
        done.set_running_or_notify_cancel()
        if version == self.version and not self._versions.is_staged(version) and self._versions.holds_live:
            self.wake()
            done.set_result(0.0)
            return done
        self._versions.check_staged(version)
        self._restart_prompt()
        self._pending = PendingSwitch(version, time.monotonic(), done)
        if self.asleep:
            self._finish_switch(recompute=True)
        elif interrupt == "drain":
            self._finish_drain()
        else:
            self._finish_switch(recompute=interrupt == "recompute")
        return done

    def _finish_drain(self) -> None:
        if not self._rows.samples:
            self._finish_switch(recompute=False)

    def _finish_switch(self, *, recompute: bool) -> None:
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        self._forward.install(self._versions.make_live(pending.version))
        self.version = pending.version
        self._sleep.note_installed()
        self._runner.new_weights(recompute=recompute)
        self.switch_s = time.monotonic() - pending.started
        pending.done.set_result(self.switch_s)

    def fingerprinter(self) -> tuple[Version, Callable[[], str]]:
        """Return the live version and a function for its weights' fingerprint, on any thread; raises EngineError if the engine sleeps."""
        if self.asleep:
            raise EngineError("it sleeps, and its memory is free for others; wake it, or switch to a version")
        return self.version, self._forward.fingerprinter()

    @torch.inference_mode()
    def live_adapter(self, name: str) -> tuple[Version, Adapter]:
        """Return the live version and a copy of an adapter's weights as they serve; raises UnknownAdapterError."""
        self.adapters.use(name)
        self.adapters.place([*self._rows.adapters(), name])
        return self.version, self.adapters.live(name)

    def score(self, tokens: Sequence[int], *, adapter: str = "") -> tuple[Version, list[float]]:
        """Score tokens at temperature 1 in this thread, ahead of everything that waits.

        Returns the live version, and the log-probability of each token after the first.

        Raises:
            RefusedError: there are fewer than two tokens or too many, one is outside the vocabulary, or the adapter is not held.
            EngineError: the logits are not finite.
        """
        job = ScoreJob(id="score", tokens=list(tokens), adapter=adapter)
        self._scorer.check(job)
        (event,) = self._scorer.compute([job], self.version, beside=self._rows.adapters())
        if isinstance(event.result, EngineError):
            raise event.result
        assert isinstance(event.result, Scored), "a score is what was asked for"
        return event.result.version, event.result.logprobs
