"""Checks on one GPU what nothing else can show: `make gpu-check`. Ten minutes on a machine with a driver, Python and torch.

Results on the device are compared with those of the CPU in the same process: attention of packed and shared rows with and without windows,
the fused head, a model's log-probabilities, losses and gradients, adapters. Then a group of one rank on the device's own collectives,
weights from one process to another on the device, a training step beside those of a plain torch loop and of TRL, speed and peak memory of
a pass over 16,384 tokens at the shapes of Qwen3, from random weights, beside what was estimated, and a whole run (embedded engine,
publishing, proof). Each part stands by itself: one that fails, or takes longer than its limit, is reported, and the next one runs. The file
of results is written after each part.

    python benchmarks/gpu/check.py [--out FILE] [--parts NAME ...] [--limit-s N] [--wheels FOLDER] [--trl-python PYTHON] [--rehearse]

--wheels installs what is missing, or older than pyproject.toml asks for, from a folder of wheels, without a network. TRL takes part if it
is installed beside torch, or in the environment of the interpreter that --trl-python names. --rehearse needs no GPU: it runs all parts on
the CPU at tiny shapes, after those of rehearsal.py, which find faults that a GPU would show. Exit 2 where there is no GPU, 1 where a part
failed. `python benchmarks/gpu/page.py` makes docs/gpu.md of the file.
"""

import argparse
import json
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

_BENCHMARKS = Path(__file__).resolve().parents[1]
_SOURCE = _BENCHMARKS.parent / "src"
_LIMIT_S = 300.0


def install(wheels: str) -> None:
    """Install what is missing or too old from a folder of wheels; torch stays what it is."""
    if wanted := missing():
        subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--find-links", wheels, *wanted], check=True)


def missing() -> list[str]:
    """Return the requirements of a training environment that this one does not meet, such as ["zstandard>=0.23"]."""
    return needed((_SOURCE.parent / "pyproject.toml").read_text(), installed)


def needed(pyproject: str, installed: Callable[[str], str | None]) -> list[str]:
    """Return the requirements of a training environment, but for torch, that what is installed does not meet.

    Args:
        pyproject: text of pyproject.toml; its requirements are names with a lowest version, such as "numpy>=2.0".
        installed: the installed version of a package, such as "2.1.3"; None where it is missing.
    """
    project = tomllib.loads(pyproject)["project"]
    found = []
    for requirement in project["dependencies"] + project["optional-dependencies"]["train"]:
        name, _, least = requirement.partition(";")[0].strip().partition(">=")
        version = installed(name)
        if name != "torch" and (version is None or _numbers(version) < _numbers(least)):
            found.append(f"{name}>={least}")
    return found


def installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> list[int]:
    """Return the numbers that a version begins with: [2, 11, 0] of "2.11.0+cu130"."""
    return [int(number) for number in re.match(r"[\d.]*\d", version)[0].split(".")]  # type: ignore[index]


