"""The admission gate: how many groups may be in flight, and which finished ones a step may take. Pure; driven by the executor.

With eta = `max_head_offpolicyness`, B = `consumer_batch_size`, M = `max_concurrent_rollouts`, all counted in groups, and
lag = version - served, the versions that the slowest engine is behind the trainer:

    capacity = min(M - running, (eta + 1 - lag) * B - (running + ready + training), B * steps left - (running + ready + training))

`ready` groups are finished and not yet taken; `training` groups were taken by the step that is being trained, or ahead of time by the one
after it, so that its batch is made while that one trains: by the same rule, at the version that it will train on. A group that is admitted
when all engines in service serve version a or a newer one may be trained on up to version a + eta, its deadline; so publishing may go on
beside training, and nothing is admitted while an engine is more than eta versions behind. A step takes the B ready groups with the earliest
deadlines, but only if the remaining groups can still meet theirs: for every deadline d, at most B * (d - version) unconsumed groups have a
deadline <= d. Otherwise it waits for the urgent groups that still run. It gets them in the order of their admission, so that a batch of the
same groups is the same batch, however long each of them took. Admission alone, as in AReaL, does not bound stragglers' staleness.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from offbeat.types import Version

Key = str
OnStale = Literal["wait", "requeue", "keep"]


@dataclass
class Gate:
    """Counts groups from admission to the end of the step that takes them.

    Attributes:
        batch_size: B.
        max_running: M.
        eta: largest allowed difference between the version of a step and the version at which its groups were admitted.
        version: version of the trainer's weights, from which the next step trains, or the one that is being trained.
        served: oldest version that an engine in service has; the trainer's at the beginning.
        last_version: version after the final step; groups that no step would take are not admitted. None admits without end.
        on_stale: "keep" takes ready groups whatever their age; the other values enforce the bound.
        running: deadlines of running groups, by key.
        ready: deadlines of ready groups, by key.
        training: number of groups in the step being trained.
        ahead: number of groups that were taken for the step after it.
    """

    batch_size: int
    max_running: int
    eta: int
    version: Version = 0
    last_version: Version | None = None
    on_stale: OnStale = "wait"
    running: dict[Key, Version] = field(default_factory=dict)
    ready: dict[Key, Version] = field(default_factory=dict)
    training: int = 0
    ahead: int = 0
    served: Version = -1
    _admissions: dict[Key, int] = field(default_factory=dict)
    _num_admitted: int = 0

    def __post_init__(self) -> None:
        self.served = max(self.served, self.version)

    @property
    def max_held(self) -> int:
        """Largest number of running, ready, training and ahead groups together: (eta + 1 - lag) * B, where lag = version - served.

        The steps at the versions `version` to `deadline` may take a group admitted now, and each of them takes B groups. With eta = 1, no
        lag and B = 8, for example, 16 groups.
        """
        return (self.deadline - self.version + 1) * self.batch_size

    @property
    def deadline(self) -> Version:
        """Last version at which a group admitted now may be trained on: served + eta."""
        return self.served + self.eta

    @property
    def capacity(self) -> int:
        """Number of groups that may be admitted now; see the formula in the module."""
        held = len(self.running) + len(self.ready) + self.training + self.ahead
        room = min(self.max_running - len(self.running), self.max_held - held)
        if self.last_version is not None:
            room = min(room, (self.last_version - self.version) * self.batch_size - held)
        return max(room, 0)

    def admit(self, key: Key, *, since: Version | None = None) -> Version:
        """Admit a group, whose deadline is `deadline` as it is now; returns the version at which it counts as admitted.

        `since` is the version at which an earlier process has admitted it, which counts if it can still be trained on in time.
        """
        assert self.capacity > 0, "admit without capacity"
        assert key not in self.running and key not in self.ready, f"group {key} is already in flight"
        due = self.deadline
        if since is not None and since + self.eta < due and self._is_in_time(since + self.eta):
            due = since + self.eta
        self.running[key] = due
        self._admissions[key] = self._num_admitted
        self._num_admitted += 1
        return due - self.eta

    def _is_in_time(self, due: Version) -> bool:
        """Whether a further group of this deadline leaves each group a step that can take it."""
        if self.on_stale == "keep":
            return True
        deadlines = sorted((*self.running.values(), *self.ready.values(), due))
        taken = self.training + self.ahead
        return all(taken + count <= self.batch_size * (each - self.version + 1) for count, each in enumerate(deadlines, 1))

    def take_over(self, ready: Mapping[Key, Version], *, training: int) -> None:
        """Begin with groups of an earlier process, in the order of their admission, and with so many that the first step has taken.

        `ready` has the versions at which they were admitted. The step that has taken groups may be of an earlier version than these.
        """
        assert not self.running and not self.ready, "groups are restored before others are admitted"
        self.ready = {key: version + self.eta for key, version in ready.items()}
        self._admissions = {key: number for number, key in enumerate(ready)}
        self._num_admitted, self.training = len(ready), training

    def finish(self, key: Key) -> None:
        """Note that a running group is ready to be trained on."""
        self.ready[key] = self.running.pop(key)

    def release(self, key: Key) -> None:
        """Free the place of a running group that was rejected, failed or cancelled."""
        del self.running[key], self._admissions[key]

    def take(self) -> list[Key] | None:
        """Take the B groups of the next step, those with the earliest deadlines; None while the step has to wait."""
        assert self.training == 0, "a step was taken before the one before it was trained"
        chosen = self._pick(self.version)
        self.training = len(chosen or ())
        return chosen

    def take_ahead(self) -> list[Key] | None:
        """Take the next step's B groups, in training after `advance`; None while they have to wait, or no step is in training."""
        assert not self.ahead, "the step after the one in training is taken once"
        if not self.training:
            return None
        chosen = self._pick(self.version + 1)
        self.ahead = len(chosen or ())
        return chosen

    def too_slow(self) -> list[Key]:
        """Return the running groups that alone hold up a full batch, to be cancelled and drawn again for `on_stale = "requeue"`."""
        if len(self.ready) < self.batch_size:
            return []
        chosen = sorted(self.ready, key=self.ready.__getitem__)[: self.batch_size]
        deadline = self._first_missed_deadline(chosen, self.version)
        return [] if deadline is None else [key for key, due in self.running.items() if due <= deadline]

    def advance(self, version: Version) -> None:
        """Note that the step in training has made this version of the weights."""
        assert version > self.version, f"version must rise, got {version} after {self.version}"
        self.version = version
        self.training, self.ahead = self.ahead, 0

    def serve(self, version: Version) -> None:
        """Note that every engine in service serves this version or a newer one."""
        assert version >= self.served, f"what is served must rise, got {version} after {self.served}"
        self.served = version

    def _pick(self, version: Version) -> list[Key] | None:
        """Take the groups of the step at `version` from the ready ones, or None."""
        if len(self.ready) < self.batch_size:
            return None
        chosen = sorted(self.ready, key=self.ready.__getitem__)[: self.batch_size]  # stable: ties leave in order of finishing
        if self.on_stale != "keep" and self._first_missed_deadline(chosen, version) is not None:
            return None
        for key in chosen:
            del self.ready[key]
        return sorted(chosen, key=self._admissions.pop)

    def _first_missed_deadline(self, chosen: list[Key], version: Version) -> Version | None:
        """Return the earliest deadline that some group would miss if the step at `version` took `chosen`, or None.

        After that step, the steps at versions `version` + 1 to d can take B * (d - version) groups, so no more may be due by d.
        """
        due = Counter(self.running.values()) + Counter(self.ready.values())
        due.subtract(Counter(self.ready[key] for key in chosen))
        unconsumed = 0
        for deadline in sorted(due):
            unconsumed += due[deadline]
            if unconsumed > self.batch_size * (deadline - version):
                return deadline
        return None
