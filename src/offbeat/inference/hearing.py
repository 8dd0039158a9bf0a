"""Samples as far as they are known while engines still generate them, so that a journal has them, and another engine or process goes on.

Made by `rollout.calls`, carried by `Sampling`, and brought up to date by `EngineClient`, which looks at what runs on its engine every few
seconds. No I/O.
"""

import secrets
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from offbeat.types import Version


class Proven(Protocol):
    """An engine, with the newest version of the weights that it has proven; None before its first proof."""

    @property
    def version(self) -> Version | None: ...


class LookListener(Protocol):
    """Hears of looks at running samples."""

    def on_look(self) -> None:
        """Take note of a look."""
        ...


_Numbers = Sequence[float] | np.ndarray


class KnownSample:
    """The L tokens that a sample has so far, in 12 bytes each, since a run may know of millions.

    Attributes:
        tokens, logprobs, versions: [L] int32, float32 and int32, as of a `Sample`.
        num_recorded: number of them that the journal has.
    """

    def __init__(self, tokens: _Numbers = (), logprobs: _Numbers = (), versions: _Numbers = (), *, num_recorded: int = 0) -> None:
        self.tokens, self.logprobs, self.versions = array("i"), array("f"), array("i")
        self.num_recorded = num_recorded
        self.hear(0, tokens, logprobs, versions)

    def hear(self, first: int, tokens: _Numbers, logprobs: _Numbers, versions: _Numbers) -> None:
        """Add tokens that follow the first `first` ones; those that are known already are left out."""
        if first <= len(self.tokens):
            new = slice(len(self.tokens) - first, None)
            for column, dtype, told in ((self.tokens, np.int32, tokens), (self.logprobs, np.float32, logprobs),
                                        (self.versions, np.int32, versions)):
                column.frombytes(np.asarray(told[new], dtype).tobytes())

    def columns(self, start: int = 0, stop: int | None = None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return copies of `tokens`, `logprobs` and `versions` from one token to another."""
        span = slice(start, stop)
        return np.array(self.tokens[span], np.int32), np.array(self.logprobs[span], np.float32), np.array(self.versions[span], np.int32)

    def cut(self, length: int) -> None:
        """Forget all tokens but the first ones."""
        for column in (self.tokens, self.logprobs, self.versions):
            del column[length:]
        self.num_recorded = min(self.num_recorded, length)


@dataclass(eq=False)
class Hearing:
    """What is known of the samples of a call, or of one request for it.

    Attributes:
        every_s: seconds between two looks at the engine.
        name: of the request, such as "3f9a11c07d2e4b58".
        num_begun: number of tokens at the end of the request's prompt that are its sample's own.
        version: that of the adapter that samples; None where the engine tells the version of each token.
        engine: the engine that generates now; None where all tokens count, as those of an adapter, which is proven before its first one.
        listener: is told after each look, whether or not there was something new.
    """

    every_s: float
    samples: list[KnownSample]
    name: str = ""
    num_begun: int = 0
    version: Version | None = None
    engine: Proven | None = None
    listener: LookListener | None = None

    def request(self, *samples: KnownSample, version: Version | None) -> "Hearing":
        """Return the hearing of a request for some of the samples; for one that has begun, it goes on from its tokens."""
        return Hearing(self.every_s, list(samples), secrets.token_hex(8), len(samples[0].tokens), version, listener=self.listener)

    def looked(self) -> None:
        """Tell that the samples are as the last look has found them."""
        if self.listener is not None:
            self.listener.on_look()

    @property
    def num_tokens(self) -> int:
        return sum(len(each.tokens) for each in self.samples)

    def num_proven(self, sample: KnownSample) -> int:
        """Number of a sample's tokens before the first one of a version that its engine has not proven."""
        if self.engine is None:
            return len(sample.tokens)
        newest = -1 if self.engine.version is None else self.engine.version
        return bisect_right(sample.versions, newest)  # they never fall

    def go_on_at(self, engine: Proven) -> None:
        """Let an engine generate what follows; tokens of a newer version than its own are forgotten, as versions must not fall."""
        self.engine = engine
        self._forget_unproven()

    def engine_failed(self) -> None:
        """Forget tokens that the engine has not proven, as it will not do so any more."""
        self._forget_unproven()
        self.engine = None

    def _forget_unproven(self) -> None:
        for sample in self.samples:
            sample.cut(self.num_proven(sample))
