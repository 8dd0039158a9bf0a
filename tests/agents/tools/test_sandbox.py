"""Programs that mean harm, in real processes: what each comes to, and that nothing is left of it."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from offbeat.agents.tools import sandbox
from offbeat.agents.tools.sandbox import Confinement, Ran, Sandbox
from offbeat.errors import MachineError
from signals import has_signal
from waiting import wait_until

MODES: tuple[Confinement, ...] = ("namespaces", "landlock")
LEFT = "offbeat-python-*"


def works(mode: Confinement) -> bool:
    try:
        return Sandbox(timeout_s=60)._run(b"1", mode).output == "1\n"
    except MachineError:
        return False


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest) -> Confinement:
    if not works(request.param):
        pytest.skip(f"this machine has no {request.param}")
    return request.param


@pytest.fixture(autouse=True)
def _nothing_is_left(tmp_path, monkeypatch):
    """Folders are made below the test's own, and neither one of them nor a process outlives a call."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = set(psutil.Process().children(recursive=True))
    open_before = psutil.Process().num_fds()
    yield
    assert not set(psutil.Process().children(recursive=True)) - before
    assert not list(tmp_path.glob(LEFT))
    assert psutil.Process().num_fds() == open_before


def ran(code: str, mode: Confinement, **limits: float) -> Ran:
    return Sandbox(**{"timeout_s": 20.0, **limits})._run(code.encode(), mode)  # type: ignore[arg-type]


def test_what_a_program_prints_and_the_value_of_its_last_line_come_back(mode) -> None:
    assert ran("print('a')\nx = 6\nx * 7", mode) == Ran("a\n42\n", 0)
    assert ran("None", mode).text == "[it printed nothing]"
    assert ran("import math, json, re, datetime, fractions, statistics, random\nprint(fractions.Fraction(1, 3) + 1)", mode).text == "4/3"


def test_a_mistake_is_shown_with_the_programs_own_lines(mode) -> None:
    failed = ran("def half(x):\n    return x / 0\n\nprint('first')\nhalf(1)", mode)
    assert failed.status == 1
    assert failed.text.startswith("first\nTraceback (most recent call last):\n  File \"<code>\", line 5, in <module>\n    half(1)\n")
    assert failed.text.endswith("ZeroDivisionError: division by zero")
    assert "confine" not in failed.text
    assert "SyntaxError" in ran("x = (", mode).text and "confine" not in ran("x = (", mode).text
    assert ran("raise SystemExit(3)", mode) == Ran("", 3)


def test_a_fork_bomb_does_not_get_its_first_child(mode) -> None:
    assert "PermissionError" in ran("import os\nwhile True:\n    os.fork()", mode).text
    assert "PermissionError" in ran("import subprocess\nsubprocess.run(['/bin/sh'])", mode).text
    assert "can't start new thread" in ran("import threading\nwhile True:\n    threading.Thread(target=print).start()", mode).text
    assert "PermissionError" in ran("import os\nos.execv('/usr/lib/ld-linux.so.2', ['x'])", mode).text


def test_memory_has_a_limit(mode) -> None:
    assert ran("x = bytearray(3 << 30)", mode).text.endswith("MemoryError")
    greedy = ran("held = []\nwhile True:\n    held.append(bytearray(1 << 20))", mode, memory_bytes=2**28)
    assert "MemoryError" in greedy.text


def test_there_is_no_network(mode) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code = f"import socket\nsocket.create_connection(('127.0.0.1', {port}))"
        assert "PermissionError" in ran(code, mode).text
        server.setblocking(False)
        with pytest.raises(BlockingIOError):
            server.accept()
    assert "PermissionError" in ran("import socket\nsocket.socketpair()", mode).text


def test_calls_of_another_architecture_or_newer_than_the_filter_do_not_pass(mode) -> None:
    code = "import ctypes\nc = ctypes.CDLL(None, use_errno=True)\nprint([(c.syscall({}, 0, 0), ctypes.get_errno())])"
    assert "(-1, 38)" in ran(code.format(425), mode).text  # io_uring_setup, which opens sockets without further calls
    assert "(-1, 38)" in ran(code.format(0x40000000 + 41), mode).text  # x32's socket


