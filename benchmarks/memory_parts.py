"""Where the memory of a GRPO run of a pretrained model lies: resident MB of a trainer and of an embedded engine, part by part.

    python benchmarks/memory_parts.py [--model .models/smollm2-135m-instruct] [--threads 2]

Each side is a process with the C library's settings of a run's workers. The trainer updates all weights in float32 on 4 prompts of 40
tokens with 4 answers of 48, as `real.py` does, and writes them; the engine decodes 16 samples and takes the new version. Figures are
MB after a part, and the most within it.
"""

import argparse
import gc
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from measure import ROOT

from offbeat.workers.worker import library_environment

SIDES = ("trainer", "engine")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / ".models" / "smollm2-135m-instruct")
    parser.add_argument("--threads", type=int, default=2, help="threads of the trainer; the engine has one (default: 2)")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        {"trainer": measure_trainer, "engine": measure_engine}[args.side](args.model)
        return
    for side, threads in zip(SIDES, (args.threads, 1), strict=True):
        command = [sys.executable, __file__, "--model", args.model, "--side", side]
        subprocess.run(list(map(str, command)), env=os.environ | library_environment(threads), check=True)


def measure_trainer(model: Path) -> None:
    tell("trainer: python, torch")
    from packing import groups_of_one, make_batch  # noqa: PLC0415 - what importing takes is a part

    from offbeat.algorithms.adam import AdamParams  # noqa: PLC0415
    from offbeat.config.root import Config  # noqa: PLC0415
    from offbeat.data.packing import plan_microbatches  # noqa: PLC0415
    from offbeat.trainer.messages import TrainStep, WriteRequest  # noqa: PLC0415
    from offbeat.trainer.model_trainer import ModelTrainer  # noqa: PLC0415

    tell("trainer: all imports")
    prompts, groups_of_four = np.full(16, 40), np.arange(16) // 4
    batch = make_batch(prompts + 48, prompts, groups_of_four, shared=prompts)
    config = Config.model_validate({"train": {"precision": "float32"}})
    with groups_of_one() as groups, tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        trainer = ModelTrainer.build(str(model), config=config.for_ranks, groups=groups)
        tell("trainer: weights")
        plan = plan_microbatches(batch, num_ranks=1, max_tokens=config.train.max_tokens_per_microbatch, share_prefix=True)
        for number in range(3):
            trainer.train_step(TrainStep(batch, (tuple(plan.microbatches[0]),), AdamParams(lr=1e-6, clip_norm=1.0)))
            tell(f"trainer: step {number + 1} (gradients, moments, activations of {len(plan.microbatches[0])} micro-batches)")
            trainer.write_weights(WriteRequest(f"{folder}/v{number}", "float32", tuple(range(100, 156))))
            tell(f"trainer: publish {number + 1}")


def measure_engine(model: Path) -> None:
    tell("engine: python, torch")
    from offbeat.engine.loader import load_engine  # noqa: PLC0415
    from offbeat.engine.options import EngineOptions  # noqa: PLC0415
    from offbeat.engine.request import SamplingParams  # noqa: PLC0415
    from offbeat.engine.versions import VersionSource  # noqa: PLC0415
    from offbeat.sync.platform import current_platform  # noqa: PLC0415

    tell("engine: all imports")
    engine = load_engine(EngineOptions(model=str(model)))
    tell("engine: weights, loaded and checked")
    gc.collect()  # as `EngineLoop.start` does
    current_platform.return_memory()
    tell("engine: weights, when it begins to serve")
    for number in range(2):
        prompts = np.random.default_rng(number).integers(1000, 40_000, (4, 40)).tolist()
        engine.generate(prompts, SamplingParams(max_new_tokens=48, ignore_eos=True), n=4)
        tell("engine: 16 samples")
        engine.stage(number + 1, VersionSource(str(model), str(number + 1)), engine.prepare(str(model)))
        tell(f"engine: version {number + 1} staged beside the one that serves")
        engine.switch(number + 1, "keep")
        tell(f"engine: version {number + 1} serves")


def tell(part: str) -> None:
    """Print resident MB now, and the most since the last call."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    now, most = (int(status[name].split()[0]) * 1024 / 1e6 for name in ("VmRSS", "VmHWM"))
    print(f"| {part} | {now:.0f} | {most:.0f} |", flush=True)
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins again


if __name__ == "__main__":
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    main()
