"""SIGTERM does not end a server, whatever handlers it sets, nor the processes that it spawns."""

import signal
import subprocess
import sys
from pathlib import Path

from offbeat.engine import inside

SERVER = """
import asyncio, multiprocessing, os, signal, sys
from no_sigterm import ignore_sigterm

ignore_sigterm()


def end(*_):
    os._exit(3)


def child(queue):
    signal.signal(signal.SIGTERM, end)
    os.kill(os.getpid(), signal.SIGTERM)
    queue.put("a spawned process lives")


async def main():
    loop, usual = asyncio.get_running_loop(), []
    loop.add_signal_handler(signal.SIGTERM, end)
    loop.add_signal_handler(signal.SIGUSR1, usual.append, "other signals are handled")
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGUSR1)
    while not usual:
        await asyncio.sleep(0.01)
    print(*usual)
    loop.remove_signal_handler(signal.SIGTERM)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, end)
    asyncio.run(main())
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=child, args=(queue,))
    process.start()
    print(queue.get(timeout=60))
    process.join()
    os.kill(os.getpid(), signal.SIGTERM)
    print("this one, too", process.exitcode, signal.getsignal(signal.SIGTERM) is signal.SIG_IGN)
"""


def test_sigterm_ends_neither_a_server_that_handles_it_nor_a_process_that_it_spawns(tmp_path: Path) -> None:
    (tmp_path / "server.py").write_text(SERVER)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "server.py")], env={"PYTHONPATH": str(Path(inside.__file__ or "").parent)},
        capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == ["other signals are handled", "a spawned process lives", "this one, too 0 True"]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, "nothing of it is in this process"
