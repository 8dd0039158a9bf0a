"""Checks a world's ledger against what a run promises. Reads what the stand-ins and the disk have seen, not what the run says of itself."""

import json
from collections import Counter
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any

from worlds.drawn import World
from worlds.life import NAME, complete
from worlds.stand_in_engine import version_token, weights_token

_TOLD_S, _UNTOLD_S = 200.0, 1500.0
"""Virtual seconds within which ranks end after another one has: where it could tell them, and where its machine is gone with it."""


def violations(world: World, folder: Path) -> list[str]:
    """Return what a world's run has done against its promises; empty if all is well."""
    rows = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
    found = [f"raised: {row['raised']}" for row in rows if "raised" in row]
    found += [row["endless"] for row in rows if "endless" in row]
    found += [f"tasks left: {row['left']}" for row in rows if row.get("left")]
    done = [row for row in rows if "fingerprints" in row]
    if not found and not (rows[-1].get("done") == world.num_steps or (done and complete(rows[-1]))):
        found.append(f"it did not come to its end: {[row['ended'] for row in rows if 'ended' in row][-1:] or rows[-1:]}")
    found += [
        f"prompt {row['settled']} failed as if by user code: {row['reason']}" for row in rows if row.get("why") == "code failed"][:3]
    found += _generated_again(world, rows)
    found += _tokens_generated_again(world, rows)
    found += _trained_again(rows)
    found += ended_late(world, rows)
    if found:
        return found
    left = [] if complete(rows[-1]) else _files_left(world, folder)  # the next start, which clears up, was refused
    return [*_wrong_steps(world, done[-1]), *_wrong_prompts(world, done[-1], rows), *left]


def _wrong_steps(world: World, done: dict[str, Any]) -> list[str]:
    """Check each step's size, staleness and stamps in the model that came out."""
    found: list[str] = []
    steps, fingerprints = done["steps"], done["fingerprints"]
    if len(steps) != world.num_steps or len(fingerprints) != world.num_steps + 1:
        return [f"the model has learnt {len(steps)} steps, and {world.num_steps} were to be"]
    for number, groups in enumerate(steps):  # the trainer's version before the step
        if len(groups) != world.batch_size:
            found.append(f"step {number + 1} has {len(groups)} groups, not {world.batch_size}")
        for group in groups:
            for tokens, versions in group["samples"]:
                if not tokens or not number - world.eta <= min(versions) <= max(versions) <= number:
                    found.append(f"step {number + 1} has tokens of versions {versions}, eta = {world.eta}")
                    continue
                found += _wrong_tokens(number, tokens, versions, fingerprints)
    return found


def _wrong_tokens(number: int, tokens: list[int], versions: list[int], fingerprints: list[str]) -> list[str]:
    for token, version in zip(tokens, versions, strict=True):
        if token not in (version_token(version), weights_token(fingerprints[version])):
            return [f"step {number + 1} has token {token} stamped with version {version}, whose tokens are"
                    f" {version_token(version)} and {weights_token(fingerprints[version])}"]
    return []


def _wrong_prompts(world: World, done: dict[str, Any], rows: list[dict[str, Any]]) -> list[str]:
    """Check that no prompt of an epoch was trained on twice, and that none before the last ones trained on was lost."""
    found = []
    for head in range(world.num_heads):
        found += _wrong_prompts_of(world, head, done, rows)
    return found


