"""One version's way to the engines: what each has to do next, and whose fault a failure is. Decisions only, for `publishers`.

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
    """What a publish took and showed.

    Attributes:
        total_s, write_s, stage_s, switch_s: all of it; writing; staging, or loading and proving an adapter; from the first switch to the
            last proof. Writing is 0 where the version was written before.
        canary_gap: largest difference of the canary's mean log-probability between the trainer and an engine that serves.
        serving: engines that serve the version.
        quarantined: engines that failed to take it, with reasons.
        inconclusive: of those that serve, the ones whose proof shows nothing, and why.
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
        reasons: why engines are lost.
        unsure: engines that serve although their proof shows nothing, and why it does not.
    """

    manifest: Manifest
    judge: Judge
    stages: dict[str, Stage]
    reasons: dict[str, str] = field(default_factory=dict)
    unsure: dict[str, str] = field(default_factory=dict)
    largest_gap: float = 0.0

    @classmethod
    def start(cls, manifest: Manifest, engines: Iterable[str], *, judge: Judge) -> tuple["WeightsPublication", list[Action]]:
        """Make a publication; gives its first actions, too."""
        publication = cls(manifest, judge, dict.fromkeys(engines, Stage.STAGING))
        return publication, [Action(name, Stage.STAGING) for name in publication.stages]

    @property
    def serving(self) -> list[str]:
        return [name for name, stage in self.stages.items() if stage is Stage.SERVING]

    def done(self, engine: str) -> list[Action]:
        """The engine's STAGING or SWITCHING succeeded."""
        if self.stages[engine] is Stage.STAGING:
            self.stages[engine] = Stage.STAGED
            return self._switch_when_all_staged()
        assert self.stages[engine] is Stage.SWITCHING, f"{engine} reported success while {self.stages[engine].value}"
        self.stages[engine] = Stage.PROVING
        return [Action(engine, Stage.PROVING)]

    def proved(self, engine: str, proof: Proof) -> list[Action]:
        """The engine answered its proof; it serves unless that is refused."""
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
        """The engine failed or was late; others go on without it."""
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
    """A version of an adapter on its way: each engine loads and proves it by itself. Events give the engines that are then to blame.

    An engine that dies or is late is to blame at once; one that is full is not. One that refuses the adapter, or proves something else, is
    in doubt: it is to blame as soon as another engine serves the adapter. If none ever does, the adapter is bad, and no engine that judged
    it is to blame.

    Attributes:
        serving: engines that serve it.
        reasons: why the others do not.
        doubts: of these, the engines in doubt.
    """

    serving: list[str] = field(default_factory=list)
    reasons: dict[str, str] = field(default_factory=dict)
    doubts: dict[str, str] = field(default_factory=dict)

    @property
    def adapter_is_bad(self) -> bool:
        """Whether no engine serves it so far, and at least one has judged it rather than failed."""
        return bool(self.doubts)

    def served(self, engine: str) -> dict[str, str]:
        """The engine has loaded the adapter and proven it."""
        self.serving.append(engine)
        return self._settle()

    def full(self, engine: str, reason: str) -> dict[str, str]:
        """The engine's adapters stayed in use."""
        self.reasons[engine] = reason
        return {}

    def failed(self, engine: str, reason: str) -> dict[str, str]:
        """The engine died, failed or was late."""
        self.reasons[engine] = reason
        return {engine: reason}

    def doubted(self, engine: str, reason: str) -> dict[str, str]:
        """The engine refused the adapter, or its proof is wrong."""
        self.reasons[engine] = self.doubts[engine] = reason
        return self._settle()

    def _settle(self) -> dict[str, str]:
        if not self.serving:
            return {}
        blamed, self.doubts = self.doubts, {}
        return blamed
