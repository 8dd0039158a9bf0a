"""Tries out the user's own objective and credit before anything is started: `offbeat config check` and `offbeat train` call it. Torch-free.

Credit is called in this process, which is where a run calls it; an objective in a child process, which imports torch.
"""

import asyncio

from offbeat.algorithms.own_credit import check_credit
from offbeat.config.root import Config
from offbeat.extras import TRAIN, require
from offbeat.process.child import Child, ChildSpec

_TIMEOUT_S = 120.0


def check_own_code(config: Config) -> list[str]:
    """Call each function of the user's own that [algorithm] names on made-up samples.

    Returns:
        A line on each function.

    Raises:
        CodeError: says in one sentence what is wrong with one of them.
        MissingExtraError: there is an objective, and torch is not installed.
    """
    algorithm, lines = config.algorithm, []
    if algorithm.credit:
        check_credit(algorithm.credit, algorithm.constants)
        lines.append(f"algorithm.credit = {algorithm.credit!r} gives finite advantages of the right shape for made-up samples")
    if algorithm.has_own_objective:
        require("train", TRAIN, wanted_by="the check of algorithm.objective")
        asyncio.run(_check_objective(config))
        lines.append(f"algorithm.objective = {algorithm.objective!r} gives finite losses with gradients for made-up tokens")
    return lines


async def _check_objective(config: Config) -> None:
    environment = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}  # a few tokens need no device
    child = await Child.start(
        ChildSpec("the check of algorithm.objective", "offbeat.losses.own_check:OwnObjectiveCheck", environment), timeout_s=_TIMEOUT_S)
    try:
        await child.call("check", config.model_dump_json().encode(), timeout_s=_TIMEOUT_S)
    finally:
        await child.stop(timeout_s=_TIMEOUT_S)
