"""Runs a program that a model wrote in a confined child process, and returns its output.

Used by the tool `python.py` and by users' own. Each call is a new process with a fresh folder, so a program finds nothing of an earlier
one. `confine.py` is the child's side and describes its rules. This side ensures, on any kernel, an environment without the parent's
variables, no open files but the output, a process group that is ended with the call, and limits of time and output.
"""

import contextlib
import functools
import logging
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from offbeat.errors import MachineError

Confinement = Literal["namespaces", "landlock", "none"]

_CONFINE = Path(__file__).with_name("confine.py")
_START = "import sys; sys.path.insert(0, sys.argv.pop(1)); import confine; del sys.path[0]; confine.main()"
_SYSTEM = ("/usr/lib", "/usr/lib64", "/lib", "/lib64", "/etc/ld.so.cache", "/usr/share/zoneinfo", "/dev/null", "/dev/zero", "/dev/urandom")
_REFUSING = {"kernel.unprivileged_userns_clone": "0", "user.max_user_namespaces": "0", "kernel.apparmor_restrict_unprivileged_userns": "1"}
"""Settings of the kernel and the values with which they refuse user namespaces; containers refuse them by their own profiles."""

_MOST_CODE_BYTES = 2**20
_PROBE_S = 20.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Ran:
    """Result of a program.

    Attributes:
        output: text of both streams, at most `Sandbox.output_chars` characters.
        status: exit status; 128 plus the number of the signal where one ended it, e.g. 137 for SIGKILL.
        ended: why it was ended before its own end; empty if it was not.
    """

    output: str
    status: int
    ended: str = ""

    @property
    def text(self) -> str:
        """The text for the model: the output, and how the program ended if it failed."""
        said = self.output if not self.output or self.output.endswith("\n") else f"{self.output}\n"
        if self.ended:
            return f"{said}[ended: {self.ended}]"
        if self.status > 128:
            return f"{said}[ended by {_signal_name(self.status - 128)}]"
        if not said:
            return "[it printed nothing]" if not self.status else f"[it printed nothing and ended with status {self.status}]"
        return said.removesuffix("\n")


@dataclass(frozen=True)
class Sandbox:
    """Limits for programs, which run under the strongest confinement that this machine allows; safe to call from several threads.

    Attributes:
        timeout_s: seconds for one program, by the clock.
        memory_bytes: address space of a program.
        folder_bytes: memory that files in its folder may take; under "landlock" the most for each file, which is then on disk.
        output_chars: characters of output; a program that prints more is ended.
        packages: folders that it may import from besides the standard library, such as one that `pip install --target` has filled. It may
            read everything in them.
        max_concurrent: programs that run at the same time in this process; others wait.
        allow_unconfined: whether programs run even where the kernel cannot confine them. Their limits then hold for a program that means
            well; one that does not can do all that this user can, and use the network.
    """

    timeout_s: float = 10.0
    memory_bytes: int = 2**30
    folder_bytes: int = 64 * 2**20
    output_chars: int = 10_000
    packages: tuple[str, ...] = ()
    max_concurrent: int = os.cpu_count() or 1
    allow_unconfined: bool = False

    def run(self, code: str) -> Ran:
        """Run a program and wait for its end; raises MachineError as `check`, or if it cannot be started."""
        mode = self.check()
        source = code.encode(errors="replace")
        if len(source) > _MOST_CODE_BYTES:
            return Ran("", 1, f"a program has at most {_MOST_CODE_BYTES} bytes")
        with _slots(self.max_concurrent):
            return self._run(source, mode)

    def check(self) -> Confinement:
        """Return how programs are confined; raises MachineError if this machine cannot and `allow_unconfined` is not set."""
        found, why = confinement()
        if found == "none" and not self.allow_unconfined:
            raise MachineError(
                f"this machine cannot confine programs that a model writes: {why}; they run only in a Sandbox with allow_unconfined=True,"
                " where nothing keeps them from files and the network")
        return found

    def _run(self, source: bytes, mode: Confinement) -> Ran:
        folder = tempfile.mkdtemp(prefix="offbeat-python-")
        ready, told = os.pipe()
        try:
            order = {
                "mode": mode, "folder": folder, "readable": readable(self.packages), "parent": os.getpid(), "ready": told,
                "packages": [str(Path(each).absolute()) for each in self.packages], "folder_bytes": self.folder_bytes,
                "memory_bytes": self.memory_bytes, "cpu_s": int(self.timeout_s) + 1}
            home = "/program" if mode == "namespaces" else folder
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _START, str(_CONFINE.parent), repr(order)], stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd="/", start_new_session=True, pass_fds=[told],
                env={"HOME": home, "TMPDIR": home, "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"})
            os.close(told)
            told = -1
            with process:
                try:
                    output, ended = self._follow(process, source)
                finally:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
            if not os.read(ready, 1) and not ended:
                raise MachineError(f"a program could not be confined by {mode}: {output.strip().rpartition(chr(10))[2]}")
            return Ran(output, process.returncode if process.returncode >= 0 else 128 - process.returncode, ended)
        finally:
            os.close(ready)
            if told >= 0:
                os.close(told)
            _remove(folder)

    def _follow(self, process: subprocess.Popen[bytes], source: bytes) -> tuple[str, str]:
        """Return the output of a program, and why it must be ended, or nothing if it has ended."""
        assert process.stdin is not None and process.stdout is not None, "both are pipes"
        until = time.monotonic() + self.timeout_s
        with contextlib.suppress(BrokenPipeError), process.stdin as stdin:
            stdin.write(source)
        output, most = bytearray(), 4 * self.output_chars  # bytes of a character
        late = f"it ran for more than {self.timeout_s:g} s"
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while len(output) <= most:
                if not selector.select(max(0.0, until - time.monotonic())):
                    return self._text(output), late
                if not (part := os.read(process.stdout.fileno(), 2**16)):
                    break
                output += part
                if time.monotonic() > until:
                    return self._text(output), late
        text = output.decode(errors="replace")
        if len(text) > self.output_chars:
            return text[:self.output_chars], f"it printed more than {self.output_chars} characters"
        try:  # it may have closed its output and go on
            process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            return text, late
        return text, ""

    def _text(self, output: bytearray) -> str:
        return output.decode(errors="replace")[:self.output_chars]


