"""The sandbox's child: gives up all that a calculation does not need, then runs the code that comes on its standard input.

Started by `sandbox.py` as `python -I -S`, for one program each. It imports little of the standard library and nothing else, because its
start is most of the cost of a call. It can never regain the rights that it gives up; the kernel enforces it, not Python. In this order:

1. A view of the system. In mode "namespaces" it enters user, mount, network, process and IPC namespaces of its own, whose root holds the
   interpreter's libraries, read-only, and a working folder in memory. In mode "landlock" a rule set of the kernel denies to open any other
   file. In mode "none" it has all rights of the user.
2. Capabilities, and the gain of any by executing a file.
3. System calls, by a seccomp filter: no sockets, no processes and threads, no signals, no execution of files, no change of owners and
   permissions, nothing that administers a kernel, and none that Linux has gained since 5.1.

Only then does it run the model's code. As it is one process of one thread, its limits of memory and time hold for the whole program.
"""

# pathlib takes half as long to import as Python to start.
# ruff: noqa: PTH102, PTH103, PTH110, PTH112, PTH120, PTH123

import _ast
import ctypes
import os
import resource
import struct
import sys
from types import CodeType

_NEW_USER, _NEW_MOUNT, _NEW_NET, _NEW_PID, _NEW_IPC = 0x10000000, 0x20000, 0x40000000, 0x20000000, 0x08000000
_BIND, _RECURSIVE, _PRIVATE, _NO_SUID, _NO_DEV, _DETACH = 0x1000, 0x4000, 0x40000, 2, 4, 2
_AT_RECURSIVE, _ATTR_READ_ONLY, _ATTR_NO_SUID = 0x8000, 1, 2
_SIGTERM, _IGNORED = 15, ctypes.c_void_p(1)
_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 22, 38
_MOUNT_SETATTR, _LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 442, 444, 445, 446
_FILE_READ, _FILE_WRITE = 0b100, 0b110
_DIR_READ = 0b1100
_LANDLOCK_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}
"""Bits of rights that each version of Landlock knows; 16 from version 5 on."""
_FIRST_NEWER_CALL = 424
"""From here on system calls have the same number everywhere; the filter says that it does not know them, as an older kernel would."""

_ARCHITECTURES = {
    # machine: (audit value, pivot_root, prlimit64, fcntl, the others that are denied, in the order of the comment in each line)
    "x86_64": (0xC000003E, 155, 302, 72, (
        56, 57, 58, 59, 322,  # clone, fork, vfork, execve, execveat
        62, 200, 234, 129, 297, 101, 310, 311, 312,  # kill, tkill, tgkill, rt_(tg)sigqueueinfo, ptrace, process_vm_*, kcmp
        109, 112, 157, 141, 142, 144, 203, 314, 251, 256, 279,  # setpgid, setsid, prctl, priorities and places of processes
        41, 42, 43, 49, 50, 53, 288,  # socket, connect, accept, bind, listen, socketpair, accept4
        29, 30, 31, 64, 65, 66, 68, 69, 70, 71, 220, 240, 241, 319,  # shared memory, queues and semaphores that outlive a process
        76, 86, 90, 91, 92, 93, 94, 132, 133, 188, 189, 190, 197, 198, 199, 235, 259, 260, 261, 265, 268, 280, 300, 303, 304,  # metadata
        103, 105, 106, 113, 114, 116, 117, 119, 126, 135, 155, 159, 161, 163, 164, 165, 166, 167, 168, 169, 170, 171, 172, 173, 175,
        176, 179, 227, 246, 248, 249, 250, 272, 298, 305, 308, 313, 317, 320, 321, 323)),  # administration
    "aarch64": (0xC00000B7, 41, 261, 25, (
        220, 221, 281,
        129, 130, 131, 138, 240, 117, 270, 271, 272,
        154, 157, 167, 140, 118, 119, 122, 274, 30, 238, 239,
        198, 199, 200, 201, 202, 203, 242,
        180, 181, 186, 187, 188, 189, 190, 191, 192, 193, 194, 195, 196, 279,
        5, 6, 7, 14, 15, 16, 33, 37, 45, 52, 53, 54, 55, 88, 262, 264, 265,
        39, 40, 41, 51, 60, 89, 91, 92, 97, 104, 105, 106, 112, 116, 142, 143, 144, 145, 146, 147, 149, 159, 161, 162, 170, 171, 217,
        218, 219, 224, 225, 241, 266, 268, 273, 277, 280, 282, 294)),
}