def main() -> int:
    """Run the parts; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="", help="file for the results, as JSON; standard output if left out")
    parser.add_argument("--parts", nargs="+", default=[])
    parser.add_argument("--limit-s", type=float, default=_LIMIT_S, help="longest time of a part (default: %(default)g)")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--wheels", default="")
    parser.add_argument("--trl-python", type=Path, default=Path(sys.executable))
    parser.add_argument("--rehearse", action="store_true")
    args = parser.parse_args()
    if not args.trl_python.is_file():
        parser.error(f"--trl-python must be the Python of an environment that has TRL, and there is no {args.trl_python}")
    if args.wheels:
        install(args.wheels)
    sys.path[:0] = [str(_SOURCE), str(_BENCHMARKS)]
    torch, platform = import_module("torch"), import_module("offbeat.sync.platform").current_platform
    if not args.rehearse and platform.device_type != "cuda":
        print("gpu-check needs a GPU that torch can use, and found none; --rehearse rehearses it on the CPU", file=sys.stderr)
        return 2
    own = import_module("parts")  # what it needs may have been installed just now

    device = torch.device("cpu" if args.rehearse else "cuda")
    parts: dict[str, Callable[[], Any]] = import_module("rehearsal").rehearsal(missing) if args.rehearse else {}
    parts |= own.parts(device, trl_python=str(args.trl_python)) | {"run": lambda: whole_run(args.rehearse)}
    if unknown := set(args.parts) - parts.keys():
        parser.error(f"there is no part {min(unknown)!r}, only {', '.join(parts)}")
    chosen = {name: part for name, part in parts.items() if not args.parts or name in args.parts}
    if args.here:
        for name, part in chosen.items():
            print(json.dumps({name: guarded(part)}), flush=True)
        return 0
    results: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"), "torch": torch.__version__, "transformers": installed("transformers"),
        "device": "CPU, a rehearsal" if args.rehearse else torch.cuda.get_device_name(), "parts": {}}
    command = [sys.executable, __file__, "--here", "--trl-python", str(args.trl_python), *(["--rehearse"] if args.rehearse else [])]
    for name, found in in_turn(command, list(chosen), limit_s=args.limit_s):
        results["parts"][name] = found
        if args.out:
            write_whole(Path(args.out), json.dumps(results, indent=2) + "\n")
    if not args.out:
        print(json.dumps(results, indent=2))
    return int(any("error" in part for part in results["parts"].values()))


def in_turn(command: Sequence[str], names: list[str], *, limit_s: float) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each part's result, from a process that runs one after the other; another goes on if a part ends it or takes too long."""
    while names:
        with subprocess.Popen([*command, "--parts", *names], stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
            lines = Lines(process)
            while names:
                print(f"gpu-check: {names[0]}", file=sys.stderr, flush=True)
                line = lines.next(limit_s)
                found = json.loads(line)[names[0]] if line else {"error": lines.end(late=line is None, limit_s=limit_s)}
                yield names.pop(0), found
                if not line:
                    break


class Lines:
    """The lines that a process prints, each within a time, and how it ended."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None, "it is a pipe"
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def next(self, limit_s: float) -> str | None:
        """Return the next line; empty if the process has ended, None if the time is over."""
        try:
            return self._lines.get(timeout=limit_s)
        except queue.Empty:
            return None

    def end(self, *, late: bool, limit_s: float) -> str:
        """End all that the process has started, and itself if it is late; returns what has happened to it."""
        if late:
            self._process.kill()
        code = self._process.wait()
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        return f"took longer than {limit_s:g} s" if late else f"ended its process with exit code {code}"


def write_whole(path: Path, text: str) -> None:
    """Write a file so that what is there is always whole."""
    part = path.with_name(path.name + ".part")
    part.write_text(text)
    part.replace(path)


def guarded(part: Callable[[], Any]) -> dict[str, Any]:
    """Run a part; an error is its result."""
    began_s = time.perf_counter()
    try:
        found = {"result": part()}
    except Exception as exc:
        found = {"error": f"{type(exc).__name__}: {exc}", "trace": traceback.format_exc(limit=-4)}
    return found | {"seconds": round(time.perf_counter() - began_s, 1)}


def whole_run(cpu: bool) -> dict[str, Any]:
    """Train a small model for two steps with an embedded engine: generation, training, publishing and proof on the device."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable, "-m", "offbeat", "train", str(_SOURCE / "offbeat/cli/quickstart.toml"), "--run.dir", folder,
            "--run.name", "check", "--run.total_steps", "2", "--sft.total_steps", "2",
            "--rollout.consumer_batch_size", "4", "--evaluate.num_prompts", "4"]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_LIMIT_S, check=False,
            env=os.environ | {"PYTHONPATH": str(_SOURCE)} | ({"CUDA_VISIBLE_DEVICES": ""} if cpu else {}))
        results = list(Path(folder).rglob("result.json"))
        if done.returncode or not results:
            raise RuntimeError(f"the run ended with {done.returncode}: {done.stderr.strip()[-500:]}")
        lines = (results[0].parent / "metrics.jsonl").read_text().splitlines()
        last = json.loads(lines[-1])
        return {name: last[name] for name in ("policy/canary_gap", "policy/logprob_gap_mean", "train/loss") if name in last}


if __name__ == "__main__":
    sys.exit(main())
