"""The key of an SGLang server: its argument, and nobody else's to see."""

import os
import subprocess
import sys
from pathlib import Path

from offbeat.engine import inside

SERVER = """
import multiprocessing, os, sys


def child(queue):
    queue.put(("OFFBEAT_ENGINE_KEY" in os.environ, open("/proc/self/cmdline").read()))


if __name__ == "__main__":
    from sglang import work
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=work.child, args=(queue,))
    process.start()
    print(sys.argv[1:])
    print(("OFFBEAT_ENGINE_KEY" in os.environ, open("/proc/self/cmdline").read()))
    print(queue.get())
    process.join()
"""


def test_the_server_gets_the_key_and_neither_its_command_line_nor_its_children_show_it(tmp_path: Path) -> None:
    package = tmp_path / "sglang"
    package.mkdir()
    (package / "__init__.py").touch()
    for name in ("launch_server", "work"):
        (package / f"{name}.py").write_text(SERVER)
    program = Path(inside.__file__ or "").with_name("sglang_keyed.py")
    env = os.environ | {"PYTHONPATH": str(tmp_path), "OFFBEAT_ENGINE_KEY": "the-key"}
    done = subprocess.run(
        [sys.executable, program, "--model-path", "m"], env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    arguments, *views = done.stdout.splitlines()
    assert arguments == "['--model-path', 'm', '--api-key', 'the-key']"
    assert len(views) == 2 and not any("the-key" in view or view.startswith("(True") for view in views)