_OWNERSHIP = (8, 10, 15)
"""fcntl's F_SETOWN, F_SETSIG and F_SETOWN_EX."""

_libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Confine this process as the dict in its first argument says, tell the parent, and run the code on standard input."""
    order = eval(sys.argv[1])  # noqa: S307 (the parent's own `repr`; a safer parser takes longer to import than all else)
    code = os.fdopen(0, "rb").read().decode()
    os.open(os.devnull, os.O_RDONLY)  # is 0 again
    mode = order["mode"]
    if mode != "none":  # SIGTERM for a whole job would look like the program's own end; in these modes it can start no others
        _libc.signal(_SIGTERM, _IGNORED)
    if sys.platform == "linux":
        _die_with(order["parent"])
    if mode == "namespaces":
        _enter_namespaces(order["folder"], order["readable"], folder_bytes=order["folder_bytes"])
    else:
        os.chdir(order["folder"])
    _limit(order)
    if mode != "none":
        _drop_capabilities()
        if mode == "landlock":
            _restrict_files(order["folder"], order["readable"])
        _filter_calls()
    sys.path.extend(order["packages"])
    os.write(order["ready"], b"1")
    os.close(order["ready"])
    os._exit(_run(code))


def _run(code: str) -> int:
    """Run the code as a notebook does, where the value of a last expression is shown; return the exit status."""
    sys.stdout.reconfigure(line_buffering=True, errors="backslashreplace")  # type: ignore[union-attr]
    scope = {"__name__": "__main__", "__builtins__": __builtins__}
    status = 0
    try:
        for program in _parts(code):
            exec(program, scope)
    except SystemExit as exc:
        status = 0 if exc.code is None else exc.code & 0xFF if isinstance(exc.code, int) else 1
        if isinstance(exc.code, str):
            print(exc.code)
    except BaseException as exc:
        status = 1
        sys.stdout.flush()
        _show(exc, code)
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):
        status = 1
    return status


def _parts(code: str) -> list[CodeType]:
    tree = compile(code, "<code>", "exec", flags=_ast.PyCF_ONLY_AST)
    assert isinstance(tree, _ast.Module), "a program is a module"
    parts = [compile(tree, "<code>", "exec")]
    if tree.body and isinstance(last := tree.body.pop(), _ast.Expr):
        parts = [compile(tree, "<code>", "exec"), compile(_ast.Interactive([last]), "<code>", "single")]
    return parts


def _show(exc: BaseException, code: str) -> None:
    """Print an exception with the code's own frames."""
    try:
        import linecache  # noqa: PLC0415 (only programs that fail have to wait for these imports)
        import traceback  # noqa: PLC0415
        linecache.cache["<code>"] = len(code), None, code.splitlines(keepends=True), "<code>"
        frames = exc.__traceback__
        while frames and frames.tb_frame.f_code.co_filename == __file__:
            frames = frames.tb_next
        traceback.print_exception(type(exc), exc, frames, limit=-8)
    except MemoryError:  # the code's objects are still there
        os.write(2, f"{type(exc).__name__}\n".encode())


