"""Progress of a version at the engines, of whole weights or of an adapter, and the engines to blame for failures. `publishers` acts.

Each engine takes a version at its own pace.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from offbeat.types import Version
from offbeat.weights.proof import Outcome, Verdict


@dataclass(frozen=True)
class PublishReport:
    """Durations of a publish, engines that serve the version, and reasons of the others.

    Attributes:
        write_s: seconds of writing; 0 where the version was written before.
        stage_s: seconds of the slowest engine's staging, or of loading and proving an adapter.
        switch_s: longest time of an engine from the beginning of its switch to its proof, in seconds; 0 for an adapter.
        canary_gap: largest difference of the canary's mean log-probability between the trainer and an engine that serves, in nats.
        serving: names of the engines that serve the version.
        quarantined: reasons of the engines that failed to take it, by name.
        inconclusive: reasons of the engines that serve although their proof is inconclusive, by name.
        num_bytes: size of the tensors that were written, or offered by broadcast.
        proofs: number of engines that took it by what they are proven, of `weights.proof.MEANS`, such as {"by_weights": 2}.
    """

    version: Version
    total_s: float
    write_s: float
    stage_s: float
    switch_s: float
    canary_gap: float
    serving: tuple[str, ...]
    quarantined: Mapping[str, str]
    inconclusive: Mapping[str, str] = field(default_factory=dict)
    num_bytes: int = 0
    proofs: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Taken:
    """An engine's change to a version of the whole weights: seconds of staging, seconds of switch and proof, and the verdict on it."""

    stage_s: float
    switch_s: float
    verdict: Verdict


@dataclass
class WeightsPublication:
    """Whole weights on their way: each engine stages them, switches and proves them by itself, and serves them from then on.

    Attributes:
        serving: names of the engines that serve the version, or a newer one.
        reasons: why the other engines were lost, by name, such as {"engine 1": "staging failed: ..."}.
        unsure: reasons of the engines that serve although their proof is inconclusive, by name.
        largest_gap, stage_s, switch_s, proofs: see `PublishReport`.
    """

    version: Version
    serving: list[str] = field(default_factory=list)
    reasons: dict[str, str] = field(default_factory=dict)
    unsure: dict[str, str] = field(default_factory=dict)
    largest_gap: float = 0.0
    stage_s: float = 0.0
    switch_s: float = 0.0
    proofs: Counter[str] = field(default_factory=Counter)

    def served(self, engine: str, taken: Taken | None) -> None:
        """Note that an engine serves the version, or a newer one; `taken` is None if healing or another fan-out brought it there."""
        self.serving.append(engine)
        if taken is None:
            return
        if taken.verdict.outcome is Outcome.UNSURE:
            self.unsure[engine] = taken.verdict.reason
        self.proofs[taken.verdict.means] += 1
        self.largest_gap = max(self.largest_gap, taken.verdict.gap)
        self.stage_s, self.switch_s = max(self.stage_s, taken.stage_s), max(self.switch_s, taken.switch_s)

    def failed(self, engine: str, reason: str) -> None:
        """Note that an engine failed, was late, or serves other weights; the others go on without it."""
        self.reasons[engine] = reason


@dataclass
class AdapterPublication:
    """A version of an adapter on its way: each engine loads and proves it by itself. Each event returns the engines to blame for it.

    An engine that dies or is late is to blame at once, and one that is full is not. An engine that refuses the adapter, or proves something
    else, is in doubt: it is to blame as soon as another engine serves the adapter. If none ever does, the adapter is bad, and no engine
    that judged it is to blame.

    Attributes:
        serving: names of the engines that serve the adapter.
        reasons: why the other engines do not serve it, by name.
        doubts: reasons of the engines in doubt, by name.
    """

    serving: list[str] = field(default_factory=list)
    reasons: dict[str, str] = field(default_factory=dict)
    doubts: dict[str, str] = field(default_factory=dict)

    @property
    def adapter_is_bad(self) -> bool:
        """Whether no engine serves it so far, and at least one has judged it rather than failed."""
        return bool(self.doubts)

    def served(self, engine: str) -> dict[str, str]:
        """Note that an engine has loaded and proven the adapter. Returns the engines to blame, with reasons."""
        self.serving.append(engine)
        return self._settle()

    def full(self, engine: str, reason: str) -> dict[str, str]:
        """Note that an engine had no room, because its adapters stayed in use. Nobody is to blame."""
        self.reasons[engine] = reason
        return {}

    def failed(self, engine: str, reason: str) -> dict[str, str]:
        """Note that an engine died, failed or was late. Returns it as the engine to blame."""
        self.reasons[engine] = reason
        return {engine: reason}

    def doubted(self, engine: str, reason: str) -> dict[str, str]:
        """Note that an engine refused the adapter, or that its proof is wrong. Returns the engines to blame, with reasons."""
        self.reasons[engine] = self.doubts[engine] = reason
        return self._settle()

    def _settle(self) -> dict[str, str]:
        if not self.serving:
            return {}
        blamed, self.doubts = self.doubts, {}
        return blamed
