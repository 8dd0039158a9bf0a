"""The result of a soak as text: a table for the terminal and a document. Pure; called by `run.py`."""

import re
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

_MAX_REASON = 220
_PROMISES = {
    "hangs": "operations past their last deadline", "wrong_versions": "samples of a wrong version",
    "cross_tenant": "samples or versions that another tenant has changed",
    "failures": "operations that failed though nothing of theirs was hurt", "not_back": "engines that did not come back",
    "unhurt": "engines that were quarantined though they were not hurt"}
_WHAT = {
    "kill": "an engine's process gets SIGKILL", "stop": "an engine's process gets SIGSTOP, and SIGCONT after 10 s",
    "slow": "an engine's process is stopped for four fifths of the time, for 6 s",
    "corrupt": "bytes of a tenant's new adapter are flipped, or its file is cut off",
    "rank": "the rank in a new adapter's configuration is not that of its tensors", "missing": "the tensors of a new adapter are not there"}
_HEAD = """\
# Soak

What many tenants notice while engines and adapters are hurt. `make soak` measures it for ten minutes and writes this file.

The tenants train adapters on one small random base model, on two ranks, a few at a time in turn; each publishes every few seconds, and
samples without a pause from its current version or the one before. Everything is done by `open_adapters`, with engine processes of the run.
A saboteur hurts one thing after the other and waits until all is well again.

Before an engine sees a version, Hugging Face's modules say what it has to answer, with the adapter merged into the weights. Every sample of
every tenant is compared with that, token by token, log-probabilities to 1e-4. A tenant that publishes twice without being trained in
between must write the same numbers. In the end every engine is asked for every tenant.
"""


def table(result: Mapping[str, Any]) -> str:
    """For a terminal."""
    lines = [f"{result[name]['count']:>6}  {promise}" for name, promise in _PROMISES.items()]
    lines += [f"        {name}: {text}" for name in _PROMISES for text in result[name]["first"]]
    lines += ["", f"{'fault':<10}{'times':>6}{'noticed, s':>18}{'healed, s':>18}"]
    lines += ["{:<10}{:>6}{:>18}{:>18}".format(*row) for row in _rows(result)]
    lines += ["", f"{'operation':<18}{'times':>8}{'p50, s':>9}{'p99, s':>9}{'most, s':>9}"]
    lines += [
        f"{name:<18}{o['count']:>8}{o['p50_s']:>9.3f}{o['p99_s']:>9.3f}{o['max_s']:>9.3f}" for name, o in result["operations"].items()]
    return "\n".join([*lines, "", "as promised" if result["passed"] else "NOT as promised"])


def document(result: Mapping[str, Any]) -> str:
    """For docs/."""
    head = (
        f"The last run: {result['seconds']:.0f} s, {result['tenants']} tenants, {result['engines']} engines, seed {result['seed']};"
        f" {result['versions']} versions, {result['operations']['sample']['count']} requests, {result['tokens']} tokens compared. "
        f"{'All as promised.' if result['passed'] else 'Not all as promised.'}")
    promises = _markdown(("promised to be none", "count"), [(promise, result[name]["count"]) for name, promise in _PROMISES.items()])
    gaps = (
        f"Largest difference of a log-probability: {result['largest_logprob_gap']:.1g}. Two versions that differ at all do so by\n"
        f"{result['smallest_difference']:.1g} or more. {result['idle_versions']} versions are of tenants not trained since the last.")
    faults = _markdown(
        ("fault", "what is done", "times", "noticed: median, most (s)", "healed: median, most (s)"),
        [(f"`{row[0]}`", _WHAT[row[0]], *row[1:]) for row in _rows(result)])
    reasons = "\n".join(f"- `{kind}`: {_short(_of(result, kind)[0]['reason'])}" for kind in _WHAT if _of(result, kind))
    operations = _markdown(
        ("operation", "times", "p50 (s)", "p99 (s)", "most (s)"),
        [(name, *values.values()) for name, values in result["operations"].items()])
    return "\n\n".join([
        _HEAD + "\n" + head, promises, gaps, "## Faults",
        "Seconds from the act. An engine is noticed when it is quarantined, and healed when it serves again, with all adapters proven;\n"
        "one that is only slow may stay in service. A damaged adapter is noticed when its tenant's publish fails, and healed when the\n"
        "tenant's next publish is served.",
        faults, "The first of each kind, as it was told:", reasons, "## Operations",
        "A publish holds the check by Hugging Face's modules, too; *fan-out* is its part in which engines load and prove.",
        operations]) + "\n"


def _rows(result: Mapping[str, Any]) -> list[tuple[str, int, str, str]]:
    found = ((kind, _of(result, kind)) for kind in _WHAT)
    return [(kind, len(own), _spread(own, "noticed_s"), _spread(own, "healed_s")) for kind, own in found if own]


def _of(result: Mapping[str, Any], kind: str) -> list[Mapping[str, Any]]:
    return [fault for fault in result["faults"] if fault["kind"] == kind]


def _spread(faults: Sequence[Mapping[str, Any]], figure: str) -> str:
    values = [fault[figure] for fault in faults if fault[figure] is not None]
    return f"{median(values):.2f}, {max(values):.2f}" if values else "-"


def _markdown(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in [head, ["---"] * len(head), *rows])


def _short(reason: str) -> str:
    reason = re.sub(r"/\S*/weights/", "weights/", reason)
    return (reason if len(reason) <= _MAX_REASON else reason[: _MAX_REASON - 1] + "…") or "it stayed in service"
