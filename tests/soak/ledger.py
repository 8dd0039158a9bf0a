"""What a soak has seen, and whether it is as promised. Pure: `work` and `saboteur` report to it, `report` shows it.

Every sample is compared with what its version has to answer, which `reference` computed before an engine had seen that version. So a wrong
token is found whoever is to blame: the trainer, the file, the engine, the routing or a neighbour in the batch.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from offbeat.inference.sampling import Sample
from offbeat.weights.adapters import adapter_name, split_adapter_name

COMPLAINTS = ("hangs", "wrong_versions", "cross_tenant", "failures", "not_back", "unhurt")
TOLERANCE = 1e-4
"""Of every log-probability."""
ENGINE_FAULTS = ("kill", "stop", "slow")
ADAPTER_FAULTS = ("corrupt", "rank", "missing")
MUST_BE_NOTICED = ("kill", "stop", *ADAPTER_FAULTS)
"""An engine that is only slow may stay in service."""
_ROUNDING_S = 0.001
"""Of the times of events."""


@dataclass(frozen=True, eq=False)
class Expected:
    """What one version of a tenant's adapter has to answer.

    Attributes:
        token_ids: [L], the greedy continuation of the prompt, as far as no two tokens are equally likely.
        logprobs: [L].
        first: [V], log-probabilities of the first token; tells versions apart.
        canary_logprob: mean, of the tokens that prove it.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    first: np.ndarray
    canary_logprob: float

    def differs(self, sample: Sample) -> str:
        """What is wrong with a sample; empty if nothing is."""
        if sample.token_ids[: len(self.token_ids)] != self.token_ids:
            return f"tokens {sample.token_ids} instead of {self.token_ids}"
        gap = max((abs(a - b) for a, b in zip(sample.logprobs, self.logprobs, strict=False)), default=0.0)
        return "" if gap <= TOLERANCE else f"log-probabilities off by {gap:.2g}"


@dataclass
class Fault:
    """One act of the saboteur.

    Attributes:
        target: an engine, or a tenant.
        at_s: wall-clock time.
        noticed_s, healed_s: seconds from then until it was known, and until everything served again; None for never.
        reason: as the program gave it.
    """

    kind: str
    target: str
    at_s: float
    noticed_s: float | None = None
    healed_s: float | None = None
    reason: str = ""


