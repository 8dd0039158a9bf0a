r"""Whether two answers of mathematics are the same, both bare LaTeX: `\frac{1}{2}`, `0.5` and `50\%` are.

Texts are compared as texts, plain numbers as fractions, and all else by math-verify, which reads both as the content of a box. No answer
costs much: long and deeply nested ones, and numbers of more than 65,536 bits, are not computed, and math-verify may spend one second of CPU
time on an answer. An answer beyond a bound is equal only to one that is written the same.
"""

import cmath
import logging
import math
import re
import signal
import threading
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache
from types import FrameType
from typing import Any, TypeVar

import sympy
from math_verify import LatexExtractionConfig, parse, verify
from sympy.core.function import AppliedUndef

from offbeat.rollout.rewards.final_answer import LONGEST
from offbeat.user_code.boundary import Caught

# It warns on every call that its timeouts are off: they need SIGALRM, which a user's reward may use in the same process.
logging.getLogger("math_verify").setLevel(logging.CRITICAL)

_LIMIT_S = 1.0
_AGAIN_S = 0.05
_DEEPEST = 12
_MOST_BITS = 1 << 16

_CONFIG = (LatexExtractionConfig(boxed_match_priority=0),)
_WRAPPED = re.compile(r"\\(?:text[a-z]*|math(?:rm|bf|it|sf|tt|normal)|mbox|emph|operatorname)\s*\{([^{}]*)\}")
_SPACES = re.compile(r"\\[,;:> ]|~|\\q?quad\b|\\displaystyle\b|\\left(?![a-z])|\\right(?![a-z])")
_THOUSANDS = re.compile(r"(?<=\d)(?:\{,\}|\\,|\\!|,\\!|\\!,)(?=\d{3})")
_SAME = {
    r"\dfrac": r"\frac", r"\tfrac": r"\frac", r"\cfrac": r"\frac", r"\dbinom": r"\binom", r"\tbinom": r"\binom", r"\lbrace": r"\{",
    r"\rbrace": r"\}", r"\leqslant": r"\leq", r"\geqslant": r"\geq", r"\varnothing": r"\emptyset", "\u2212": "-"}
_NOTHING = re.compile(r"\\!|(?<!\\)\$")
_ABOUT = re.compile(r"(?i)^(?:approximately|about|around|roughly)\s+|^\\approx\s*")
_REPEATING = re.compile(r"(?<!\d)(\d*)\.(\d*)\\(?:overline|bar)\s*(?:\{(\d+)\}|(\d))")
_UNIT_I = re.compile(r"(?<=[\d}])i(?![A-Za-z])")

_DECIMAL = re.compile(r"([-+]?)(?:\\?\$)?(\d{1,3}(?:,\d{3})+|\d*)(\.\d*)?")
_RATIO = re.compile(r"([-+]?)(?:\\frac\{([-+]?\d+)\}\{(\d+)\}|(\d+)/(\d+))")
_IN_BASE = re.compile(r"([0-9A-Za-z]+)_(?:\{([a-z]+|\d+)\}|([a-z]+|\d+))")
_BASES = {
    "two": "2", "three": "3", "four": "4", "five": "5", "six": "6", "seven": "7", "eight": "8", "nine": "9", "ten": "10", "eleven": "11",
    "twelve": "12", "sixteen": "16"}

_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{4,}")
_NO_WORDS = {
    "sqrt", "frac", "sinh", "cosh", "tanh", "arcsin", "arccos", "arctan", "infinity", "alpha", "beta", "gamma", "theta", "floor", "ceil"}
_CLOCK = re.compile(r"(?i)\d:\d\d\s*[ap]\.?\s*m\b")
_CHOICE = re.compile(r"\(?([A-J])\)?(?:[).:]|\s|$).*", re.DOTALL)
_CHOICES = re.compile(r"[A-J](?:,[A-J])*")

_T = TypeVar("_T")


def equal(gold: str, answer: str) -> bool:
    """Whether an answer is the same as the gold answer, of which it may leave out units, a dollar, a percent sign or the base."""
    right, given = _plain(gold), _plain(answer)
    if not right or not given:
        return False
    if _letters(right) == _letters(given):
        return True
    if _CHOICES.fullmatch(_letters(right)) and (choice := _CHOICE.fullmatch(given)):
        return choice[1] == _letters(right)
    if (one := _number(right)) is not None and (other := _number(given)) is not None:
        return _close(one, other)
    if _is_text(right) or max(len(right), len(given)) > LONGEST or max(_depth(right), _depth(given)) > _DEEPEST:
        return False
    if (based := _in_base(right)) is not None and (other := _in_base(given)) is not None:
        return based == other
    return _equal_mathematics(_latex(gold), _latex(answer))


