"""Chooses the engine of a request: the one with the least outstanding tokens, or the session's last one if it is not much busier.

It only decides; `offbeat.fleet.dispatch` passes the engines that may take the request and their loads with every call.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence

YIELD_FACTOR = 1.5
YIELD_REQUESTS = 4
"""A session stays where its prefix is cached until that engine's load exceeds YIELD_FACTOR times the least load plus YIELD_REQUESTS
requests. The factor alone would move sessions between nearly idle engines, and requests alone between busy ones."""
_MAX_SESSIONS = 65_536


class Router:
    """Remembers the engine of each session's last request, and when each engine was chosen last."""

    def __init__(self, *, max_sessions: int = _MAX_SESSIONS) -> None:
        """`max_sessions` is the number of most recent sessions that are remembered, because sessions do not announce their end."""
        self._max_sessions = max_sessions
        self._homes: OrderedDict[str, str] = OrderedDict()
        self._turns: OrderedDict[str, None] = OrderedDict()
        """Engines in the order of their last choice, oldest first: among a thousand of them, an idle one is found at once."""

    def choose(self, loads: Mapping[str, int], *, cost: int, session: str = "") -> str:
        """Choose among `loads`, the outstanding tokens of every engine that may take a request of `cost` tokens.

        The engine that had the session's last request has its prefix in the cache. It is taken again unless its load
        exceeds YIELD_FACTOR * least load + YIELD_REQUESTS * cost; then the session moves. Equally busy engines take turns.

        For example, with loads of 5000 and 1000 and a cost of 500 the bound is 1.5 * 1000 + 4 * 500 = 3500: a session leaves the first one.
        """
        if not loads.keys() <= self._turns.keys():
            self._let_in([name for name in loads if name not in self._turns])
        smallest = min(loads.values())
        least = next(name for name in self._turns if loads.get(name) == smallest)
        home = self._homes.get(session, least) if session else least
        chosen = home if home in loads and loads[home] <= YIELD_FACTOR * loads[least] + YIELD_REQUESTS * cost else least
        self._turns.move_to_end(chosen)
        if session:
            self._homes[session] = chosen
            self._homes.move_to_end(session)
            if len(self._homes) > self._max_sessions:
                self._homes.popitem(last=False)
        return chosen

    def _let_in(self, new: Sequence[str]) -> None:
        """Put engines in front, in their order, since they were never chosen."""
        for name in reversed(new):
            self._turns[name] = None
            self._turns.move_to_end(name, last=False)