@dataclass
class Ledger:
    """Counts and complaints; empty lists of complaints are the promise.

    Attributes:
        expected: by the adapter's name.
        seconds: of every operation that came to its end, by kind.
        keep: versions of a tenant whose answers are kept, counted from the newest; 0 for all.
        num_versions: of all tenants.
        num_tokens: compared with what was expected.
        num_idle: versions of tenants that were not trained since the one before.
        unhurt: quarantines of engines that nobody had hurt.
    """

    expected: dict[str, Expected] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    seconds: dict[str, list[float]] = field(default_factory=dict)
    keep: int = 0
    num_versions: int = 0
    num_tokens: int = 0
    num_idle: int = 0
    largest_gap: float = 0.0
    hangs: list[str] = field(default_factory=list)
    wrong_versions: list[str] = field(default_factory=list)
    cross_tenant: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    not_back: list[str] = field(default_factory=list)
    unhurt: list[str] = field(default_factory=list)

    def expect(self, name: str, expected: Expected) -> None:
        """A version of a tenant has to answer this."""
        self.expected[name] = expected
        self.num_versions += 1
        tenant, version = split_adapter_name(name)
        if self.keep:
            self.expected.pop(adapter_name(tenant, version - self.keep), None)

    def take_seconds(self) -> dict[str, list[float]]:
        """Return the times since the last call."""
        taken, self.seconds = self.seconds, {}
        return taken

    def num_complaints(self) -> int:
        return sum(len(getattr(self, name)) for name in COMPLAINTS)

    def took(self, operation: str, seconds: float) -> None:
        """An operation came to its end."""
        self.seconds.setdefault(operation, []).append(seconds)

    def check_sample(self, tenant: str, sample: Sample, *, oldest: int, newest: int, where: str = "") -> None:
        """A sample of the fixed prompt must be of a version from `oldest` to `newest`, and be what that version answers."""
        versions = set(sample.versions)
        name = adapter_name(tenant, min(versions))
        if len(versions) > 1 or not oldest <= min(versions) <= newest or name not in self.expected:
            self.wrong_versions.append(f"{tenant}{where} answered by versions {sorted(versions)}, not one of {oldest} to {newest}")
            return
        if reason := self.expected[name].differs(sample):
            others = [other for other, expected in self.expected.items() if not expected.differs(sample)]
            own = [other for other in others if split_adapter_name(other)[0] == tenant]
            complaints = self.wrong_versions if own else self.cross_tenant
            complaints.append(f"{name}{where}: {reason}; it is what {(own or others)[0] if others else 'no version'} answers")
            return
        self.num_tokens += len(self.expected[name].token_ids)
        self.largest_gap = max(self.largest_gap, *map(_gap, sample.logprobs, self.expected[name].logprobs), 0.0)

    def check_canary(self, name: str, canary_logprob: float) -> None:
        """What the trainer says of a version must be what its folder gives."""
        if not (gap := abs(canary_logprob - self.expected[name].canary_logprob)) <= TOLERANCE:
            self.cross_tenant.append(f"{name}: the trainer's log-probability of the canary is off by {gap:.2g}")

    def check_unchanged(self, name: str, unchanged: bool) -> None:
        """A version of a tenant that was left alone since the one before must be the same."""
        self.num_idle += 1
        if not unchanged:
            self.cross_tenant.append(f"{name} is another adapter than before, although its tenant was not trained")

    def judge_faults(self, events: Sequence[Mapping[str, Any]]) -> None:
        """Find in the run's events when each fault of an engine was noticed and healed, and complain of what is missing or too much.

        One fault ends before the next begins.
        """
        ends = [*(fault.at_s for fault in self.faults[1:]), math.inf]
        for fault, end_s in zip(self.faults, ends, strict=True):
            own = [event for event in events if fault.at_s - _ROUNDING_S <= event["time_s"] < end_s - _ROUNDING_S]
            self._judge(fault, [event for event in own if event.get("engine") == fault.target])
            self._blame(event for event in own if event.get("engine") != fault.target)
        self._blame(event for event in events if not self.faults or event["time_s"] < self.faults[0].at_s - _ROUNDING_S)

    def _judge(self, fault: Fault, events: Sequence[Mapping[str, Any]]) -> None:
        for event in events:
            if event["kind"] == "quarantine" and fault.noticed_s is None:
                fault.noticed_s, fault.reason = round(event["time_s"] - fault.at_s, 3), event["reason"]
            elif event["kind"] == "healed":
                fault.healed_s = round(event["time_s"] - fault.at_s, 3)
        if fault.noticed_s is not None and fault.healed_s is None:
            self.not_back.append(f"{fault.target} after {fault.kind}")
        elif fault.noticed_s is None and fault.kind in MUST_BE_NOTICED:
            self.failures.append(f"{fault.kind} of {fault.target} was not noticed")

    def _blame(self, events: Iterable[Mapping[str, Any]]) -> None:
        self.unhurt += [f"{event['engine']}: {event['reason']}" for event in events if event["kind"] == "quarantine"]

    def smallest_difference(self) -> float:
        """Between the answers of any two versions that differ at all: far above the tolerance, or the checks would show nothing."""
        firsts = np.unique(np.stack([expected.first for expected in self.expected.values()]), axis=0)
        return min((float(np.abs(firsts[i + 1 :] - row).max(1).min()) for i, row in enumerate(firsts[:-1])), default=0.0)

    def result(self, **settings: Any) -> dict[str, Any]:
        """All of it, for a file."""
        complaints = {name: getattr(self, name) for name in COMPLAINTS}
        return {
            "passed": not any(complaints.values()), **settings,
            "tokens": self.num_tokens, "versions": self.num_versions, "idle_versions": self.num_idle,
            **{name: {"count": len(found), "first": found[:5]} for name, found in complaints.items()},
            "largest_logprob_gap": self.largest_gap, "smallest_difference": self.smallest_difference(),
            "operations": {name: _spread(values) for name, values in self.seconds.items()},
            "faults": [asdict(fault) for fault in self.faults]}


def _spread(values: Sequence[float]) -> dict[str, float]:
    p50, p99 = np.percentile(values, [50, 99])
    return {"count": len(values), "p50_s": round(float(p50), 4), "p99_s": round(float(p99), 4), "max_s": round(max(values), 4)}


def _gap(one: float, other: float) -> float:
    return abs(one - other)