def test_files_of_the_user_cannot_be_read_nor_changed(mode, tmp_path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("the answer")
    for code in (f"open({str(secret)!r}).read()", "open('/etc/passwd').read()", f"import os\nos.listdir({str(tmp_path)!r})",
                 f"open({str(secret)!r}, 'w')", f"import os\nos.remove({str(secret)!r})", f"import os\nos.chmod({str(secret)!r}, 0)",
                 f"import os\nos.truncate({str(secret)!r}, 0)", f"import os\nos.symlink({str(secret)!r}, 'a'), open('a').read()",
                 f"open('/proc/{os.getpid()}/environ').read()", f"open({os.__file__!r}, 'a')",
                 f"import os\nos.rename({str(secret)!r}, 'mine'), open('mine').read()"):
        text = ran(code, mode).text
        assert "Error" in text and "the answer" not in text and "root:" not in text, (code, text)
    assert secret.read_text() == "the answer" and secret.stat().st_mode & 0o777


def test_its_own_folder_is_new_each_time_and_bounded(mode) -> None:
    assert ran("import os\nopen('a', 'w').write('x')\nos.listdir('.')", mode).text == "['a']"
    assert ran("import os\nos.listdir('.')", mode).text == "[]"
    full = ran("file = open('a', 'wb')\nwhile True:\n    file.write(bytes(1 << 20))", mode, folder_bytes=2**22)
    assert "File too large" in full.text or "No space left" in full.text
    assert ran("import os\nfor i in range(50):\n    os.mkdir('d')\n    os.chdir('d')\nopen('x', 'w').close()", mode).status == 0


def test_output_without_end_is_cut_and_ended_at_once(mode) -> None:
    started = time.monotonic()
    loud = ran("while True:\n    print('é' * 100)", mode, output_chars=1000)
    assert len(loud.output) == 1000
    assert loud.text.endswith("[ended: it printed more than 1000 characters]")
    assert time.monotonic() - started < 15
    quick = ran("print('x' * 300000)", mode, output_chars=1000)
    assert len(quick.output) == 1000


def test_a_program_that_does_not_end_is_ended(mode) -> None:
    for code in ("print('begun')\nwhile True:\n    pass", "print('begun')\nimport time\ntime.sleep(1000)",
                 "print('begun')\nimport os\nos.close(1)\nos.close(2)\nwhile True:\n    pass",
                 "print('begun')\nimport signal\nfor i in range(1, 32):\n    try:\n        signal.signal(i, signal.SIG_IGN)\n"
                 "    except OSError:\n        pass\nwhile True:\n    pass"):
        assert ran(code, mode, timeout_s=1.0) == Ran("begun\n", 128 + signal.SIGKILL, "it ran for more than 1 s")


def test_sigterm_to_all_processes_of_a_job_does_not_end_a_program(mode) -> None:
    code = ("import signal, time\ntold = []\nsignal.signal(signal.SIGUSR1, lambda *_: told.append('through'))\n"
            "while not told:\n    time.sleep(0.01)\nprint(*told)")

    def family() -> list[psutil.Process]:
        return [each for each in psutil.Process().children(recursive=True) if "folder_bytes" in " ".join(each.cmdline())]

    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(ran, code, mode, timeout_s=60.0)
        wait_until(lambda: any(has_signal(each.pid, signal.SIGUSR1, mask="SigCgt") for each in family()), timeout_s=60)
        for each in family():
            each.terminate()
        [program] = [each for each in family() if has_signal(each.pid, signal.SIGUSR1, mask="SigCgt")]
        program.send_signal(signal.SIGUSR1)
        assert answer.result() == Ran("through\n", 0, "")


def test_it_cannot_signal_its_parents_nor_leave_their_group(mode) -> None:
    for code in ("import os\nos.kill(os.getppid(), 9)", "import os\nos.kill(-1, 9)", f"import os\nos.kill({os.getpid()}, 9)",
                 "import os\nos.setsid()", f"import os\nos.setpriority(os.PRIO_PROCESS, {os.getpid()}, 19)",
                 f"import resource\nresource.prlimit({os.getpid()}, resource.RLIMIT_CPU, (1, 1))",
                 "import resource\nresource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
                 f"import fcntl\nfcntl.fcntl(1, fcntl.F_SETOWN, {os.getpid()})", "import fcntl\nfcntl.fcntl(1, fcntl.F_SETSIG, 9)",
                 "import fcntl\nfcntl.fcntl(1, 15, bytes(8))"):
        assert "Error" in ran(code, mode).text, code


def test_it_sees_neither_the_parents_environment_nor_its_open_files(mode, monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("OFFBEAT_TEST_SECRET", "the answer")
    with (tmp_path / "open").open("w") as file:
        os.set_inheritable(file.fileno(), True)
        seen = ran("import os\nprint(dict(os.environ))\nfor n in range(3, 60):\n    try:\n        print(n, os.fstat(n))\n"
                   "    except OSError:\n        pass", mode)
    assert "the answer" not in seen.text
    assert seen.output.count("\n") == 1


def test_a_crash_of_the_interpreter_is_named(mode) -> None:
    assert ran("import ctypes\nctypes.string_at(0)", mode).text == "[ended by SIGSEGV]"


def test_packages_that_are_named_can_be_imported_and_no_others(mode, tmp_path) -> None:
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / "sevens.py").write_text("SEVEN = 7\n")
    box = Sandbox(timeout_s=20, packages=(str(tmp_path / "packages"),))
    assert box._run(b"import sevens\nsevens.SEVEN", mode).text == "7"
    assert "ModuleNotFoundError" in ran("import sevens", mode).text
    assert "ModuleNotFoundError" in ran("import offbeat", mode).text


def test_programs_run_side_by_side_and_in_their_own_folders() -> None:
    box = Sandbox(timeout_s=60, max_concurrent=4, allow_unconfined=True)
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda n: box.run(f"open('n', 'w').write('{n}')\nprint(open('n').read())").output, range(12)))
    assert answers == [f"{n}\n" for n in range(12)]


