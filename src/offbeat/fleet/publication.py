"""What each engine has to do next to take one version, and whose fault a failure is. It only decides; `publishers` acts.

Events go in; what is to be done, or who is to blame, comes out. Whole weights move through stages, and all engines switch together; each
engine takes an adapter at its own pace.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from offbeat.types import Version
from offbeat.weights.proof import Judge, Outcome
from offbeat.weights.protocol import Manifest, Proof


@dataclass(frozen=True)
class PublishReport:
    """How long a publish took, which engines serve the version, and why others do not.

    Attributes:
        total_s: seconds of the whole publish.
        write_s: seconds of writing; 0 where the version was written before.
        stage_s: seconds of staging, or of loading and proving an adapter.
        switch_s: seconds from the first switch to the last proof; 0 for an adapter.
        canary_gap: largest difference of the canary's mean log-probability between the trainer and an engine that serves, in nats.
        serving: names of the engines that serve the version.
        quarantined: reasons of the engines that failed to take it, by name.
        inconclusive: engines that serve although their proof shows nothing, with the reason why it does not.
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


class Stage(Enum):
    """Where one engine is in a publication of whole weights."""

    STAGING = "staging"
    STAGED = "staged"
    SWITCHING = "switching"
    PROVING = "proving"
    SERVING = "serving"
    QUARANTINED = "quarantined"


@dataclass(frozen=True)
class Action:
    """Something the publisher has to do: move `engine` through `stage` (STAGING, SWITCHING or PROVING)."""

    engine: str
    stage: Stage


@dataclass
class WeightsPublication:
    """Whole weights on their way: every engine stages them, all that did switch together, and each serves once it has proven them.

    Attributes:
        stages: where each engine is, by name.
        reasons: why engines were lost, by name.
        unsure: engines that serve although their proof shows nothing, with the reason why it does not.
        largest_gap: see `PublishReport.canary_gap`.
    """

    manifest: Manifest
    judge: Judge
    stages: dict[str, Stage]
    reasons: dict[str, str] = field(default_factory=dict)
    unsure: dict[str, str] = field(default_factory=dict)
    largest_gap: float = 0.0

    @classmethod
    def start(cls, manifest: Manifest, engines: Iterable[str], *, judge: Judge) -> tuple["WeightsPublication", list[Action]]:
        """Return a new publication and its first actions: every engine stages the version."""
        publication = cls(manifest, judge, dict.fromkeys(engines, Stage.STAGING))
        return publication, [Action(name, Stage.STAGING) for name in publication.stages]

    @property
    def serving(self) -> list[str]:
        """Names of the engines that serve the version."""
        return [name for name, stage in self.stages.items() if stage is Stage.SERVING]

    def done(self, engine: str) -> list[Action]:
        """Note that an engine's STAGING or SWITCHING succeeded. Returns what is to be done next."""
        if self.stages[engine] is Stage.STAGING:
            self.stages[engine] = Stage.STAGED
            return self._switch_when_all_staged()
        assert self.stages[engine] is Stage.SWITCHING, f"{engine} reported success while {self.stages[engine].value}"
        self.stages[engine] = Stage.PROVING
        return [Action(engine, Stage.PROVING)]

    def proved(self, engine: str, proof: Proof) -> list[Action]:
        """Judge an engine's proof: the engine serves unless its proof is refused. Returns what is to be done next."""
        assert self.stages[engine] is Stage.PROVING, f"{engine} proved while {self.stages[engine].value}"
        verdict = self.judge.judge(engine, self.manifest, proof)
        if verdict.refused:
            return self.failed(engine, verdict.reason)
        if verdict.outcome is Outcome.UNSURE:
            self.unsure[engine] = verdict.reason
        self.stages[engine] = Stage.SERVING
        self.largest_gap = max(self.largest_gap, verdict.gap)
        return []

    def failed(self, engine: str, reason: str) -> list[Action]:
        """Note that an engine failed or was late; the others go on without it. Returns what is to be done next."""
        self.stages[engine] = Stage.QUARANTINED
        self.reasons[engine] = reason
        return self._switch_when_all_staged()

    def _switch_when_all_staged(self) -> list[Action]:
        if Stage.STAGING in self.stages.values():
            return []
        staged = [name for name, stage in self.stages.items() if stage is Stage.STAGED]
        for name in staged:
            self.stages[name] = Stage.SWITCHING
        return [Action(name, Stage.SWITCHING) for name in staged]


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