def _plain(text: str) -> str:
    """Return a text with one spelling for the several ones of LaTeX, without fonts and thin spaces."""
    text = _THOUSANDS.sub("", text.strip())
    for _ in range(4):  # fonts in fonts
        text, found = _WRAPPED.subn(r"\1", text)
        if not found:
            break
    for old, new in _SAME.items():
        text = text.replace(old, new)
    text = _ABOUT.sub("", _SPACES.sub(" ", _NOTHING.sub("", text)).strip())
    return text.rstrip(".,;: ") if len(text) > 1 else text


def _letters(text: str) -> str:
    """Return a plain text without spaces, except between digits, in lower case if it is a text, and (A) as A."""
    bare = re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", text)
    bare = re.sub(r"\(([A-Za-z])\)", r"\1", bare)
    if _CLOCK.search(text):
        bare = bare.replace(".", "").lower()
    if re.fullmatch("[a-j]", bare):  # a choice
        return bare.upper()
    return bare.lower() if re.fullmatch(r"[A-Za-z][A-Za-z'-]+", bare) or _is_text(text) else bare


def _is_text(plain: str) -> bool:
    """Whether an answer is words, a date or a time, which is not to be read as a product of letters."""
    if _CLOCK.search(plain):
        return True
    words = [word for word in _WORD.findall(plain) if word.lower() not in _NO_WORDS]
    return bool(words) and plain[:1].isalpha() and "=" not in plain and r"\in" not in plain


def _depth(text: str) -> int:
    depth = deepest = 0
    for letter in text:
        depth += (letter in "([{") - (letter in ")]}")
        deepest = max(deepest, depth)
    return deepest


def _number(plain: str) -> Fraction | None:
    """Return the value of an integer, a decimal, or a fraction of integers, such as 1/2 for "0.5"; None for all else."""
    bare = plain.replace(" ", "") if not re.search(r"\d\s+\d", plain) else plain
    if (found := _DECIMAL.fullmatch(bare)) is not None and re.search(r"\d", bare):
        whole, decimals = found[2].replace(",", "") or "0", (found[3] or ".").removeprefix(".")
        value = Fraction(int(whole + decimals), 10 ** len(decimals))
        return -value if found[1] == "-" else value
    if (found := _RATIO.fullmatch(bare)) is not None and int(below := found[3] or found[5]):
        value = Fraction(int(found[2] or found[4]), int(below))
        return -value if found[1] == "-" else value
    return None


def _close(one: Fraction, other: Fraction) -> bool:
    """Whether numbers are equal to six decimals and four digits, as 0.333333 and 1/3 are."""
    return abs(one - other) * 2_000_000 <= 1 and abs(one - other) * 10_000 <= max(abs(one), abs(other))


def _in_base(plain: str) -> tuple[str, str] | None:
    found = _IN_BASE.fullmatch(plain.replace(" ", ""))
    base = found and (found[2] or found[3])
    base = _BASES.get(base, base) if base else ""
    return (found[1].lstrip("0").upper(), base) if found and base.isdigit() else None


def _latex(text: str) -> str:
    """Return an answer in a form that math-verify reads rightly."""
    text = _ABOUT.sub("", _THOUSANDS.sub("", text.strip()).rstrip(".,;: "))
    for old, new in _SAME.items():
        text = text.replace(old, new)
    return _UNIT_I.sub(" i", _REPEATING.sub(_repeating, text))


def _repeating(found: re.Match[str]) -> str:
    once, again = found[2], found[3] or found[4]
    nines = (10 ** len(again) - 1) * 10 ** len(once)
    value = int((found[1] or "0") + once + again) - int((found[1] or "0") + once)
    return rf"\frac{{{value}}}{{{nines}}}"


def _equal_mathematics(gold: str, answer: str) -> bool:
    right = _parsed_gold(gold)
    return bool(right) and bool(_bounded(lambda: _verified(right, _parsed(answer))))


def _verified(gold: tuple[Any, ...], answer: tuple[Any, ...]) -> bool:
    if not answer:
        return False
    values = _value(gold[0]), _value(answer[0])
    if None not in values and _apart(*values):
        return False
    return verify(list(gold), list(answer), timeout_seconds=None)


