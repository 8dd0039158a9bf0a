"""Writes docs/gpu.md: what `make gpu-check` has found (docs/gpu.json, if there is one), and what counts.py has counted.

    python benchmarks/gpu/counts.py > build/gpu_counts.jsonl && python benchmarks/gpu/page.py build/gpu_counts.jsonl
    python benchmarks/gpu/page.py                                  keeps the table of counts that the page has
"""

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

_DOCS = Path(__file__).resolve().parents[2] / "docs"
_BEGIN, _END = "<!-- begin: counts -->", "<!-- end: counts -->"
_KNOWN_BEGIN, _KNOWN_END = "<!-- begin: known -->", "<!-- end: known -->"

_UNRUN = "Nothing has been run on a GPU yet. This page has the counts instead, and the command that measures."
_RUN = "What has been run on a GPU, and what has only been counted."

_HEAD = """\
`make gpu-check` needs ten minutes on a machine with a driver, Python and torch. It compares the device with the CPU (attention of packed
and shared rows, with windows; the fused head; log-probabilities and gradients in float32 and bfloat16; adapters), meets a group of one rank
over the device's collectives, trains a small model for two steps with an embedded engine, to which it publishes and which proves its
weights, and measures passes over 16,384 tokens at the shapes of Qwen3 beside their estimated memory. Two further parts compare:

- `publishing`: weights of Qwen3-0.6B go from one process to another on the same device, through a CUDA IPC handle, by a file and by a
  broadcast. The receiver's fingerprint must be the sender's each time. Offbeat itself publishes by file and by broadcast
  ([weights](weights.md#channels)); no channel uses handles.
- `steps`: a training step of Offbeat (packed rows, prompts shared by their groups, fused head), one of a plain torch loop (padded batches,
  logits, log-softmax) and, where TRL is installed, one of its GRPOTrainer, on the same model and the same 64 samples of skewed lengths.
  They take turns in processes of their own. It shows seconds per step, without generation, and peak memory; the first gradients must
  have the same norm. `make gpu-check TRL_PYTHON=python` names the Python of an environment with TRL.

Where packages are missing and there is no network, `make gpu-check WHEELS=folder` installs them from a folder of wheels. Results go
to `docs/gpu.json` and onto this page. `make gpu-rehearse` runs all parts without a GPU.

## Without a GPU

"""

_COUNTS = """
## Counted

One forward and backward pass over sequences of 1,024 tokens, on fake tensors, which have shapes and no values (`benchmarks/gpu/counts.py`).
Every operation that is no view is a launch. Memory is what lives beside the weights at its peak, gradients of weights not counted. The
roofline is of an H100: each operation takes as long as its products at 989 TFLOP/s (half of that in float32), or its reads and writes at
3.35 TB/s, one after the other; MFU by it is a bound, not a measurement. "bf16" is how one device and replicas compute, under autocast;
"shards" is FSDP2, whose collectives are not counted. "before" computes in float32, with transformers' norms and the head's chunks of a CPU;
its attention is counted as if the kernel took float32. Norms count as the kernel that CUDA has for them. "compiled" is
`train.compile = true`: the operations of a block, except attention, are replaced by the kernels into which Inductor fuses them, with what
each reads and writes (`benchmarks/gpu/fused_counts.py`). These are the kernels that it plans for a CPU; for a GPU it may fuse differently,
and its memory was not counted.

The head makes 9.5 passes over a micro-batch's logits in float32, forward and backward, and 13 where a chunk is computed again;
`tests/model/test_head.py` counts them. The host waits for the device nowhere in a micro-batch.

"""


def main(argv: Sequence[str]) -> None:
    """Write the page; `argv` may name a file of counts."""
    page, results = _DOCS / "gpu.md", _DOCS / "gpu.json"
    table = _kept(page, _BEGIN, _END)
    if argv:
        table = "".join(_count_table([json.loads(line) for line in Path(argv[0]).read_text().splitlines()]))
    known = _kept(page, _KNOWN_BEGIN, _KNOWN_END)  # written by hand
    found = "".join(_result_table(json.loads(results.read_text()))) if results.exists() else "No GPU was available so far.\n"
    opening = _RUN if results.exists() else _UNRUN
    page.write_text(
        f"# GPUs\n\n{opening}\n\n{_HEAD}{_KNOWN_BEGIN}\n{known}{_KNOWN_END}\n\n## Results\n\n{found}{_COUNTS}{_BEGIN}\n{table}{_END}\n")


def _kept(page: Path, begin: str, end: str) -> str:
    """Return what the page has between two marks."""
    _, found, rest = (page.read_text() if page.exists() else "").partition(f"{begin}\n")
    return rest.partition(end)[0] if found else ""


def _count_table(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    yield "| model | format, recomputed | tokens | launches | moved | memory | roofline | MFU by it |\n|---|---|---|---|---|---|---|---|\n"
    for row in rows:
        yield (
            f"| {row['model']} | {row['variant']} | {row['tokens']:,} | {row['launches']:,} | {row['bytes_moved'] / 2**30:,.0f} GiB"
            f" | {_memory(row['activation_bytes'])} | {row['roofline_s']:.2f} s | {row['roofline_mfu']:.0%} |\n")


def _memory(num_bytes: int | None) -> str:
    return "not counted" if num_bytes is None else f"{num_bytes / 2**30:.1f} GiB"


def _result_table(found: dict[str, Any]) -> Iterator[str]:
    yield f"{found['date']}, {found['device']}, torch {found['torch']}.\n\n| part | result | seconds |\n|---|---|---|\n"
    for name, part in found["parts"].items():
        result = f"failed: {part['error']}" if "error" in part else ", ".join(
            f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in part["result"].items())
        yield f"| {name} | {result.replace('|', '/')} | {part['seconds']} |\n"


if __name__ == "__main__":
    main(sys.argv[1:])
