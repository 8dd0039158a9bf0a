"""The program that starts a vLLM server; a small package stands in for vLLM."""

import os
import subprocess
import sys
from pathlib import Path

from offbeat.engine import inside

MAIN = """
import os, signal, sys


def main():
    signal.signal(signal.SIGTERM, lambda *_: os._exit(3))
    os.kill(os.getpid(), signal.SIGTERM)
    print(sys.argv[1:])
"""


def test_the_server_gets_its_arguments_and_sigterm_does_not_end_it(tmp_path: Path) -> None:
    package = tmp_path / "vllm" / "entrypoints" / "cli"
    package.mkdir(parents=True)
    (package / "main.py").write_text(MAIN)
    program = Path(inside.__file__ or "").with_name("vllm_serve.py")
    done = subprocess.run(
        [sys.executable, program, "serve", "m", "--port", "1"], env=os.environ | {"PYTHONPATH": str(tmp_path)}, capture_output=True,
        text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "['serve', 'm', '--port', '1']\n")