def _value(read: Any) -> complex | None:
    """Return the value of an expression at a point, by which most wrong answers are told cheaply; None if it has no value.

    A percentage has none, since it may be written with its sign and without; neither has a symbol, which may be the name of another.
    """
    if not isinstance(read, sympy.Expr) or isinstance(read, sympy.Symbol) or read.has(sympy.UnevaluatedExpr, AppliedUndef):
        return None
    point = [(symbol, sympy.Rational(sum(map(ord, str(symbol))) % 89 + 2, 53)) for symbol in read.free_symbols]
    try:
        value = complex(read.subs(point).doit().evalf(15))  # type: ignore[arg-type]
    except (TypeError, ValueError, AttributeError):  # infinite, or without a value
        return None
    return value if cmath.isfinite(value) else None


def _apart(gold: Any, answer: Any) -> bool:
    """Whether numbers differ in the sixth decimal, or, where they are small, in the fourth digit, at which math-verify does not look."""
    largest, difference = max(abs(gold), abs(answer)), abs(gold - answer)
    return difference > max(1e-6, 1e-9 * largest) or (largest < 1e-2 and difference > 1e-4 * largest)


@lru_cache(maxsize=64)
def _parsed_gold(latex: str) -> tuple[Any, ...]:
    return _bounded(lambda: _parsed(latex)) or ()


def _parsed(latex: str) -> tuple[Any, ...]:
    """Return the expressions that math-verify reads; none where a number is too large to be computed."""
    found = parse(rf"\boxed{{{latex}}}", _CONFIG, extraction_mode="first_match", parsing_timeout=0)
    return () if any(isinstance(each, sympy.Basic) and _too_large(each) for each in found) else tuple(found)


def _too_large(expression: sympy.Basic) -> bool:
    """Whether a power, a factorial or a binomial of numbers in it has more than `_MOST_BITS` bits."""
    return any(
        isinstance(part, sympy.Pow | sympy.factorial | sympy.binomial) and part.is_number and not _bits(part) <= _MOST_BITS
        for part in sympy.preorder_traversal(expression))


def _bits(number: sympy.Basic) -> float:
    """Return about log2 of the largest value in the computation of a number; infinite if that is too large."""
    if isinstance(number, sympy.Pow):
        base, exponent = (_bits(part) for part in number.args)
        return _times(max(base, 1.0), _two_to(exponent))
    if isinstance(number, sympy.factorial):
        above = _bits(number.args[0])
        return _times(_two_to(above), above)
    if isinstance(number, sympy.binomial):
        return _times(_two_to(_bits(number.args[0])), 1.0)
    if isinstance(number, sympy.Rational):
        return float(max(abs(int(number.p)), int(number.q)).bit_length()) if abs(number) != 1 and number != 0 else 0.0
    if isinstance(number, sympy.Float):
        return abs(math.log2(abs(float(number)))) if 0 < abs(number) < 1e300 else math.inf if number else 0.0
    return sum(_bits(part) for part in number.args) if number.args else 2.0


def _times(one: float, other: float) -> float:
    return one * other if one < _MOST_BITS and other < _MOST_BITS else math.inf


def _two_to(exponent: float) -> float:
    return 2.0 ** exponent if exponent < 64 else math.inf


class _Late(BaseException):
    """The CPU time is over; no Exception, so that sympy does not take it for one of its own."""


def _bounded(compute: Callable[[], _T]) -> _T | None:
    """Return the result of a computation; None if it fails or takes more than `_LIMIT_S` of CPU time.

    Signals reach the main thread alone, which is where a reward process calls rewards; in others only the process's own deadline ends it.
    """
    with Caught(Exception, _Late):  # sympy raises many errors about expressions that it cannot compute, MemoryError among them
        return _timed(compute) if threading.current_thread() is threading.main_thread() else compute()
    return None


def _timed(compute: Callable[[], _T]) -> _T:
    on = True

    def raise_late(_number: int, _frame: FrameType | None) -> None:
        if on:
            raise _Late

    before = signal.signal(signal.SIGVTALRM, raise_late)
    try:
        signal.setitimer(signal.ITIMER_VIRTUAL, _LIMIT_S, _AGAIN_S)  # again, where a bare except has taken the first
        return compute()
    finally:
        on = False
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


_bounded(lambda: _verified(_parsed("x^2"), _parsed("x")))  # the first call builds tables, which takes a second
