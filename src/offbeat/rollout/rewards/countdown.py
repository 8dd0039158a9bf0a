"""Reward for countdown: an expression in + - * / that makes the target from the given numbers, each used at most once.

The completion is parsed, never evaluated. It may contain only whole numbers, the four operators and parentheses.
"""

import ast
import operator
import re
from collections import Counter
from fractions import Fraction

from offbeat.data.row import Row
from offbeat.errors import DataError

_ALLOWED_TEXT = re.compile(r"[0-9+\-*/() ]{1,512}")
_SIGNS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def countdown(completion: str, row: Row) -> float:
    """Return 1.0 if the completion is an expression over the row's `numbers` that equals its `target`, else 0.0.

    Raises:
        DataError: the row has no `numbers` or `target` among its extra fields.
    """
    if missing := [name for name in ("numbers", "target") if name not in row.extra]:
        raise DataError(
            f"the countdown reward needs rows with fields 'numbers' and 'target', this one has no {missing[0]!r};"
            ' use data.task = "countdown"')
    numbers = Counter(int(n) for n in re.findall(r"\d+", row.extra["numbers"]))
    text = completion.strip()
    if not _ALLOWED_TEXT.fullmatch(text):
        return 0.0
    used: Counter[int] = Counter()
    try:
        value = _value(ast.parse(text, mode="eval").body, used)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return 0.0
    return float(value == Fraction(row.extra["target"]) and used <= numbers)


def _value(node: ast.expr, used: Counter[int]) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        used[node.value] += 1
        return Fraction(node.value)
    if not isinstance(node, ast.BinOp) or type(node.op) not in _SIGNS:
        raise ValueError("only numbers and the four signs")
    return _SIGNS[type(node.op)](_value(node.left, used), _value(node.right, used))
