"""Every error a person may see, in one hierarchy.

A `UserError` is the user's to mend: one sentence with what was wrong, the value, what is allowed and what to do (exit 2).
A `RunError` is a run that failed although it was asked for correctly (exit 1). Each is also the standard-library error it refines.
"""


class OffbeatError(Exception):
    """Base of all errors raised on purpose."""

    exit_code = 1


class UserError(OffbeatError):
    """Something that the user gave cannot work."""

    exit_code = 2


class ConfigError(UserError, ValueError):
    """A configuration value is unknown, of the wrong type or out of range."""


class DataError(UserError, ValueError):
    """A dataset or a row of it cannot be used."""


class TooLongError(DataError):
    """A prompt, or a conversation, leaves no room for an answer."""


class ModelError(UserError, ValueError):
    """A model or tokenizer folder cannot be used."""


class CodeError(UserError):
    """User code named in the configuration (a reward, a workflow) cannot be found or always fails."""


class RewardError(CodeError):
    """The reward failed on so many completions of a prompt that nothing can be learnt from the others."""


class MissingExtraError(UserError, ImportError):
    """An optional dependency is not installed; the message names the extra."""


class PortBusyError(UserError, OSError):
    """A port that was asked for is taken."""


class StorageError(UserError, OSError):
    """A disk is full or a folder cannot be written; what was saved before is intact."""


class RunError(OffbeatError, RuntimeError):
    """A run that was asked for correctly failed."""


class DeadlineError(RunError, TimeoutError):
    """A named wait passed its deadline."""


class WorkerError(RunError):
    """A worker process raised, or died; the message names it and shows its last words."""


class DeathError(WorkerError):
    """A worker process died; the message says how: by which signal, or with which exit code."""


class SyncError(RunError):
    """A point that all ranks pass together was not passed; the message is the same on every rank."""


class SyncTimeout(SyncError, DeadlineError):  # noqa: N818
    """Some rank did not come to a sync point in time; the message names it and shows where it is."""


class SyncMismatch(SyncError):  # noqa: N818
    """Ranks came to different sync points at once."""


class PeerError(SyncError, WorkerError):
    """Another rank raised or died; the message names it."""


class StuckError(PeerError, DeadlineError):
    """A rank is stopped, or hangs, while others need it or for longer than it may; the message names it and says where."""


class EngineError(RunError):
    """An engine refused or failed a request."""


class RefusedError(EngineError):
    """The engine says that the request itself is wrong; another engine would say the same.

    Attributes:
        said: the engine's own words, where the message has more than those.
    """

    said = ""


class BusyError(EngineError):
    """The engine's queue is full; later, or elsewhere, the request may be served."""


class ProofError(EngineError):
    """An engine does not sample the weights, or the adapter, that it should."""


class PublishError(RunError):
    """A version could not be published to enough engines."""


class RolloutError(RunError):
    """Rollouts cannot go on: every episode of the last ones failed."""


class NotLearnedError(RunError):
    """A run ended below the accuracy that it promises."""


def first_line(exc: BaseException) -> str:
    """What another library's error says first, or its name if it says nothing; the rest is for that library's own developers."""
    return (str(exc).strip().splitlines() or [type(exc).__name__])[0].rstrip(".")


def printable(text: str, *, most: int = 500) -> str:
    """User code's text as any file and terminal takes it: on one line, cut, and without halves of surrogate pairs."""
    return text[:most].replace("\n", " ").encode("utf-8", "backslashreplace").decode()


def describe(exc: BaseException) -> str:
    """What user code raised: its class, and what it says of itself, if it can."""
    try:
        text = str(exc)
    except Exception:
        text = "it cannot say what is wrong"
    return printable(f"{type(exc).__name__}: {text}" if text else type(exc).__name__)


def shorten(value: object) -> str:
    """What user code gave in the place of something else, for messages: the beginning of its repr, and its type."""
    try:
        text = repr(value)
    except Exception:
        text = "something"
    return f"{printable(text, most=60)} ({type(value).__name__})"
