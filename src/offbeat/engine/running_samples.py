"""The answer of /v1/running: the tokens that samples of running requests have so far, also those of them that have ended. No I/O.

A client that asks from time to time can go on from these tokens when an engine has died. Used by `completion_endpoints`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import msgspec
import numpy as np

from offbeat.engine.answers import array_bytes
from offbeat.engine.request import Output


def complete_requests(
    have: Mapping[str, Sequence[int]], running: Mapping[str, Sequence[Output]], ended: Mapping[str, Sequence[Output]],
) -> dict[str, list[Output]]:
    """Return all samples of each request, in order, with the tokens that their client lacks; not requests of which a sample is missing.

    Args:
        have: how many tokens of each sample the client has, by request, such as {"r1": [0, 3]}, which may leave samples out.
        running: what the running samples have beyond that; see `Rows.running`.
        ended: whole samples that have ended.
    """
    told: dict[str, list[Output]] = {}
    for name, firsts in have.items():
        samples = {output.index: output for output in running.get(name, ())}
        samples |= {output.index: _after(output, firsts[output.index]) for output in ended.get(name, ()) if output.index < len(firsts)}
        if samples.keys() == set(range(len(firsts))):
            told[name] = [samples[index] for index in range(len(firsts))]
    return told


def _after(output: Output, first: int) -> Output:
    return replace(output, token_ids=output.token_ids[first:], logprobs=output.logprobs[first:], versions=output.versions[first:])


def write_running(have: Mapping[str, Sequence[int]], told: Mapping[str, Sequence[Output]]) -> bytes:
    """Encode samples by their requests' names: for each the number of tokens before, and the tokens that follow."""
    return msgspec.json.encode({"requests": {name: [{
        "first": first, "token_ids": array_bytes(output.token_ids, np.int32), "logprobs": array_bytes(output.logprobs, np.float32),
        "versions": array_bytes(output.versions, np.int32)} for first, output in zip(have[name], samples, strict=True)]
        for name, samples in told.items()}})
