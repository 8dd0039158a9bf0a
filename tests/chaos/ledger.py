"""Accounts for a run that was killed: what its journal, its checkpoints and its stored rollouts say now, against what they said before."""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from offbeat.checkpoint.recover import CheckpointIndex
from offbeat.controller.state import SavedState
from offbeat.data.trajectory import Group
from offbeat.data.wire import decode_json
from offbeat.journal.records import BatchTaken, decode_record
from offbeat.journal.run_journal import RunJournal, folder_of
from offbeat.journal.segments import Reader, find
from offbeat.journal.standing import JournalStanding
from offbeat.telemetry.jsonl import read_json_lines
from small_run import read_rollouts

Key = tuple[int, str]
"""The process that drew a prompt, and the prompt's id."""


@dataclass(frozen=True)
class Seen:
    """A finished group, as the journal or the stored rollouts have it.

    Attributes:
        admitted: version at which it was admitted.
        digest: of its tokens and their versions.
        versions: of the generated tokens of each trajectory.
    """

    prompt_id: str
    admitted: int
    digest: str
    versions: tuple[tuple[int, ...], ...]

    @classmethod
    def of_group(cls, group: Group) -> "Seen":
        columns = [(t.tokens.tolist(), t.loss_mask.tolist(), t.versions.tolist()) for t in group.trajectories]
        return cls._of(group.prompt_id, group.admitted_version, columns)

    @classmethod
    def of_stored(cls, group: dict[str, Any]) -> "Seen":
        columns = [(t["tokens"], t["loss_mask"], t["versions"]) for t in group["trajectories"]]
        return cls._of(group["prompt_id"], group["admitted_version"], columns)

    @classmethod
    def _of(cls, prompt_id: str, admitted: int, columns: list[tuple[list[int], list[bool], list[int]]]) -> "Seen":
        digest = hashlib.blake2b(json.dumps(columns).encode(), digest_size=8).hexdigest()
        versions = tuple(tuple(v for v, own in zip(versions, mask, strict=True) if own) for _, mask, versions in columns)
        return cls(prompt_id, admitted, digest, versions)


