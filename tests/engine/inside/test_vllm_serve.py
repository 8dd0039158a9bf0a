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


def serve(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    package = tmp_path / "vllm" / "entrypoints" / "cli"
    package.mkdir(parents=True)
    (package / "main.py").write_text(MAIN)
    program = Path(inside.__file__ or "").with_name("vllm_serve.py")
    return subprocess.run(
        [sys.executable, program, "serve", "m", *arguments], env=os.environ | {"PYTHONPATH": str(tmp_path)}, capture_output=True,
        text=True, timeout=60, check=False)


def test_the_server_gets_its_arguments_and_sigterm_does_not_end_it(tmp_path: Path) -> None:
    done = serve(tmp_path, "--port", "1")
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "['serve', 'm', '--port', '1']\n")


def test_forms_of_weights_that_vllm_lacks_are_registered_where_one_is_asked_for(tmp_path: Path) -> None:
    done = serve(tmp_path, "--quantization", "offbeat_int4")
    assert "vllm_quantized.py" in done.stderr and "No module named" in done.stderr  # the stand-in has no kernels
