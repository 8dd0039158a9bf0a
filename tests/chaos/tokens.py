"""Tokens that the engines of a run have sampled for training, each by its sample and its position; see `counting/sitecustomize.py`."""

from pathlib import Path

import numpy as np

COUNTING = Path(__file__).parent / "counting"


def environment(folder: Path) -> dict[str, str]:
    """Return the variables with which processes count what they sample, into files of `folder`."""
    folder.mkdir(exist_ok=True)
    return {"PYTHONPATH": str(COUNTING), "OFFBEAT_COUNT_TOKENS": str(folder)}


def count(folder: Path) -> tuple[int, int]:
    """Return the number of sampled tokens, and how many of them had been sampled before."""
    found = [np.frombuffer(data[: len(data) // 16 * 16], np.uint64).reshape(-1, 2)
             for data in (path.read_bytes() for path in sorted(folder.iterdir()))]
    if not found:
        return 0, 0
    sampled = np.concatenate(found)
    return len(sampled), len(sampled) - len(np.unique(sampled, axis=0))