@dataclass
class Ledger:
    """What is known of a run.

    Attributes:
        eta: largest allowed staleness, in versions.
        finished: digest of each finished group's tokens, by prompt.
        trained: prompts of each step, in order.
        waiting: prompts that were drawn and not finished at the last audit.
        last: steps done.
        counts: what was not as promised, by kind.
        problems: the same, in words.
    """

    run_dir: Path
    eta: int
    heads: int = 1
    finished: dict[Key, str] = field(default_factory=dict)
    trained: dict[int, list[Key]] = field(default_factory=dict)
    waiting: set[Key] = field(default_factory=set)
    last: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    _checked: set[int] = field(default_factory=set)

    def audit(self) -> None:
        """Read the run's files after a life, and compare."""
        base, saved = self._checkpoint()
        here: set[Key] = set()
        waiting: set[Key] = set()
        lasts = []
        for head in range(self.heads):
            standing = self._standing(base, head)
            if standing is None:
                if base and saved is not None:
                    waiting |= {(head, each) for each in saved.heads[head].in_flight}
                lasts.append(base)
                continue
            lasts.append(base + len(standing.steps))
            for step in standing.steps:
                self._step(step.global_step, [(head, each.prompt_id) for each in step.groups])
                self._groups(head, (Seen.of_group(each.read()) for each in step.groups), step.global_step)
            groups = [*standing.ready.values(), *(standing.taken.groups if standing.taken else ())]
            self._groups(head, (Seen.of_group(each.read()) for each in groups), None)
            here |= {(head, each.prompt_id) for each in groups}
            waiting |= {(head, each) for each in standing.waiting}
        if (last := min(lasts)) < self.last:
            self._find("lost", f"{self.last} steps were done, and {last} are left")
        self.last = max(self.last, last)
        for head in range(self.heads):
            self._batches(head, self.last)
        self._stored(base)
        self._where(here, waiting)

    def _checkpoint(self) -> tuple[int, SavedState | None]:
        newest, _ = CheckpointIndex(self.run_dir / "checkpoints").choose()
        return (newest.step, decode_json(SavedState, newest.payload)) if newest else (0, None)

    def _standing(self, base: int, head: int) -> JournalStanding | None:
        with RunJournal(folder_of(self.run_dir, head), identity=b"", tell=self.problems.append) as journal:
            found = journal.read(base)
        if found is not None and found[1]:
            self._find("lost", f"the journal is damaged: {found[1]}")
        return found[0] if found else None

    def _step(self, step: int, keys: list[Key]) -> None:
        known = [each for each in self.trained.get(step, []) if each[0] == keys[0][0]]
        if known and known != keys:
            self._find("doubled", f"step {step} was trained on {known}, and now on {keys}")
        if not known:
            self.trained.setdefault(step, []).extend(keys)

    def _groups(self, head: int, groups: Iterable[Seen], step: int | None) -> None:
        """Compare groups with what they were; `step` has trained on them."""
        for group in groups:
            key, digest = (head, group.prompt_id), group.digest
            if self.finished.get(key, digest) != digest:
                self._find("tokens", f"{key} was finished, and has other tokens now")
            self.finished[key] = digest
            versions = [version for each in group.versions for version in each]
            is_stale = step is not None and not all(step - 1 - self.eta <= each <= step - 1 for each in versions)
            if is_stale or any(each < group.admitted for each in versions) or any(list(each) != sorted(each) for each in group.versions):
                self._find("versions", f"{key} of step {step}, admitted at {group.admitted}, has versions {versions}")

    def _batches(self, head: int, last: int) -> None:
        """Take up the batches of all steps that are still in the journal."""
        for segment in find(folder_of(self.run_dir, head)):
            for stored in Reader([segment]):
                record = decode_record(stored.payload)
                if isinstance(record, BatchTaken) and record.global_step <= last:
                    self._step(record.global_step, [(head, each) for each in record.prompt_ids])

    def _stored(self, base: int) -> None:
        """Compare the stored rollouts, which the leader writes, with the batches.

        Those of a step are stored beside the next one, or when it is redone: of a step that the checkpoint has, they must be there.
        """
        for step in range(1, self.last + 1):
            path = self.run_dir / "rollouts" / f"step-{step:06d}.jsonl.zst"
            if not path.exists():
                if step <= base:
                    self._find("lost", f"the rollouts of step {step} are not stored")
            elif step not in self._checked:
                groups = read_rollouts(path)
                self._step(step, [(0, group["prompt_id"]) for group in groups])
                self._groups(0, map(Seen.of_stored, groups), step)
                self._checked.add(step)

    def _where(self, here: set[Key], waiting: set[Key]) -> None:
        """Look for each prompt in the one place where it may be."""
        counted = Counter(key for step, keys in self.trained.items() if step <= self.last for key in keys)
        for key in (key for key, times in counted.items() if times > 1 or key in here or key in waiting):
            self._find("doubled", f"{key} was trained on, and is there again")
        settled = {
            (0, event["prompt_id"]) for event in read_json_lines(self.run_dir / "events.jsonl") if event.get("kind") == "rejected"}
        steps = [self.trained.get(step, []) for step in range(1, self.last + 1)]
        whole = [all(any(key[0] == head for key in keys) for keys in steps) for head in range(self.heads)]
        for key in self.finished:
            if key not in counted and key not in here and whole[key[0]]:
                self._find("lost", f"{key} was finished, and is gone")
        if self.heads == 1:
            for key in self.waiting:
                if key not in counted and key not in here and key not in waiting and key not in settled:
                    self._find("lost", f"{key} was drawn, and is gone")
        self.waiting = waiting

    def _find(self, kind: str, text: str) -> None:
        self.counts[kind] += 1
        self.problems.append(text)


