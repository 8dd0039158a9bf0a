"""Host memory of ranks that load a model which they divide: each reads its own parts, against each reading the whole model.

R processes load a bfloat16 checkpoint into float32 weights over gloo, in each of several meshes, as a policy and as a critic. Of each it
says the most memory that the ranks of a replica hold together, beyond what they held before, as a share of the weights' own size in
float32:

    reading   until the weights have been read
    loading   until the model has also run the small rows that prove it, for which ranks gather a layer, or the embeddings, at a time. On a
              GPU, these are in the GPU's memory.

Memory is the private memory of a process (`RssAnon` of /proc), looked at every millisecond; pages of the checkpoint's file are shared by
all, and belong to the system's cache. The C library is told to return at once what is freed, so that nothing unused counts. What else the
machine does makes no difference.

    python benchmarks/loading.py [--quick] [--model FOLDER] [--ranks 4]
"""

import argparse
import ctypes
import gc
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from forked_ranks import run_ranks
from measure import WORK, emit, note
from transformers import PreTrainedModel

from engine import build
from offbeat.config.root import Config
from offbeat.model.hf_io import read_safetensors, write_safetensors
from offbeat.sync.mesh import MeshShape, ProcessGroups
from offbeat.trainer import policy
from offbeat.trainer.model_trainer import ModelTrainer
from offbeat.trainer.strategies import choose, load
from offbeat.trainer.value_trainer import ValueTrainer

KINDS: dict[str, type[ModelTrainer]] = {"policy": ModelTrainer, "critic": ValueTrainer}
STATUS = Path("/proc/self/status")
_M_MMAP_THRESHOLD = -3
"""The C library's name for the size from which memory is returned when it is freed."""

LIMIT = 1.2
"""Most that is wanted of the ranks of a replica together, in sizes of the weights."""

WAYS = ("parts", "whole")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smoke run: the tiny model on two ranks")
    parser.add_argument("--model", default="", help="a model folder; the default has 27M random weights")
    parser.add_argument("--ranks", type=int, default=4)
    options = parser.parse_args()
    if options.quick:
        options.ranks = 2
    build("tiny")
    folder = options.model or str(rounded("tiny" if options.quick else "27M"))
    size = sum(4 * tensor.numel() for _, tensor in read_safetensors(folder))
    for shape in shapes(options.ranks):
        mesh = ", ".join(f"{name} {count}" for name, count in shape.sizes.items() if count > 1)
        for kind in KINDS:
            case = f"{Path(folder).name} of {size / 2**20:.0f} MiB, {mesh}, {kind}"
            shares = {}
            for way in WAYS:
                found = run_ranks(partial(measure, folder=folder, kind=KINDS[kind], way=way), shape=shape)
                note(f"{case}, {way}: " + "; ".join(
                    f"rank {number} {read / 2**20:.1f}, {loaded / 2**20:.1f} MiB" for number, (read, loaded) in enumerate(found)))
                shares[way] = [sum(figures) / size / shape.dp for figures in zip(*found, strict=True)]
            for part, what in enumerate(("reading", "loading")):
                emit("loading", f"{case}: {what}, parts vs whole", ours=shares["parts"][part], peer=shares["whole"][part],
                     unit="sizes of the weights", less_is_better=True)
            emit("loading", f"{case}: reading, parts vs what is wanted", ours=shares["parts"][0], peer=LIMIT,
                 unit="sizes of the weights", aim=1.0, less_is_better=True)


def rounded(name: str) -> Path:
    """The folder of a model of random weights in bfloat16."""
    source, folder = build(name), WORK / f"model-{name}-bf16"
    write_safetensors({key: tensor.bfloat16() for key, tensor in read_safetensors(source)}, folder, config_from=source)
    return folder


def shapes(num_ranks: int) -> list[MeshShape]:
    """The meshes of so many ranks: shards, slices, and where there are enough both."""
    both = [MeshShape(1, shard=num_ranks // 2, tp=2)] if num_ranks > 2 else []
    return [MeshShape(1, shard=num_ranks), *both, MeshShape(num_ranks // 2, tp=2)]


def measure(groups: ProcessGroups, *, folder: str, kind: type[ModelTrainer], way: str) -> tuple[int, int]:
    """Bytes that this rank held while it read the model, and while it loaded it.

    A small model comes first, with which a process takes what it needs only once.
    """
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1 << 16)

    def act(name: str) -> object:
        config = Config.model_validate({"model": {"path": name}})
        if way == "parts":
            return load(partial(kind._load_model, name, config), groups=groups)
        return choose(model := kind._load_model(name, config, None), groups=groups), model

    act(str(WORK / "model-tiny"))
    groups.sync.barrier("loading")
    return Watch().measure(partial(act, folder))


class Watch:
    """Looks at the memory of this process."""

    def __init__(self) -> None:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        self._before = self._most = anonymous_bytes()
        self._read = 0
        self._done = threading.Event()

    def measure(self, act: Callable[[], object]) -> tuple[int, int]:
        """Most bytes beyond those of before until the weights have been read, and until all is done."""
        watcher, reads = threading.Thread(target=self._look), policy.load_causal_lm
        policy.load_causal_lm = partial(self._reading, reads)
        watcher.start()
        try:
            kept = act()
        finally:
            policy.load_causal_lm = reads
            self._done.set()
            watcher.join()
        del kept
        return self._read - self._before, self._most - self._before

    def _reading(self, reads: Callable[..., PreTrainedModel], *args: Any, **kwargs: Any) -> PreTrainedModel:
        model = reads(*args, **kwargs)
        self._read = max(self._most, anonymous_bytes())
        return model

    def _look(self) -> None:
        while not self._done.wait(0.001):
            self._most = max(self._most, anonymous_bytes())


def anonymous_bytes() -> int:
    """Memory of this process that no file backs."""
    with STATUS.open() as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("RssAnon"))


if __name__ == "__main__":
    main()
