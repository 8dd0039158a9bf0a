"""Publishing a version: stage on every engine, switch, prove, admit.

`Publication` decides (events in, actions out, no I/O), and `offbeat.weights.proof` what a proof is worth; `Publisher` does. An engine that
fails or is late at any stage, or whose proof is refused, is quarantined with the reason. The publish succeeds while `min_engines` serve,
or do once healed: `bring` is how an engine comes back, outside of any publish.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from offbeat.config.weights import WeightsConfig
from offbeat.errors import EngineError, OffbeatError, ProofError, PublishError
from offbeat.types import Version
from offbeat.weights.proof import Judge, Outcome
from offbeat.weights.protocol import Channel, EngineControl, Manifest, Proof


class Stage(Enum):
    """Where one engine is in a publication."""

    STAGING = "staging"
    STAGED = "staged"
    SWITCHING = "switching"
    PROVING = "proving"
    SERVING = "serving"
    QUARANTINED = "quarantined"


@dataclass(frozen=True)
class Action:
    """Something the shell has to do: move `engine` through `stage` (STAGING, SWITCHING or PROVING)."""

    engine: str
    stage: Stage


@dataclass
class Publication:
    """The state of one version's way to its engines.

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
    def start(cls, manifest: Manifest, engines: Iterable[str], *, judge: Judge) -> tuple["Publication", list[Action]]:
        """A new publication and its first actions."""
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


@dataclass(frozen=True)
class PublishReport:
    """What a publish took and showed.

    Attributes:
        total_s, write_s, stage_s, switch_s: all of it; writing; staging; from the first switch to the last proof.
        canary_gap: largest difference of the canary's mean log-probability between the trainer and an engine that serves.
        serving: engines that serve the version.
        quarantined: engines that were lost, with reasons.
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


class Publisher:
    """Carries versions to engines. One publish at a time.

    Attributes:
        current: the newest version that was written; what a healed engine has to serve.
    """

    current: Manifest | None = None

    def __init__(
        self,
        engines: Callable[[], Mapping[str, EngineControl]],
        channel: Channel,
        config: WeightsConfig,
        *,
        judge: Judge,
        min_engines: int,
        on_serving: Callable[[str, int], None],
        on_quarantine: Callable[[str, str], None],
        recover: Callable[[Version], Awaitable[Collection[str]]] | None = None,
    ) -> None:
        """
        Args:
            engines: gives the healthy engines by name at each publish.
            judge: says what their proofs are worth.
            on_serving: admits an engine to routing at a version.
            on_quarantine: excludes an engine, with the reason.
            recover: waits until `min_engines` serve a version, as engines heal, and gives their names; raises EngineError in the end. None
                where nobody heals engines.
        """
        self._engines = engines
        self._channel = channel
        self._config = config
        self._judge = judge
        self._min_engines = min_engines
        self._on_serving = on_serving
        self._on_quarantine = on_quarantine
        self._recover = recover
        self._writing = asyncio.Lock()

    async def publish(self, version: Version) -> PublishReport:
        """Write the trainer's weights as `version` and bring every healthy engine to it.

        Raises:
            PublishError: fewer than `min_engines` serve the version, and no engine heals in time; gives each engine's reason.
        """
        start = switch_start = time.monotonic()
        async with self._writing:
            manifest = await self._channel.write(version)
            self.current = manifest
        engines = self._engines()  # now: an engine that heals from here on heals to this version
        written = time.monotonic()
        publication, actions = Publication.start(manifest, engines, judge=self._judge)
        tasks: set[asyncio.Task[list[Action]]] = set()
        try:
            while actions or tasks:
                if any(action.stage is Stage.SWITCHING for action in actions):
                    switch_start = time.monotonic()
                tasks |= {asyncio.create_task(self._do(action, engines[action.engine], publication)) for action in actions}
                finished, tasks = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                actions = [action for task in finished for action in task.result()]
        finally:
            for task in tasks:
                task.cancel()
        end = time.monotonic()
        serving = publication.serving if len(publication.serving) >= self._min_engines else await self._wait_for_more(publication)
        self._channel.prune()
        return PublishReport(
            version, total_s=time.monotonic() - start, write_s=written - start, stage_s=switch_start - written, switch_s=end - switch_start,
            canary_gap=publication.largest_gap, serving=tuple(serving), quarantined=dict(publication.reasons),
            inconclusive=dict(publication.unsure))

    async def bring(self, engine: EngineControl) -> Version | None:
        """Bring an engine that is out of service to the current version, and prove it. Admits nobody. A version that is damaged on disk is
        written again, as long as the trainer has it.

        Returns:
            The version, current when this returns; None before the first publish.

        Raises:
            EngineError, DeadlineError: the engine failed; ProofError: it does not sample the current weights.
        """
        config = self._config
        while (manifest := self.current) is not None:
            try:
                await engine.stage(manifest, timeout_s=config.stage_timeout_s)
                await engine.switch(manifest, interrupt=config.interrupt, timeout_s=config.switch_timeout_s)
                proof = await engine.prove(manifest.canary, timeout_s=config.switch_timeout_s)
            except OffbeatError:
                async with self._writing:  # a newer version on its way may have taken this one's place
                    if manifest is self.current:
                        again = await self._channel.rewrite(manifest)
                        if again is None:
                            raise
                        self.current = again
                continue
            if manifest is self.current:
                verdict = self._judge.judge(engine.name, manifest, proof)
                if verdict.refused:
                    raise ProofError(f"{engine.name} failed its proof: {verdict.reason}")
                return manifest.version
        return None

    async def _wait_for_more(self, publication: Publication) -> Collection[str]:
        """Engines that serve the version, once healing has made them enough."""
        version = publication.manifest.version
        reasons = "; ".join(f"{name}: {reason}" for name, reason in publication.reasons.items()) or "no engine is healthy"
        few = f"version {version} is served by {len(publication.serving)} engines, fewer than the {self._min_engines} needed: {reasons}"
        if self._recover is None:
            raise PublishError(few)
        try:
            return await self._recover(version)
        except EngineError as exc:
            raise PublishError(f"{few}; {exc}") from exc

    async def _do(self, action: Action, engine: EngineControl, publication: Publication) -> list[Action]:
        manifest, config = publication.manifest, self._config
        try:
            if action.stage is Stage.STAGING:
                await engine.stage(manifest, timeout_s=config.stage_timeout_s)
                return publication.done(engine.name)
            if action.stage is Stage.SWITCHING:
                await engine.switch(manifest, interrupt=config.interrupt, timeout_s=config.switch_timeout_s)
                return publication.done(engine.name)
            proof = await engine.prove(manifest.canary, timeout_s=config.switch_timeout_s)
            actions = publication.proved(engine.name, proof)
        except OffbeatError as exc:
            actions = publication.failed(engine.name, f"{action.stage.value} failed: {exc}")
        if reason := publication.reasons.get(engine.name):
            self._on_quarantine(engine.name, reason)
        else:
            self._on_serving(engine.name, manifest.version)
        return actions
