"""Standard streams that may be missing, closed by their reader, or unable to write a character. Used by the commands and the console.

A stream here never ends a run. A character that the stream cannot encode is escaped as in JSON, for example as "\\u00fc", so that JSON
lines stay JSON; when the reader has gone away, or the terminal has hung up, the rest is dropped.
"""

import codecs
import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO, cast

_ESCAPES = "offbeat.escapes"


def _escape(exc: UnicodeError) -> tuple[str, int]:
    if not isinstance(exc, UnicodeEncodeError):
        raise exc
    units = exc.object[exc.start:exc.end].encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at:at + 2].hex()}" for at in range(0, len(units), 2)), exc.end


codecs.register_error(_ESCAPES, _escape)


class TolerantStream:
    """A text stream on which writing does not fail. Has the attributes of the stream that it writes to."""

    def __init__(self, stream: TextIO | None, *, survives: bool = True) -> None:
        """Write to `stream`, or to nobody if it is None; unless it `survives`, the BrokenPipeError of a reader gone away comes through."""
        self._stream = stream
        self._survives = survives
        self.lost: OSError | None = None
        """The error after which nothing was written any more; None if there was none."""

    def write(self, text: str) -> int:
        if self._stream is not None and self.lost is None:
            with self._tolerance():
                try:
                    self._stream.write(text)
                except UnicodeEncodeError:
                    encoding = self._stream.encoding or "ascii"
                    self._stream.write(text.encode(encoding, _ESCAPES).decode(encoding))
        return len(text)

    def flush(self) -> None:
        if self._stream is not None and self.lost is None:
            with self._tolerance():
                self._stream.flush()

    def isatty(self) -> bool:
        return self._stream is not None and not self._stream.closed and self._stream.isatty()

    @contextlib.contextmanager
    def _tolerance(self) -> Iterator[None]:
        try:
            yield
        except OSError as exc:
            if not self._survives:
                raise
            self.lost = exc

    def __getattr__(self, name: str) -> Any:
        stream = vars(self).get("_stream")  # a copy that is being made has none yet
        if stream is None:
            raise AttributeError(f"there is no stream, and so it has no {name}")
        return getattr(stream, name)


def tolerant(stream: TextIO | None) -> TextIO:
    """Return a stream that writes to `stream` as far as that is possible."""
    return stream if isinstance(stream, TolerantStream) else cast("TextIO", TolerantStream(stream))


@contextlib.contextmanager
def tolerant_output(*, survives: bool) -> Iterator[None]:
    """Make stdout and stderr tolerant while the body runs, and say at the end on stderr if nobody could read stdout any more.

    The body goes on without its reader if it `survives`; otherwise it ends with BrokenPipeError.
    """
    before = sys.stdout, sys.stderr
    streams = out, err = TolerantStream(sys.stdout, survives=survives), TolerantStream(sys.stderr)
    sys.stdout, sys.stderr = cast("TextIO", out), cast("TextIO", err)
    try:
        yield
    finally:
        for stream in streams:
            with contextlib.suppress(BrokenPipeError):
                stream.flush()
        if out.lost is not None:
            err.write(f"offbeat: standard output could not be written any more ({out.lost.strerror}); what came after was not shown\n")
        sys.stdout, sys.stderr = before
        for stream in streams:
            if stream.lost is not None:
                drop(stream.fileno())


def drop(descriptor: int) -> None:
    """Redirect a descriptor to `os.devnull`, so that writes to it, and its buffer when the process ends, are dropped."""
    nobody = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nobody, descriptor)
    os.close(nobody)
