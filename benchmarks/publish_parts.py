"""CPU seconds of the parts of a publish of whole weights: those that the next step waits for, and those of the engine beside it.

    python benchmarks/publish_parts.py [--model .models/smollm2-135m-instruct] [--directory /dev/shm] [--repeats 5]

One thread, float32, the embedded engine; medians. The canary has 56 tokens.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
from measure import ROOT, note

from offbeat.engine.loader import load_forward
from offbeat.engine.options import EngineOptions
from offbeat.engine.versions import read_version
from offbeat.model.load import load_causal_lm
from offbeat.model.rows import settle_rows
from offbeat.trainer.policy import canary_logprobs
from offbeat.trainer.snapshots import ModelSnapshot
from offbeat.trainer.state import full_state

CANARY = list(range(100, 156))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / ".models" / "smollm2-135m-instruct")
    parser.add_argument("--directory", type=Path, default=Path("/dev/shm"), help="where versions are written (default: /dev/shm)")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = load_causal_lm(str(args.model), attention=None)
    settle_rows(model, share_prefix=True)
    forward = load_forward(EngineOptions(model=str(args.model)))
    seen: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory(dir=args.directory) as folder, torch.inference_mode():
        for number in range(args.repeats):
            version = Path(folder) / f"v{number}"
            begin_s, parts = time.process_time(), {}
            canary_logprobs(model, CANARY)
            parts["canary"] = time.process_time()
            snapshot = ModelSnapshot(model, args.model, full_state(model, dtype="float32", keep=True, copies=False), "float32")
            fingerprint = snapshot.fingerprint()
            parts["fingerprint"] = time.process_time()
            snapshot.write(version)
            parts["write"] = time.process_time()
            forward.install(read_version(forward, str(version)))
            parts["engine: read and pack"] = time.process_time()
            assert forward.fingerprinter()() == fingerprint, "the engine has what was written"
            parts["engine: fingerprint"] = time.process_time()
            ends = list(parts.values())
            seen.append(dict(zip(parts, (end - start for start, end in zip([begin_s, *ends[:-1]], ends, strict=True)), strict=True)))
    for part in seen[0]:
        note(f"{part}: {statistics.median(each[part] for each in seen):.3f} CPU-s")


if __name__ == "__main__":
    main()
