"""Calls of the user's own objective and credit that need a bound. Torch-free.

`check_own_code` tries both out before anything is started: `offbeat config check` and `offbeat train` call it. Credit is called in this
process, as in a run; an objective in a child process, which imports torch.
"""

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

from offbeat.aio import SideThread
from offbeat.algorithms.own_credit import check_credit
from offbeat.config.algorithms import AlgorithmConfig
from offbeat.errors import CodeError, DeadlineError, OwnCodeError
from offbeat.extras import TRAIN, require
from offbeat.user_code.pool import CodePool, CodeRole

T = TypeVar("T")

_TIMEOUT_S = 120.0


def check_own_code(algorithm: AlgorithmConfig) -> list[str]:
    """Call each function of the user's own that [algorithm] names on made-up samples, and return a line on each.

    Raises:
        CodeError: a function failed; says why in one sentence.
        MissingExtraError: there is an objective, and torch is not installed.
    """
    lines = []
    if algorithm.credit:
        _check_credit(algorithm.credit, algorithm.constants)
        lines.append(f"algorithm.credit = {algorithm.credit!r} gives finite advantages of the right shape for made-up samples")
    if algorithm.has_own_objective:
        require("train", TRAIN, wanted_by="the check of algorithm.objective")
        asyncio.run(_check_objective(algorithm))
        lines.append(f"algorithm.objective = {algorithm.objective!r} gives finite losses with gradients for made-up tokens")
    return lines


async def with_credit(make: Callable[[], T], *, credit: str, step: int, timeout_s: float) -> T:
    """Call `make`, which calls the function that `credit` names, on a thread that does not keep this process from ending.

    Raises:
        OwnCodeError: it has not returned within `timeout_s` seconds, or the function failed.
    """
    thread = SideThread("credit")
    try:
        return await thread.run("credit", make, timeout_s=timeout_s)
    except DeadlineError as exc:
        raise OwnCodeError(
            f"credit {credit!r} has not returned after {timeout_s:g} s, in step {step}; see whether it can wait for something without end,"
            " or raise train.step_timeout_s") from exc
    finally:
        thread.close()


def _check_credit(credit: str, constants: Mapping[str, Any]) -> None:
    try:
        asyncio.run(with_credit(partial(check_credit, credit, constants), credit=credit, step=0, timeout_s=_TIMEOUT_S))
    except OwnCodeError as exc:
        raise CodeError(
            f"algorithm.credit = {credit!r} has not returned after {_TIMEOUT_S:g} s, when it was tried out on made-up samples; see whether"
            " it can wait for something without end") from exc


async def _check_objective(algorithm: AlgorithmConfig) -> None:
    role = CodeRole(
        "the check of algorithm.objective", "offbeat.losses.own_check:OwnObjectiveCheck", load=algorithm.model_dump_json().encode(),
        hides_secrets=False,  # as in a rank, where it is called in a run
        variables={"CUDA_VISIBLE_DEVICES": ""},  # a few tokens need no device
        start_timeout_s=_TIMEOUT_S)
    async with CodePool(role, num_processes=1):
        pass
