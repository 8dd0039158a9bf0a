"""Engines that can be made to go wrong, and a policy that publishes to them; the drills of `tests/engines` use it."""

import asyncio
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from contract import CANARY, SUPPORT, Engine, Reference
from offbeat.config.weights import WeightsConfig
from offbeat.engine.options import EngineAddress
from offbeat.fleet.pool import EnginePool
from offbeat.fleet.publishers import WeightsPublisher
from offbeat.fleet.server_worker import ServerStart
from offbeat.fleet.servers import server_command
from offbeat.inference.client import EngineClient
from offbeat.model.fingerprint import fingerprint
from offbeat.model.hf_io import read_safetensors
from offbeat.trainer.state import Dtype
from offbeat.weights.proof import ProofJudge
from offbeat.weights.protocol import Manifest
from offbeat.workers.local import LocalLauncher
from offbeat.workers.worker import WorkerSpec, ask
from small_run import small_config

FORMS = ("int8", "int4", "fp8")
LR = {"int4": 1e-3, "fp8": 1e-4}
"""By form of the weights; 1e-5 for all others."""
OTHER_WEIGHTS = {
    "embedded": r"engine 0: its weights have fingerprint \w+ instead of",
    "vllm": r"engine 0: \w+ failed: .* \S+\.weight and \d+ other tensors are not what was read"}
SPLIT = ("--tensor-parallel-size", "2")
Server = tuple[str, tuple[str, ...]]
"""Number format or form, and further arguments of a vLLM server."""


class Versions:
    """A policy that learns: a channel whose every version is one step of Adam from the last."""

    def __init__(self, model: str, root: Path, *, dtype: str, lr: float = 0.0) -> None:
        """Without `lr` that of the form."""
        self._model, self._root, self._dtype, self._lr = Path(model), root, published_in(dtype), lr or LR.get(dtype, 1e-5)
        self._state = {name: tensor.float() for name, tensor in read_safetensors(model)}
        self._random = torch.Generator().manual_seed(5)
        self.folder = model

    def scatter(self) -> None:
        """Move weights to anywhere between two numbers of bfloat16, where they lie after many steps."""
        for tensor in self._state.values():
            tensor += tensor.abs() * 2**-9 * (2 * torch.rand(tensor.shape, generator=self._random) - 1)

    async def write(self, version: int, *, num_receivers: int = 0) -> Manifest:
        folder = Path(shutil.copytree(self._model, self._root / f"v{version:08d}"))
        for tensor in self._state.values():
            tensor += self._lr * torch.randn(tensor.shape, generator=self._random).sign()
        state = {name: tensor.to(getattr(torch, self._dtype)) for name, tensor in self._state.items()}
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
        told = fingerprint((name, tensor.view(-1).view(torch.uint8).numpy()) for name, tensor in state.items())
        self.folder = str(folder)
        return Manifest(version, self.folder, told, CANARY, tuple(Reference(self.folder).logprobs(CANARY[:1], CANARY[1:])))

    async def rewrite(self, manifest: Manifest) -> Manifest | None:
        return None

    def prune(self, served: int) -> None:
        """All stay."""


@dataclass
class Drilled:
    """An engine that can be made to go wrong, and what publishes to it.

    Attributes:
        spoil: has the next loads go wrong; of whole weights by the name of a fault, of adapters by the folder that is read instead.
    """

    engine: Engine
    versions: Versions
    judge: ProofJudge
    spoil: Callable[..., None]

    async def publish(self, publisher: WeightsPublisher) -> None:
        self.engine.version += 1
        await publisher.publish(self.engine.version)
        await publisher.settle()

    def publisher(self, client: EngineClient) -> WeightsPublisher:
        return WeightsPublisher(EnginePool([client]), self.versions, WeightsConfig(), judge=self.judge)


@contextmanager
def faulty_servers(model: str, root: Path, *servers: Server, **settings: str) -> Iterator[dict[Server, tuple[str, Path]]]:
    """Of each server: the URL of one with a worker that goes wrong, and the file that says how; `settings` are of the run."""
    launcher = LocalLauncher(stop_timeout_s=5)

    async def serve(dtype: str, arguments: tuple[str, ...]) -> tuple[str, Path]:
        config = small_config(
            root, model, inference__engine="vllm", model__dtype=published_in(dtype), inference__max_running="64",
            inference__quantization=dtype if dtype in FORMS else "none", **settings)
        command, env = server_command(config.for_engines, model=model, tokenizer=model, version=-1, seed=0, key="")
        name = dtype + "".join(arguments)
        path = root / f"{name}.json"
        env |= {"OFFBEAT_TEST_FAULT": str(path), "PYTHONPATH": os.pathsep.join([env["PYTHONPATH"], str(SUPPORT)])}
        start = ServerStart((*command, "--worker-extension-cls", "vllm_faults.FaultyWorker", *arguments), env, "127.0.0.1", 240)
        worker = await launcher.start(
            WorkerSpec(name, "offbeat.fleet.server_worker:ServerWorker", root / f"{name}.log"), timeout_s=60)
        return (await ask(worker, "start", start, EngineAddress, timeout_s=250)).url, path

    async def serve_all() -> dict[Server, tuple[str, Path]]:
        return dict(zip(servers, await asyncio.gather(*(serve(*server) for server in servers)), strict=True))

    with asyncio.Runner() as runner, ExitStack() as stack:
        stack.callback(lambda: runner.run(launcher.__aexit__(None)))
        yield runner.run(serve_all())


def published_in(dtype: str) -> Dtype:
    """The number format in which weights come to an engine that has this one."""
    return "bfloat16" if dtype in ("bfloat16", "int4", "fp8") else "float32"
