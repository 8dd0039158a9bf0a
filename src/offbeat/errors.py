"""All errors that users may see, in one hierarchy.

A `UserError` is for the user to fix: one sentence with the mistake, the value, the allowed values and a remedy (exit code 2), such as
"rollout.max_head_offpolicyness must be >= 0, got -1; use 0 for synchronous training".
A `RunError` is a run that was requested correctly and failed (exit code 1). Each is also the standard-library error that it refines.
"""

import errno


class OffbeatError(Exception):
    """Base class of all errors that are raised on purpose."""

    exit_code = 1


class UserError(OffbeatError):
    """Something that the user provided cannot work."""

    exit_code = 2


class ConfigError(UserError, ValueError):
    """A configuration value is unknown, of the wrong type or out of range."""


class DataError(UserError, ValueError):
    """A dataset, or a row of it, cannot be used."""


class TooLongError(DataError):
    """A prompt or a conversation leaves no room for an answer."""


class ModelError(UserError, ValueError):
    """A model or tokenizer folder cannot be used."""


class CodeError(UserError):
    """User code named in the configuration (a reward, a workflow) cannot be found or always fails."""


class RewardError(CodeError):
    """The reward failed on so many completions of a prompt that nothing can be learned from the others."""


class MissingExtraError(UserError, ImportError):
    """An optional dependency is not installed; the message names the extra."""


class MachineError(UserError, OSError):
    """This machine cannot do a requested thing, such as confine a program."""


class HubError(UserError, OSError):
    """A hub of models cannot be reached, or has refused a request."""


class PortBusyError(UserError, OSError):
    """A requested port is taken."""


class StorageError(UserError, OSError):
    """A disk is full, or a folder cannot be written; everything saved before is intact."""


class RunError(OffbeatError, RuntimeError):
    """A run that was requested correctly failed."""


class OwnCodeError(RunError):
    """The user's own objective or credit failed during a run; the message names its file and line, and the step."""


class DivergedError(RunError):
    """Training has made weights that are NaN or infinite; the message names the step and the rank. Checkpoints saved before are sound."""


class DeadlineError(RunError, TimeoutError):
    """A named wait passed its deadline."""


class WorkerError(RunError):
    """A worker process raised an error or died; the message names it and shows the end of its log."""


class DeathError(WorkerError):
    """A worker process died; the message gives the signal or the exit code."""


class SyncError(RunError):
    """Not all ranks passed a sync point together; the message is the same on every rank."""


class SyncTimeout(SyncError, DeadlineError):  # noqa: N818
    """A rank did not reach a sync point in time; the message names it and shows where it is."""


class SyncMismatch(SyncError):  # noqa: N818
    """Ranks reached different sync points at the same time."""


class PeerError(SyncError, WorkerError):
    """Another rank raised an error or died; the message names it."""


class StuckError(PeerError, DeadlineError):
    """A rank is stopped or hangs while others need it, or for longer than allowed; the message names it and says where it is."""


class EngineError(RunError):
    """An engine refused or failed a request."""


class RefusedError(EngineError):
    """The engine says that the request itself is invalid; any other engine would say the same.

    Attributes:
        said: the engine's own words, where the message contains more than those.
        param: the field of the request that is wrong, such as "messages[0].role"; empty if it is none in particular.
    """

    said = ""
    param = ""

    def __init__(self, *said: object, param: str = "") -> None:
        super().__init__(*said)
        if param:
            self.param = param


class BusyError(EngineError):
    """The engine's queue is full; it may accept the request later, and another engine may accept it now."""


class ProofError(EngineError):
    """An engine does not sample from the weights or the adapter that it should."""


class PublishError(RunError):
    """A version could not be published to enough engines."""


class RolloutError(RunError):
    """Rollouts cannot continue: all of the most recent episodes failed."""


class NotLearnedError(RunError):
    """A run ended below its promised accuracy."""


_OF_DISKS = {
    errno.ENOSPC: "free space there", errno.EDQUOT: "free space there, or raise this user's quota",
    errno.EROFS: "mount it so that it can be written, or choose another folder", errno.EIO: "look at the disk or its mount",
    errno.EACCES: "let this user write there, or choose another folder", errno.EPERM: "let this user write there, or choose another folder"}
"""Remedies for errors of the operating system that are a file system's and not a program's, by `errno`."""


def of_disk(exc: BaseException) -> StorageError | None:
    """Return an error of the operating system in a sentence, if it is one of a full, unwritable or broken disk; None otherwise."""
    if not isinstance(exc, OSError) or isinstance(exc, OffbeatError) or exc.errno not in _OF_DISKS:
        return None
    name = exc.filename.decode(errors="replace") if isinstance(exc.filename, bytes) else exc.filename or "a file"
    return StorageError(f"{name} cannot be written: {exc.strerror}; {_OF_DISKS[exc.errno]}; what was saved before is intact")


def first_line(exc: BaseException) -> str:
    """Return the first line of another library's error, or its class name without text. Other lines are for that library's authors."""
    return (str(exc).strip().splitlines() or [type(exc).__name__])[0].rstrip(".")


def printable(text: str, *, most: int = 500) -> str:
    """Make text from user code safe for any file and terminal: one line, at most `most` characters, no lone surrogates."""
    return text[:most].replace("\n", " ").encode("utf-8", "backslashreplace").decode()


def describe(exc: BaseException) -> str:
    """Describe an exception from user code by its class and, if it can be formatted, its text."""
    text = _formatted("{!s}", exc, otherwise="it cannot say what is wrong")
    return printable(f"{type(exc).__name__}: {text}" if text else type(exc).__name__)


def shorten(value: object) -> str:
    """Describe an unexpected value from user code by the beginning of its repr, and its type."""
    return f"{printable(_formatted('{!r}', value, otherwise='something'), most=60)} ({type(value).__name__})"


def _formatted(form: str, value: object, *, otherwise: str) -> str:
    """Format a value of a class from user code, whose `__str__` or `__repr__` may raise anything."""
    try:
        return form.format(value)
    except Exception:
        return otherwise