def _check(result: int, doing: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{doing}: {os.strerror(number)}")
    return result


def _die_with(parent: int) -> None:
    _check(_libc.prctl(_PR_SET_PDEATHSIG, 9, 0, 0, 0), "prctl")
    if os.getppid() not in (parent, 0):
        os._exit(1)


def _limit(order: dict) -> None:
    """Set limits for the one process that the program is."""
    for which, most in (
            (resource.RLIMIT_CORE, 0), (resource.RLIMIT_CPU, order["cpu_s"]), (resource.RLIMIT_NOFILE, 64),
            (resource.RLIMIT_FSIZE, order["folder_bytes"]), (resource.RLIMIT_AS, order["memory_bytes"])):
        try:
            resource.setrlimit(which, (most, most))
        except (ValueError, OSError):
            if order["mode"] != "none":  # macOS does not limit memory
                raise


def _enter_namespaces(folder: str, readable: list[str], *, folder_bytes: int) -> None:
    uid, gid = os.getuid(), os.getgid()
    _check(_libc.unshare(_NEW_USER | _NEW_MOUNT | _NEW_NET | _NEW_PID | _NEW_IPC), "unshare")
    for name, text in (("setgroups", "deny"), ("uid_map", f"65534 {uid} 1"), ("gid_map", f"65534 {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    _mount("none", "/", None, _RECURSIVE | _PRIVATE)
    _mount("tmpfs", folder, "tmpfs", _NO_SUID, "size=1m,mode=755")
    for path in readable:
        at = folder + path
        if os.path.isdir(path):
            os.makedirs(at, exist_ok=True)
        elif not os.path.exists(at):
            os.makedirs(os.path.dirname(at), exist_ok=True)
            os.close(os.open(at, os.O_CREAT | os.O_WRONLY))
        _mount(path, at, None, _BIND | _RECURSIVE)
    os.mkdir(f"{folder}/program")
    attributes = struct.pack("QQQQ", _ATTR_READ_ONLY | _ATTR_NO_SUID, 0, 0, 0)
    _check(_libc.syscall(_MOUNT_SETATTR, -100, folder.encode(), _AT_RECURSIVE, attributes, len(attributes)), "mount_setattr")
    _mount("tmpfs", f"{folder}/program", "tmpfs", _NO_SUID | _NO_DEV, f"size={folder_bytes},nr_inodes=10000,mode=700")
    os.chdir(folder)
    _check(_libc.syscall(_architecture()[1], b".", b"."), "pivot_root")
    _check(_libc.umount2(b".", _DETACH), "umount2")
    os.chdir("/program")
    if child := os.fork():  # only a child is in the new process namespace, as its first process
        _, status = os.waitpid(child, 0)
        os._exit(128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status))
    _die_with(0)


def _mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    _check(_libc.mount(
        source.encode(), target.encode(), kind and kind.encode(), ctypes.c_ulong(flags), options.encode()), f"mount {source} {target}")


def _drop_capabilities() -> None:
    header, nothing = struct.pack("Ii", 0x20080522, 0), bytes(24)
    _check(_libc.capset(header, nothing), "capset")
    _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl")


def _restrict_files(folder: str, readable: list[str]) -> None:
    """Let this process open the files below `readable` for reading and those below `folder` for anything, and no others."""
    version = _check(_libc.syscall(_LANDLOCK_CREATE, None, 0, 1), "landlock")
    every = (1 << _LANDLOCK_RIGHTS.get(version, 16)) - 1
    rules = _check(_libc.syscall(_LANDLOCK_CREATE, struct.pack("Q", every), 8, 0), "landlock")
    for path in [*readable, folder]:
        rights = every & ~1 if path == folder else _DIR_READ if os.path.isdir(path) else _FILE_WRITE if path == os.devnull else _FILE_READ
        opened = os.open(path, os.O_PATH)
        _check(_libc.syscall(_LANDLOCK_ADD, rules, 1, struct.pack("=Qi", rights & every, opened), 0), f"landlock {path}")
        os.close(opened)
    _check(_libc.syscall(_LANDLOCK_RESTRICT, rules, 0), "landlock")
    os.close(rules)


def _filter_calls() -> None:
    """Install the seccomp filter, a program of the kernel's packet filter over the number and the arguments of each system call."""
    audit, _, prlimit, fcntl, denied = _architecture()
    load, equal, at_least, answer = 0x20, 0x15, 0x35, 0x06
    kill, allow, refuse, unknown = 0x80000000, 0x7FFF0000, 0x00050000 | 1, 0x00050000 | 38  # EPERM, ENOSYS
    steps = [
        (load, 0, 0, 4), (equal, 1, 0, audit), (answer, 0, 0, kill),  # another architecture's numbers mean other calls
        (load, 0, 0, 0), (at_least, 0, 1, _FIRST_NEWER_CALL), (answer, 0, 0, unknown),
        *((equal, len(denied) + 8 - at, 0, number) for at, number in enumerate(denied)),
        (equal, 0, 2, prlimit), (load, 0, 0, 16), (equal, 5, 6, 0),  # the limits of this process alone
        (equal, 0, 4, fcntl), (load, 0, 0, 24),  # a file of which another process is the owner would let signals through to that
        *((equal, 3 - at, 0, command) for at, command in enumerate(_OWNERSHIP)),
        (answer, 0, 0, allow), (answer, 0, 0, refuse)]
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    pointer = struct.pack("HxxxxxxP", len(steps), ctypes.addressof(program))
    _check(_libc.prctl(_PR_SET_SECCOMP, 2, pointer, 0, 0), "seccomp")


def _architecture() -> tuple[int, int, int, int, tuple[int, ...]]:
    machine = os.uname().machine
    if machine not in _ARCHITECTURES:
        raise OSError(f"there is no filter of system calls for {machine}")
    return _ARCHITECTURES[machine]