def _wrong_prompts_of(world: World, head: int, done: dict[str, Any], rows: list[dict[str, Any]]) -> list[str]:
    """Check the prompts that one process has drawn."""
    counts = Counter(group["prompt"] for groups in done["steps"] for group in groups if group["head"] == head)
    found = [f"prompt {prompt} is trained on {count} times" for prompt, count in counts.items() if count > 1]
    rejected = {row["settled"] for row in rows if "settled" in row and row["head"] == head and not row["again"]}
    missing = []
    by_epoch: dict[int, set[int]] = {}
    for prompt in (*counts, *rejected):
        epoch, _, row = prompt.partition(":")
        by_epoch.setdefault(int(epoch), set()).add(int(row))
    last = max(by_epoch)
    num_rows = len(range(head, world.num_rows, world.num_heads))
    for epoch in range(last):
        missing += [f"{epoch}:{row}" for row in set(range(num_rows)) - by_epoch.get(epoch, set())]
    if missing:
        found.append(f"prompts {sorted(missing)[:10]} were lost")
    drawn = _drawn(world, head, rows)
    if lost := sorted(prompt for prompt in drawn - set(counts) - rejected if int(prompt.partition(":")[0]) == last):
        found.append(f"prompts {lost[:10]} were drawn, and neither trained on nor rejected")
    return found


def _drawn(world: World, head: int, rows: list[dict[str, Any]]) -> set[str]:
    """Prompts of a process that are owed: without a journal, none that a killed life has drawn after the last step that it saved.

    Nor with one at a power cut, as the journal is synced every few seconds.
    """
    owed: set[str] = set()
    trained: set[str] = set()
    new: set[str] = set()
    for row in rows:
        if "drawn" in row and row["head"] == head:
            new.add(row["drawn"])
        elif "trained" in row:
            trained = set(new)
        elif "saved" in row:
            owed |= trained
        elif row.get("killed") == "power_cut" or ("killed" in row and not world.settings["checkpoint.journal"]):
            new, trained = set(), set()
    return owed | new


def _generated_again(world: World, rows: list[dict[str, Any]]) -> list[str]:
    """Check that groups which were finished at a kill were not drawn by a later life."""
    settings = world.settings
    if not settings["checkpoint.journal"] or settings["rollout.on_stale"] == "requeue":
        return []
    if any(row.get("fault") in ("power_cut", "disk_full", "disk_slow") for row in rows):
        return []
    found, held = [], set()
    for row in rows:
        if "killed" in row:
            held |= set(map(tuple, row["held"]))
        elif (row.get("head"), row.get("drawn")) in held:
            found.append(f"prompt {row['drawn']} was finished at a kill, and was generated again")
    return found


@dataclass
class _Asked:
    """A request that an engine was sent, for samples of a prompt.

    Attributes:
        num: of its samples.
        told: when the run was told of tokens, with the versions of all that the samples had then.
    """

    prompt: str
    engine: str
    num: int
    told: list[tuple[float, list[list[int]]]] = field(default_factory=list)

    def versions(self, until_s: float, newest: float) -> list[list[int]]:
        """Versions of the tokens that the run was told of in time, up to the newest that its engine had proven then."""
        told = [versions for at, versions in self.told if at <= until_s]
        return [[each for each in sample if each <= newest] for sample in told[-1]] if told else [[]] * self.num


def _tokens_generated_again(world: World, rows: list[dict[str, Any]]) -> list[str]:
    """Check that unfinished samples of which the run had been told tokens before it was killed go on from these.

    It has until the next record after it was told, and records no tokens of weights before its engine has proven them; an adapter is proven
    before its first token. Of these tokens, those of versions count that the engine which goes on has, too.
    """
    if not world.keeps_running:
        return []
    recorded_after_s = world.settings["checkpoint.journal_running_s"] + 2.0
    found: list[str] = []
    requests: dict[str, _Asked] = {}
    proven: dict[str, list[tuple[float, int]]] = {}
    known: dict[str, list[list[int]]] = {}
    going_on: dict[str, list[tuple[int, int]]] = {}  # by prompt: tokens that a sample has when it is asked for, and the engine's version
    for row in (*rows, {"ended": "the last life"}):
        if ends := bool(row.keys() & {"killed", "ended", "done"}):
            found += [text for prompt, samples in known.items() if (text := _shorter(prompt, samples, going_on.get(prompt, [])))]
            known, going_on = {}, {}
        if "killed" in row:
            until_s = row["at"] - recorded_after_s
            for each in requests.values():
                of_engine = [version for at, version in proven.get(each.engine, ()) if at <= until_s]
                newest = inf if world.lora else max(of_engine, default=-1)
                known.setdefault(each.prompt, []).extend(each.versions(until_s, newest))
        if ends:
            requests, proven = {}, {}
        elif "proven" in row:
            proven.setdefault(row["engine"], []).append((row["at"], row["proven"]))
        elif row.get("told") in requests:
            requests[row["told"]].told.append((row["at"], [[0] * row["num_begun"] + each for each in row["versions"]]))
        elif "answered" in row:
            requests.pop(row["answered"], None)
        elif "asked" in row:
            requests[row["asked"]] = _Asked(row["prompt"], row["engine"], len(row["begun"]))
            going_on.setdefault(row["prompt"], []).extend((begun, row["version"]) for begun in row["begun"])
        elif "anew" in row:
            known = {}  # its first tokens would be too stale
    return found[:3]


