r"""The final answer in a text: the text after `####`, the last `\boxed{...}`, the value after "the answer is", or the last value.

Used by the reward `math` for completions, and for answers in data that hold a whole solution. Only the end of a long text is looked at, and
every search is linear in it, so a text of megabytes costs no more than a short one.
"""

import re

_TAIL = 4000
"""Characters at the end of a text in which an unmarked answer is looked for."""

LONGEST = 1000
"""Characters of an answer; a box with more has none."""

_MOST_BOXES = 16
_BOX = re.compile(r"\\f?boxed\s*\{|\\fbox\s*\{")
_BARE_BOX = re.compile(r"\\boxed\s+([^\s{}$]+)")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_BETWEEN_BOXES = re.compile(r"[\s,;$]*(?:\\text\s*\{\s*(?:and|or)\s*\}|and|or)?[\s,;$]*")
_SAID = re.compile(r"(?i)\banswer\**\s*(?:is\b|[:=])[ \t:=]*\**[ \t]*([^\n]+)")
_FORMULA = re.compile(r"(?<!\\)\$\$([^$]+)\$\$|(?<![\\$])\$((?:\\.|[^$\n\\])+)\$|\\\(([^\n]+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_SENTENCE_END = re.compile(r"\.\s+[A-Z]|\.?\**\s*$")
_NUMBER = re.compile(r"(?<![\w\\{(\[,^./])-?\\?\$?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.?\d+)(?:/\d+)?(?:\\?%)?(?![\w\\})\]^]|[.,/]\d)")
_STATES = re.compile(r"\b(?:is|are|was|equals?|gives|get|have|makes?)\b")


def final_answers(text: str) -> tuple[str, ...]:
    """Return the possible final answers of a text, as bare LaTeX, such as ("42",); empty if there is none.

    A marked answer is the only one. Without a mark they are the whole text, if it is short, and the last formula or number in it.
    """
    if (marked := _marked(text)) is not None:
        return (marked,) if marked else ()
    tail = text[-_TAIL:].strip()
    whole = [unwrapped(tail)] if tail and len(text) <= LONGEST and "\n" not in tail else []
    last = _last_value(tail)
    return tuple(dict.fromkeys(filter(None, [*whole, last])))


def gold_answer(text: str) -> str:
    """Return the answer that data gives: marked, or the last value of a sentence, else the whole of it."""
    if (marked := _marked(text)) is not None:
        return marked
    bare = unwrapped(text.strip())
    is_prose = _FORMULA.search(bare[-_TAIL:]) or _STATES.search(bare[-_TAIL:])
    return _last_value(bare[-_TAIL:]) or bare if is_prose and r"\text" not in bare else bare


def unwrapped(text: str) -> str:
    r"""Return a text without the dollars, or \( \) or \[ \], around all of it, and without a full stop at its end."""
    bare = text.strip().strip("*").strip()
    if (found := _FORMULA.fullmatch(bare.rstrip(".,;: "))) is not None:
        bare = _content(found).strip()
    return bare if bare.endswith((r"\.", r"\right.")) else bare.rstrip(".,;: \n")


def _marked(text: str) -> str | None:
    """Return the marked answer, empty where a mark has none behind it; None without a mark."""
    _, mark, after = text.rpartition("####")
    if mark:
        return unwrapped(after[:LONGEST].strip().partition("\n")[0])
    if (boxed := _boxed(text)) is not None:
        return boxed
    said = [found[1] for found in _SAID.finditer(text[-_TAIL:])]
    return _said(said[-1].strip()) if said else None


def _boxed(text: str) -> str | None:
    """Return the content of the last box, and of boxes that a comma or a word joins to it, such as "1, 2"; None without a box."""
    found: list[str] = []
    before = len(text)
    while len(found) < _MOST_BOXES and (start := max(text.rfind(r"\boxed", 0, before), text.rfind(r"\fbox", 0, before))) >= 0:
        content, end = _box(text, start)
        if found and (not content or not _BETWEEN_BOXES.fullmatch(text, end, before)):
            break
        found.append(content)
        before = start
        if not content:
            break
    return ", ".join(dict.fromkeys(reversed(found))) if found else None


def _box(text: str, start: int) -> tuple[str, int]:
    """Return the content of a box, and the index of its end; "" if the text ends in it, so that no answer was given."""
    opened = _BOX.match(text, start)
    if opened is None:
        bare = _BARE_BOX.match(text, start)
        return (unwrapped(bare[1]), bare.end()) if bare else ("", start)
    depth = 1
    for brace in _BRACE.finditer(text, opened.end(), opened.end() + LONGEST):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return unwrapped(text[opened.end():brace.start()]), brace.end()
    return "", start


def _said(rest: str) -> str:
    """Return the answer at the beginning of the text that follows "the answer is"."""
    formula = _FORMULA.match(rest)
    if formula:
        return unwrapped(_content(formula))
    stop = _SENTENCE_END.search(rest)
    sentence = rest[:stop.start()] if stop else rest
    prose = _FORMULA.search(sentence) or _STATES.search(sentence)
    return (_last_value(sentence) if prose else "") or unwrapped(sentence)


def _last_value(text: str) -> str:
    """Return the last formula, or the last number outside formulas; empty if there is neither."""
    last, end = "", 0
    for found in _FORMULA.finditer(text):
        last, end = unwrapped(_content(found)), found.end()
    for number in _NUMBER.finditer(text, end):
        last = number[0]
    return last


def _content(formula: re.Match[str]) -> str:
    return next(part for part in formula.groups() if part is not None)
