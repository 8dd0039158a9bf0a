"""Cuts a rollout into the messages of its conversation, for the terminal and the live page."""

import re
from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate

from offbeat.data.stored_rollouts import KeptTrajectory

_ROLES = re.compile(
    r"<\|im_start\|>(\w+)\n|<\|start_header_id\|>(\w+)<\|end_header_id\|>\s*|<start_of_turn>(\w+)\n"
    r"|<\|(system|user|assistant|tool|observation)\|>\n?|(?:\A|\n)(system|user|assistant|tool): ")
_TOOL_RESULT = re.compile(r"<tool_response>|<\|python_tag\|>|<\|observation\|>")
_TOOLS = frozenset({"tool", "observation", "ipython"})


@dataclass(frozen=True)
class MessageSpan:
    """Tokens `start` to `end` of a trajectory.

    Attributes:
        role: "policy" for generated tokens; else the chat template's role, such as "system", "user" or "tool", or "given".
        turn: number of the policy's turn, from 1, to which generated tokens belong, or after which others follow; 0 before the first.
    """

    role: str
    start: int
    end: int
    turn: int = 0


def messages_of(t: KeptTrajectory) -> list[MessageSpan]:
    """Return the messages of a trajectory in order; together they are all of its tokens."""
    found: list[MessageSpan] = []
    pieces, start, turn = t.pieces, 0, 0
    for end in range(1, len(t.tokens) + 1):
        if end < len(t.tokens) and t.loss_mask[end] == t.loss_mask[start]:
            continue
        if t.loss_mask[start]:
            turn += 1
            found.append(MessageSpan("policy", start, end, turn))
        else:
            found += _given(pieces[start:end], start, turn)
        start = end
    return found


def _given(pieces: list[str], first: int, turn: int) -> list[MessageSpan]:
    """Cut tokens that were given to the policy where the marks of a chat template begin a message."""
    bounds = [0, *accumulate(map(len, pieces))]
    text = "".join(pieces)
    starts = [(bisect_right(bounds, match.start()) - 1, next(filter(None, match.groups())), match.start())
              for match in _ROLES.finditer(text)]
    if not starts or starts[0][0] > 0:
        starts.insert(0, (0, "given", 0))
    found = []
    for (start, role, at), (end, _, until) in zip(starts, [*starts[1:], (len(pieces), "", len(text))], strict=True):
        if start < end:
            is_tool = role in _TOOLS or _TOOL_RESULT.search(text, at, until)
            found.append(MessageSpan("tool" if is_tool else role, first + start, first + end, turn))
    return found
