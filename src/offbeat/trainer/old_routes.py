"""Experts of the old policy: those that the policy uses before a step's first update, replayed in all updates of the step.

Called by `Trainer.train_step`, which runs each row once before several updates, for `prox_logprobs` or for this alone. With a single update
the old policy is the current one, whose routers choose the same again.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from torch import nn

from offbeat.config.for_processes import RankConfig
from offbeat.data.expert_routes import unknown_id
from offbeat.data.packing import PackedRow
from offbeat.model.context import share_of
from offbeat.model.route_replay import RouteLog


class OldRoutes:
    """The routes of the rows of one step; rows stay as they are unless it `is_on`, as the configuration says."""

    def __init__(self, module: nn.Module, config: RankConfig, *, is_policy: bool) -> None:
        """`module` is called in forward passes, and replays routes if they are on."""
        self.is_on = is_policy and config.model.route_replay == "old_policy"
        self._module = module
        self._log = RouteLog()
        self._found: list[np.ndarray] = []

    def recording(self, rows: Sequence[PackedRow]) -> Iterator[PackedRow]:
        """Yield the rows, each of which runs once without gradients before the next one."""
        self._found = []
        for row in rows:
            if not self.is_on:
                yield row
                continue
            with self._log.recording():
                yield row
            self._found.append(self._routes_of(row))

    def replayed(self, plan: Sequence[Sequence[PackedRow]]) -> list[list[PackedRow]]:
        """Return the rows that `recording` had, in order, with the routes that they used; as they are if nothing was recorded."""
        found = iter(self._found)
        self._found = []
        return [[row if (routes := next(found, None)) is None else replace(row, routes=routes) for row in rows] for rows in plan]

    def _routes_of(self, row: PackedRow) -> np.ndarray:
        """Return [R, K]; those of tokens that run on another rank, which replays them itself, are unknown."""
        own, share = self._log.last_routes(), share_of(self._module, row)
        routes = np.full((len(share.row), own.shape[1]), unknown_id(own.dtype), own.dtype)
        routes[share.here] = own
        return routes[: len(row)]
