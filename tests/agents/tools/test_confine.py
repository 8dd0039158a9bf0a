"""The child's side of the sandbox; what it keeps programs from is tried in `test_sandbox.py`."""

import re
from pathlib import Path

import pytest

from offbeat.agents.tools import confine

HEADERS = {"x86_64": Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"), "aarch64": Path("/usr/include/asm-generic/unistd.h")}
MUST = {
    "clone", "fork", "vfork", "execve", "execveat", "kill", "tkill", "tgkill", "ptrace", "process_vm_readv", "process_vm_writev", "setsid",
    "setpgid", "prctl", "socket", "socketpair", "connect", "bind", "shmget", "msgget", "semget", "mq_open", "memfd_create", "chmod",
    "fchmod", "fchmodat", "chown", "fchownat", "setxattr", "utimensat", "truncate", "mknodat", "linkat", "open_by_handle_at", "mount",
    "umount2", "pivot_root", "chroot", "unshare", "setns", "bpf", "perf_event_open", "userfaultfd", "keyctl", "add_key", "init_module",
    "finit_module", "kexec_load", "reboot", "setuid", "capset", "seccomp", "personality", "setpriority", "sched_setscheduler"}


@pytest.mark.parametrize("machine", HEADERS)
def test_the_filter_denies_what_its_numbers_are_meant_to_be(machine: str) -> None:
    if not HEADERS[machine].exists():
        pytest.skip("the kernel's headers are not installed")
    numbers = {name: int(number) for name, number in re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)\n", HEADERS[machine].read_text())}
    _, pivot_root, prlimit, fcntl, denied = confine._ARCHITECTURES[machine]
    assert (pivot_root, prlimit, fcntl) == tuple(numbers[name] for name in ("pivot_root", "prlimit64", "fcntl"))
    assert not {name for name in MUST if name in numbers} - {name for name, number in numbers.items() if number in denied}
    assert set(denied) <= set(numbers.values())
    needed = {"read", "write", "openat", "mmap", "munmap", "brk", "futex", "exit_group", "rt_sigaction", "lseek", "fstat", "close"}
    assert not {numbers[name] for name in needed} & set(denied)
    assert all(numbers[name] >= confine._FIRST_NEWER_CALL for name in ("io_uring_setup", "clone3", "pidfd_open", "open_tree"))


def test_a_program_comes_apart_where_a_value_is_to_be_shown(capsys) -> None:
    assert confine._run("x = 2\nx + 1") == 0
    assert confine._run("raise SystemExit('over')") == 1
    assert confine._run("") == 0
    shown = capsys.readouterr()
    assert shown.out == "3\nover\n"
    assert confine._run("1 / 0") == 1
    assert "ZeroDivisionError" in capsys.readouterr().err
