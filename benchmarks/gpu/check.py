"""Checks on one GPU what nothing else can show: `make gpu-check`. Ten minutes on a machine with a driver, Python and torch.

Results on the device are compared with those of the CPU in the same process: attention of packed and shared rows with and without windows,
the fused head, a model's log-probabilities, losses and gradients, adapters. Then a group of one rank on the device's own collectives,
weights from one process to another on the device, a training step beside those of a plain torch loop and of TRL, speed and peak memory of
a pass over 16,384 tokens at the shapes of Qwen3, from random weights, beside what was estimated, and a whole run (embedded engine,
publishing, proof). Each part stands by itself: one that fails is reported with its error, and the next one runs.

    python benchmarks/gpu/check.py [--out FILE] [--parts NAME ...] [--wheels FOLDER] [--trl-python PYTHON] [--cpu]

--wheels installs what is missing from a folder of wheels, without a network. TRL takes part if it is installed beside torch, or in the
environment of the interpreter that --trl-python names. --cpu rehearses all parts on the CPU at tiny shapes, which shows that the script
works and nothing else. Exit 2 where there is no GPU, 1 where a part failed. `python benchmarks/gpu/page.py` makes
docs/gpu.md of the file.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

_BENCHMARKS = Path(__file__).resolve().parents[1]
_SOURCE = _BENCHMARKS.parent / "src"
_NEEDED = (
    "aiohttp", "httptools", "math_verify", "msgspec", "numpy", "prometheus_client", "psutil", "pydantic", "rich", "safetensors",
    "sqlalchemy", "starlette", "tokenizers", "transformers", "uvicorn")
_RUN_TIMEOUT_S = 240


def install(wheels: str) -> None:
    """Install what is missing from a folder of wheels."""
    if missing := [name for name in _NEEDED if find_spec(name) is None]:
        names = [name.replace("_", "-") for name in missing]
        subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--find-links", wheels, *names], check=True)


def main() -> int:
    """Run the parts; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="", help="file for the results, as JSON; standard output if left out")
    parser.add_argument("--parts", nargs="+", default=[])
    parser.add_argument("--wheels", default="")
    parser.add_argument("--trl-python", type=Path, default=Path(sys.executable))
    parser.add_argument("--cpu", action="store_true")
    args = parser.parse_args()
    if not args.trl_python.is_file():
        parser.error(f"--trl-python must be the Python of an environment that has TRL, and there is no {args.trl_python}")
    if args.wheels:
        install(args.wheels)
    sys.path[:0] = [str(_SOURCE), str(_BENCHMARKS)]
    torch, platform = import_module("torch"), import_module("offbeat.sync.platform").current_platform
    if not args.cpu and platform.device_type != "cuda":
        print("gpu-check needs a GPU that torch can use, and found none; --cpu rehearses it on the CPU", file=sys.stderr)
        return 2
    own = import_module("parts")  # what it needs may have been installed just now

    device = torch.device("cpu" if args.cpu else "cuda")
    parts: dict[str, Callable[[], Any]] = own.parts(device, trl_python=str(args.trl_python)) | {"run": lambda: whole_run(args.cpu)}
    if unknown := set(args.parts) - parts.keys():
        parser.error(f"there is no part {min(unknown)!r}, only {', '.join(parts)}")
    results = {
        "date": time.strftime("%Y-%m-%d"), "torch": torch.__version__,
        "device": "CPU, a rehearsal" if args.cpu else torch.cuda.get_device_name(),
        "parts": {name: guarded(name, part) for name, part in parts.items() if not args.parts or name in args.parts}}
    text = json.dumps(results, indent=2)
    if args.out:
        Path(args.out).write_text(text + "\n")
    else:
        print(text)
    return int(any("error" in part for part in results["parts"].values()))


def guarded(name: str, part: Callable[[], Any]) -> dict[str, Any]:
    """Run a part; an error is its result."""
    print(f"gpu-check: {name}", file=sys.stderr, flush=True)
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
            command, capture_output=True, text=True, timeout=_RUN_TIMEOUT_S, check=False,
            env=os.environ | {"PYTHONPATH": str(_SOURCE)} | ({"CUDA_VISIBLE_DEVICES": ""} if cpu else {}))
        results = list(Path(folder).rglob("result.json"))
        if done.returncode or not results:
            raise RuntimeError(f"the run ended with {done.returncode}: {done.stderr.strip()[-500:]}")
        lines = (results[0].parent / "metrics.jsonl").read_text().splitlines()
        last = json.loads(lines[-1])
        return {name: last[name] for name in ("policy/canary_gap", "policy/logprob_gap_mean", "train/loss") if name in last}


if __name__ == "__main__":
    sys.exit(main())
