"""Splits an answer, as it grows, into its reasoning, its text and its calls. Called by `parsing`; no I/O.

The result does not depend on how the answer was cut into pieces: text is given once it cannot be part of a mark such as "<tool_call>", and
a call once it has ended. A call that cannot be read stays text, and so does all that follows it. The time is linear in an answer's length.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby

import regex

from offbeat.chat.formats import HERMES, ToolFormat
from offbeat.chat.messages import Piece, Said, SaidKind, ToolCall

ReadCalls = Callable[[str], Sequence[ToolCall]]
"""Reads the text of one call, or of several in some formats; raises ValueError if it cannot be read."""

_THINK, _THOUGHT = "<think>", "</think>"
_MESSAGE = "<|message|>"
_SMALL = 256
"""Up to this many characters are searched again with each piece; more only once a quarter has been added, for linear time."""
_UNLIKELY = "\x00"
"""A character that continues no mark: a call that begins before it begins there with any other text behind, too."""
_INK = re.compile(r"\S")
_ENDS: Mapping[str, tuple[str, ...]] = {"content": ("<|end|>", "<|return|>", "<|start|>"), "reasoning": ("<|end|>", "<|start|>")}
"""Texts that end a message in a channel; the last of them begins the next message."""


def joined(pieces: Iterable[Piece]) -> list[Piece]:
    """Put texts of one kind that stand in a row together."""
    told: list[Piece] = []
    for kind, run in groupby(pieces, key=_kind):
        same = list(run)
        texts = [piece.text for piece in same if isinstance(piece, Said)]
        told += same if kind is None else [Said(kind, "".join(texts))]
    return told


def _kind(piece: Piece) -> SaidKind | None:
    return piece.kind if isinstance(piece, Said) else None


class Splitter:
    """Splits an answer without calls, all of which is text; `malformed` is the fault of a call that could not be read, else empty."""

    def __init__(self) -> None:
        self.malformed = ""
        # Each step reads the held text, from `_at` to `_end`, and returns whether it has come further; `final` once no more is added.
        self._step: Callable[[bool], bool] = self._raw
        self._text, self._at, self._end = "", 0, 0
        self._new: list[str] = []
        self._num_new = 0
        self._out: list[Piece] = []

    def feed(self, text: str) -> list[Piece]:
        self._new.append(text)
        self._num_new += len(text)
        if self._end <= _SMALL or self._num_new * 4 >= self._end:
            self._work(final=False)
        return self._take()

    def finish(self) -> list[Piece]:
        self._work(final=True)
        return self._take()

    def _work(self, *, final: bool) -> None:
        text = "".join((self._text, *self._new))
        self._new, self._num_new = [], 0
        self._text, self._at, self._end = text if final else text + _UNLIKELY, 0, len(text)
        while self._step(final):
            pass
        self._text, self._at, self._end = self._text[self._at : self._end], 0, self._end - self._at

    def _take(self) -> list[Piece]:
        """Return the pieces since the last call, with no two texts of one kind in a row."""
        told = joined(self._out)
        self._out = []
        return told

    def _say(self, kind: SaidKind, text: str) -> None:
        if text:
            self._out.append(Said(kind, text))

    def _until(self, end: int) -> str:
        """Return the held text up to `end`, and hold it no longer."""
        text, self._at = self._text[self._at : end], end
        return text

    def _ink(self) -> int:
        """Return the end of the white space at the beginning of the held text."""
        found = _INK.search(self._text, self._at, self._end)
        return found.start() if found else self._end

    def _begun(self, marks: Sequence[str]) -> int:
        """Return the start of the longest end of the held text that begins one of `marks`, such as "<tool" of "<tool_call>"."""
        longest = max(map(len, marks), default=1) - 1
        for start in range(max(self._end - longest, self._at), self._end):
            if any(self._text.startswith(mark[: self._end - start], start) for mark in marks):
                return start
        return self._end

    def _raw(self, final: bool) -> bool:  # noqa: ARG002
        self._say("content", self._until(self._end))
        return False


class CallSplitter(Splitter):
    """Finds a call from its beginning to its end, for all formats."""

    def __init__(self, form: ToolFormat, read_calls: ReadCalls | None) -> None:
        """`read_calls` is None where nothing may be called."""
        super().__init__()
        self._form = form
        self._read_calls = read_calls
        self._mark = form.close or form.next_call
        self._num_calls = 0
        self._parts: list[str] = []
        self._opens = regex.compile(form.opens)

    def _opened(self, start: int, *, final: bool) -> bool | None:
        """Return whether a call begins at `start`; None while that is open."""
        if self._opens.match(self._text, start) is not None:
            return True
        return None if not final and self._opens.match(self._text, start, self._end, partial=True) is not None else False

    def _begin_call(self, end: int) -> None:
        """Begin a call with the held text up to `end`."""
        self._parts, self._step = [self._until(end)], self._end_of_call

    def _end_of_call(self, final: bool) -> bool:
        """Look for the end of a call; only a possible beginning of its mark stays held."""
        at = self._text.find(self._mark, self._at, self._end) if self._mark else -1
        if at < 0 and not final:
            self._parts.append(self._until(self._begun((self._mark,)) if self._mark else self._end))
            return False
        self._parts.append(self._until(self._end if at < 0 else at + len(self._form.close)))
        self._tell_call("".join(self._parts))
        return True

    def _tell_call(self, text: str) -> None:
        self._parts = []
        calls: Sequence[ToolCall] = ()
        try:
            calls = self._read_calls(text) if self._read_calls is not None else ()
        except ValueError as exc:
            self.malformed = str(exc)
        self._num_calls += len(calls)
        self._out += calls
        if not calls:
            self._say("content", text)
        self._step = self._after_call if calls else self._raw

    def _after_call(self, final: bool) -> bool:
        raise NotImplementedError


class TagSplitter(CallSplitter):
    """Splits answers with calls among their text, and reasoning in <think> before it."""

    def __init__(self, form: ToolFormat | None, read_calls: ReadCalls | None, *, begins_with_thought: bool) -> None:
        """`form` is None if the format of calls is unknown; `begins_with_thought` is whether the prompt ends with <think>."""
        super().__init__(form or HERMES, read_calls)
        self._starts = () if form is None or read_calls is None else form.starts
        self._start = re.compile("|".join(map(re.escape, self._starts)) or "(?!)")
        self._said_reasoning = self._said_content = False
        self._step = self._thought if begins_with_thought else self._beginning

    def _beginning(self, final: bool) -> bool:
        start = self._ink()
        if self._text.startswith(_THINK, start):
            self._at, self._step = start + len(_THINK), self._thought
        elif not final and _THINK.startswith(self._text[start : min(self._end, start + len(_THINK))]):
            return False
        else:
            self._begin_content()
        return True

    def _begin_content(self) -> None:
        self._step = self._only_call if self._form.at_start and self._starts else self._content

    def _thought(self, final: bool) -> bool:
        """Give the reasoning without the line ends around it."""
        if not self._said_reasoning:
            self._skip_lines()
        at = self._text.find(_THOUGHT, self._at, self._end)
        end = at if at >= 0 else self._end if final else self._begun((_THOUGHT,))
        told = self._text[self._at : end].rstrip("\n")
        self._said_reasoning = self._said_reasoning or bool(told)
        self._say("reasoning", self._until(self._at + len(told)))
        if at >= 0:
            self._at, self._step = at + len(_THOUGHT), self._after_thought
        elif final:
            self._at = end
        return at >= 0

    def _after_thought(self, final: bool) -> bool:
        self._skip_lines()
        if self._at == self._end and not final:
            return False
        self._begin_content()
        return True

    def _skip_lines(self) -> None:
        while self._at < self._end and self._text[self._at] == "\n":
            self._at += 1

    def _only_call(self, final: bool) -> bool:
        """Look whether the answer is a call from its first word on, in formats whose calls stand nowhere else."""
        start = self._ink()
        opened = self._opened(start, final=final) if start < self._end else False if final else None
        if opened is None:
            return False
        if opened:
            self._begin_call(start)
        else:
            self._step = self._raw
        return True

    def _content(self, final: bool) -> bool:
        """Give the text up to a possible beginning of a call; white space before that belongs to the call."""
        found = self._start.search(self._text, self._at, self._end)
        end = found.start() if found else self._end if final else self._begun(self._starts)
        ends_here = found is None and final
        keeps_space = not self._starts or (ends_here and not self._num_calls)
        self._tell_content(end if keeps_space else self._at + len(self._text[self._at : end].rstrip()))
        if ends_here:
            self._at = self._end
        if found is None:
            return False
        opened = self._opened(found.start(), final=final)
        if opened:
            self._begin_call(found.end())
        elif opened is False:  # the mark is only mentioned
            self._tell_content(found.end())
        return opened is not None

    def _tell_content(self, end: int) -> None:
        """Give the held text up to `end`, without white space between a call and the first text."""
        text = self._until(end)
        text = text.lstrip() if self._num_calls and not self._said_content else text
        self._said_content = self._said_content or bool(text)
        self._say("content", text)

    def _after_call(self, final: bool) -> bool:
        """Leave out the text that ends a list of calls."""
        start, tail = self._ink(), self._form.tail
        if tail and self._text.startswith(tail, start):
            self._at = start + len(tail)
        elif tail and not final and tail.startswith(self._text[start : min(self._end, start + len(tail))]):
            return False
        self._step = self._content
        return True


class ChannelSplitter(CallSplitter):
    """Splits answers that consist of messages in channels: reasoning, text and calls. Text outside is left out."""

    def __init__(self, form: ToolFormat, read_calls: ReadCalls | None) -> None:
        super().__init__(form, read_calls)
        self._begins: Mapping[str, regex.Pattern[str]] = {
            "calls": self._opens, **{kind: regex.compile(pattern) for kind, pattern in form.channels.items()}}
        self._ends = {kind: re.compile("|".join(map(re.escape, marks))) for kind, marks in _ENDS.items()}
        self._whole: list[str] | None = []  # until something is told
        self._kind: SaidKind = "content"
        self._said: set[str] = set()
        self._before: dict[str, str] = {}  # the line ends before the next text of a kind
        self._at_first = True
        self._step = self._outside

    def feed(self, text: str) -> list[Piece]:
        if self._whole is not None:
            self._whole.append(text)
        return super().feed(text)

    def finish(self) -> list[Piece]:
        told = super().finish()
        whole = "".join(self._whole or ())
        return [Said("content", whole)] if whole else told  # it did not keep to the channels at all

    def _take(self) -> list[Piece]:
        told = super()._take()
        self._whole = None if told else self._whole
        return told

    def _outside(self, final: bool) -> bool:
        """Look for the beginning of a message, which ends with the mark "<|message|>"."""
        at = self._text.find(_MESSAGE, self._at, self._end)
        if at < 0:
            self._at = self._end if final else self._at
            return False
        end = at + len(_MESSAGE)
        found = {kind: match for kind, one in self._begins.items() if (match := one.search(self._text, self._at, end)) is not None}
        kind = min(found, key=lambda kind: found[kind].start(), default="")
        self._at = found[kind].start() if kind else end
        if kind == "calls":
            self._begin_call(end)
        elif kind:
            self._at = end
            self._kind = "content" if kind == "content" else "reasoning"
            self._before[kind] = self._before[kind] + "\n" if kind in self._before else ""
            self._at_first, self._step = True, self._inside
        return True

    def _inside(self, final: bool) -> bool:
        """Give the text of a message without the white space around it."""
        kind = self._kind
        if self._at_first:
            self._at = self._ink()
            self._at_first = self._at == self._end
        found = self._ends[kind].search(self._text, self._at, self._end)
        end = found.start() if found else self._end if final else self._begun(_ENDS[kind])
        if told := self._text[self._at : end].rstrip():
            self._say(kind, (self._before[kind] if kind in self._said else "") + told)
            self._before[kind] = ""
            self._said.add(kind)
            self._at += len(told)
        if found is None:
            self._at = self._end if final else self._at
            return False
        self._at, self._step = found.start() if found[0] == "<|start|>" else found.end(), self._outside
        return True

    def _after_call(self, final: bool) -> bool:  # noqa: ARG002
        self._step = self._outside
        return True