def _shorter(prompt: str, samples: list[list[int]], going_on: list[tuple[int, int]]) -> str:
    """Say that samples went on from fewer tokens than were told; "" if all have them, or were not all asked for.

    Groups of several epochs may have the same prompt, so that the ones with most tokens are taken for those that went on.
    """
    if len(going_on) < len(samples):
        return ""
    oldest = min(version for _, version in going_on)
    wanted = sorted((sum(version <= oldest for version in each) for each in samples), reverse=True)
    has = sorted((begun for begun, _ in going_on), reverse=True)[:len(wanted)]
    if all(each >= least for each, least in zip(has, wanted, strict=True)):
        return ""
    return f"samples of prompt {prompt} go on from {has} tokens, and the run was told {wanted} before a kill"


def _trained_again(rows: list[dict[str, Any]]) -> list[str]:
    """Check that no step of which a checkpoint was saved is trained again."""
    saved, found = 0, []
    for row in rows:
        saved = max(saved, row.get("saved", 0))
        if row.get("trained", saved + 1) <= saved:
            found.append(f"step {row['trained']} was trained again, and a checkpoint of step {saved} had been saved")
    return found[:3]


def ended_late(world: World, rows: list[dict[str, Any]]) -> list[str]:
    """Check that the ranks of SPMD mode end soon after one of them has failed or died, and know that it has failed."""
    found, first, stopped = [], None, set()
    for row in rows if world.spmd else ():
        if "begins" in row:
            first, stopped = None, set()
        elif row.get("fault") == "rank_hangs":
            stopped.add(row["who"])
        elif "rank_end" in row and first is not None and row["rank_end"] not in (_who(first), *stopped):
            after_s = row["at"] - first["at"]
            if row.get("kills") and world.apart:
                found.append(f"rank {row['rank_end']} did not end although rank {_who(first)} had")
            if after_s > (_TOLD_S if "failed" in first or not world.apart else _UNTOLD_S):
                found.append(f"rank {row['rank_end']} ended {after_s:.0f} s after rank {_who(first)} had: {row['how']}")
            if "failed" in first and " timed out " in row["how"]:
                found.append(f"rank {row['rank_end']} was not told that rank {_who(first)} had failed: {row['how']}")
        if first is None and ("failed" in row or row.get("fault") == "rank_dies" or row.get("how")):
            first = row
    return found[:3]


def _who(row: dict[str, Any]) -> int:
    """Return the rank that a row tells of."""
    return next(row[key] for key in ("failed", "rank_end", "rank", "who") if key in row)


def _files_left(world: World, folder: Path) -> list[str]:
    run = folder / NAME
    names = [path.relative_to(run).as_posix() for path in run.rglob("*")]
    left = [name for name in names if name.endswith((".part", ".old"))]
    weights = [name for name in names if name.startswith("weights/") and name.count("/") == 1]
    heals = world.lora and any(fault.kind.startswith(("engine", "partition", "lost", "twice")) for fault in world.faults)
    if len(weights) > world.settings["weights.keep"] + 1 and not heals:  # an engine that heals reads newer adapters, one after another
        left += weights
    return [f"files left: {left[:10]}"] if left else []
