r"""Reward 1 for a mathematically equal final answer: `1/2`, `0.5` and `\frac{1}{2}` are the same.

The final answer is what follows the last `####`, else the last `\boxed{...}`, else the last number or formula. Equality is math-verify's.
Runs in a reward process, whose deadline ends a call that hangs: math-verify's own timeouts need SIGALRM, and so the main thread.
"""

import logging

from math_verify import parse, verify

from offbeat.data.row import Row

# It warns on every call that its timeouts are off, as intended here.
logging.getLogger("math_verify").setLevel(logging.ERROR)

_BOXED = r"\boxed{"


def math_reward(completion: str, row: Row) -> float:
    """Return 1.0 if the completion's final answer equals the row's, else 0.0; also 0.0 if no answer is found."""
    found = parse(final_answer(completion), parsing_timeout=0)
    gold = parse(final_answer(row.answer), parsing_timeout=0)
    return float(bool(found) and bool(gold) and verify(gold, found, timeout_seconds=None))


def final_answer(text: str) -> str:
    """Return the part of `text` that states the answer, in a form that math-verify reads; the whole text if nothing marks an answer."""
    _, mark, after = text.rpartition("####")
    if mark:
        return after.strip().partition("\n")[0]
    start = text.rfind(_BOXED)
    if start < 0:
        return text
    depth = 1
    for end in range(start + len(_BOXED), len(text)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if depth == 0:
            return text[start:end + 1]
    return ""  # the text ends inside the box, so no answer was given