def test_a_program_dies_with_the_process_that_asked_for_it(mode, tmp_path) -> None:
    script = (f"import tempfile; tempfile.tempdir = {str(tmp_path)!r}\nfrom offbeat.agents.tools.sandbox import Sandbox\n"
              f"Sandbox(timeout_s=100)._run(b'import time; time.sleep(1000)', {mode!r})")
    asking = subprocess.Popen([sys.executable, "-c", script])
    try:
        def running() -> list[psutil.Process]:
            return [process for process in psutil.process_iter(["cmdline"])
                    if any(str(tmp_path) in part and "folder_bytes" in part for part in process.info["cmdline"] or ())]

        wait_until(lambda: len(running()) >= (2 if mode == "namespaces" else 1), timeout_s=60)
    finally:
        asking.kill()
        asking.wait()
    wait_until(lambda: not running(), timeout_s=20)
    for left in tmp_path.glob(LEFT):  # the folder alone stays where the parent was killed
        assert not any(left.iterdir())
        left.rmdir()


def test_without_confinement_programs_are_refused_unless_allowed(monkeypatch) -> None:
    monkeypatch.setattr(sandbox, "confinement", lambda: ("none", "unshare: Operation not permitted"))
    with pytest.raises(MachineError, match=r"cannot confine programs.*unshare: Operation not permitted; they run only .*allow_unconfined"):
        Sandbox().run("1")
    assert Sandbox(timeout_s=20, allow_unconfined=True).run("1 + 1").text == "2"
    assert Sandbox(timeout_s=1, allow_unconfined=True).run("while True:\n    pass").ended == "it ran for more than 1 s"


def test_a_confinement_that_fails_says_in_which_call_and_why(monkeypatch, tmp_path) -> None:
    if not works("landlock"):
        pytest.skip("this machine has no landlock")
    usual = sandbox.readable()
    monkeypatch.setattr(sandbox, "readable", lambda _packages: [*usual, str(tmp_path / "missing")])
    with pytest.raises(MachineError, match=r"could not be confined by landlock: FileNotFoundError: .*missing"):
        Sandbox(timeout_s=20)._run(b"1", "landlock")


def test_which_confinement_was_found_and_why_not_a_stronger_one_is_logged_once(monkeypatch, caplog) -> None:
    caplog.set_level("INFO", logger="offbeat")
    monkeypatch.setattr(sandbox, "_strongest", lambda: ("landlock", "unshare: Operation not permitted"))
    sandbox.confinement.cache_clear()
    try:
        for _ in range(3):
            assert sandbox.confinement()[0] == "landlock"
    finally:
        sandbox.confinement.cache_clear()
    [said] = [record.message for record in caplog.records]
    assert said.startswith("programs that a model writes are confined by Landlock and a filter of system calls; namespaces, which also")
    assert said.endswith("cannot be had here: unshare: Operation not permitted")


def test_settings_of_the_kernel_that_refuse_namespaces_are_named(tmp_path) -> None:
    assert not sandbox.obstacles(tmp_path)
    for name, value in (("kernel/unprivileged_userns_clone", "0"), ("user/max_user_namespaces", "1000")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"{value}\n")
    assert sandbox.obstacles(tmp_path) == "kernel.unprivileged_userns_clone = 0"


def test_code_of_a_megabyte_is_refused() -> None:
    assert Sandbox(allow_unconfined=True).run("1" * 2**20 + "1").text == "[ended: a program has at most 1048576 bytes]"