@functools.cache
def confinement() -> tuple[Confinement, str]:
    """Return the strongest confinement that this machine allows, and why the stronger ones do not work; tried and logged once."""
    found, why = _strongest()
    logger.info("%s", "; ".join(filter(None, described(found, why))))
    return found, why


def described(found: Confinement, why: str) -> tuple[str, str]:
    """Return a sentence on the confinement of programs, and one on why no stronger one works; the latter is "" if none is stronger."""
    if found == "namespaces":
        return "programs that a model writes are confined by namespaces and a filter of system calls", ""
    if found == "landlock":
        return (
            "programs that a model writes are confined by Landlock and a filter of system calls",
            f"namespaces, which also hide names and sizes of files and keep what is written in memory, cannot be had here: {why}")
    return "nothing confines programs that a model writes here, so the Python tool is refused", why


def obstacles(proc: Path = Path("/proc/sys")) -> str:
    """Return the settings of the kernel that refuse user namespaces, as they stand below `proc`; empty if none of them does."""
    found = []
    for name, refusing in _REFUSING.items():
        with contextlib.suppress(OSError):
            if (proc / name.replace(".", "/")).read_text().strip() == refusing:
                found.append(f"{name} = {refusing}")
    return " and ".join(found)


def _strongest() -> tuple[Confinement, str]:
    if sys.platform != "linux":
        return "none", f"{sys.platform} has neither namespaces nor Landlock"
    reasons = []
    modes: Sequence[Confinement] = ("namespaces", "landlock")
    for mode in modes:
        try:
            ran = Sandbox(timeout_s=_PROBE_S)._run(b"print('confined')", mode)
        except MachineError as exc:
            because = obstacles() if mode == "namespaces" else ""
            reasons.append(f"{exc}{because and f' (as {because})'}")
            continue
        if ran.output == "confined\n":
            return mode, "; ".join(reasons)
        reasons.append(f"{mode}: {ran.text}")
    return "none", "; ".join(reasons)


def readable(packages: Sequence[str] = ()) -> list[str]:
    """Return the files and folders that a program may read: those of the interpreter and its libraries, and `packages`."""
    own = [str(Path(os.__file__).parent), f"{sys.base_prefix}/lib"]
    wanted = sorted({str(Path(path).absolute()) for path in (*own, *_SYSTEM, *packages) if Path(path).exists()})
    return [path for path in wanted if not any(path.startswith(f"{other}/") for other in wanted)]


@functools.cache
def _slots(count: int) -> threading.BoundedSemaphore:
    return threading.BoundedSemaphore(count)


def _remove(folder: str) -> None:
    """Remove a folder whose program may have taken away its own rights to it."""
    def again(function: object, path: str, _why: object) -> None:
        with contextlib.suppress(OSError):
            Path(path).parent.chmod(0o700)
            Path(path).chmod(0o700)
            function(path)  # type: ignore[operator]

    shutil.rmtree(folder, onerror=again)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
