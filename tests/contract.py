"""Engines under contract: the embedded one in this process, and real vLLM where `make test-vllm` asks for it.

Both serve the same small models with strong weights, whose references are Hugging Face's and PEFT's own modules.
"""

import asyncio
import json
import os
import re
import subprocess
import urllib.request
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

from offbeat.aio import gather_all
from offbeat.data.tokenizer import character_tokenizer
from offbeat.engine import inside
from offbeat.engine.options import EngineOptions
from offbeat.engine.server import EngineServer
from offbeat.fleet.engine_group import EngineGroup
from offbeat.inference.client import EngineClient, EngineSession
from offbeat.inference.dialects.base import Dialect
from offbeat.inference.dialects.embedded import EmbeddedDialect
from offbeat.model.load import load_causal_lm
from offbeat.model.peft_io import Adapter, write_adapter
from offbeat.weights.protocol import Interrupt, Manifest
from offbeat.workers.local import LocalLauncher
from small_run import small_config

T = TypeVar("T")
Body = Callable[[EngineClient], Awaitable[T]]

SUPPORT = Path(__file__).parent / "support"
WITH_VLLM = bool(os.environ.get("OFFBEAT_TEST_VLLM"))
KINDS = ["embedded", pytest.param("vllm", marks=pytest.mark.skipif(not WITH_VLLM, reason="make test-vllm runs it"))]
SIZES = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "intermediate_size": 96,
    "max_position_embeddings": 512}  # head_dim 32 is the least that vLLM's kernels for CPUs know
MAX_ADAPTERS, MAX_RANK = 4, 8
CANARY = (13, 14, 15, 5, 6, 7, 0, 9, 21, 3)


def build_model(folder: Path, *, seed: int, tied: bool) -> str:
    """Write a model whose every token depends on its context, and its tokenizer."""
    tokenizer = character_tokenizer()
    tokenizer.save(folder)
    config = Qwen3Config(
        vocab_size=tokenizer.vocab_size, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, bos_token_id=None,
        tie_word_embeddings=tied, **SIZES)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
        for name, parameter in model.named_parameters():
            parameter.data.normal_(1.0 if "norm" in name else 0.0, 0.2)
    model.save_pretrained(folder)
    return str(folder)


def build_expert_model(folder: Path, *, seed: int, std: float = 0.2, num_experts: int = 4) -> str:
    """Write a mixture of experts, and its tokenizer."""
    tokenizer = character_tokenizer()
    tokenizer.save(folder)
    config = Qwen3MoeConfig(
        vocab_size=tokenizer.vocab_size, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, bos_token_id=None,
        num_experts=num_experts, num_experts_per_tok=2, moe_intermediate_size=64, norm_topk_prob=True, **SIZES)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
        for name, parameter in model.named_parameters():
            parameter.data.normal_(1.0 if "norm" in name else 0.0, std)
    model.save_pretrained(folder)
    return str(folder)


def build_adapter(folder: Path, model: str, *, seed: int, rank: int = 4) -> str:
    """Write an adapter of all linear layers that changes every logit."""
    generator = torch.Generator().manual_seed(seed)
    linears = {
        name: module for name, module in load_causal_lm(model, attention="sdpa").named_modules()
        if isinstance(module, torch.nn.Linear) and name.endswith("_proj")}

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.15

    pairs = {name: (normal(rank, m.in_features), normal(m.out_features, rank)) for name, m in linears.items()}
    write_adapter(Adapter(rank, 1.5, pairs), folder, base_model=model)
    return str(folder)


class Reference:
    """A model, perhaps with an adapter, run by Hugging Face's and PEFT's modules in float32 without a cache."""

    def __init__(self, model: str, adapter: str = "") -> None:
        base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self._model = PeftModel.from_pretrained(base, adapter).eval() if adapter else base.eval()

    @torch.inference_mode()
    def logits(self, tokens: tuple[int, ...]) -> torch.Tensor:
        """[L, V]."""
        return self._model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].float()

    def logprobs(self, prompt: tuple[int, ...], tokens: tuple[int, ...]) -> list[float]:
        """[len(tokens)], of each token after the prompt and those before it."""
        whole = (*prompt, *tokens)
        table = self.logits(whole)[len(prompt) - 1 : -1].log_softmax(-1)
        return table.gather(1, torch.tensor(tokens)[:, None]).squeeze(1).tolist()

    def score(self, tokens: tuple[int, ...]) -> float:
        """Mean log-probability of all tokens but the first."""
        logprobs = self.logprobs(tokens[:1], tokens[1:])
        return sum(logprobs) / len(logprobs)


@dataclass
class Models:
    """Folders, and their references, each made once."""

    root: Path
    references: dict[tuple[str, str], Reference] = field(default_factory=dict)

    def folder(self, seed: int = 0, *, tied: bool = True) -> str:
        folder = self.root / f"{'tied' if tied else 'untied'}-{seed}"
        return str(folder) if folder.exists() else build_model(folder, seed=seed, tied=tied)

    def adapter(self, seed: int, *, rank: int = 4) -> str:
        folder = self.root / f"adapter-{seed}-{rank}"
        return str(folder) if folder.exists() else build_adapter(folder, self.folder(), seed=seed, rank=rank)

    def reference(self, model: str, adapter: str = "") -> Reference:
        return self.references.setdefault((model, adapter), Reference(model, adapter))


@dataclass
class Engine:
    """A server under test.

    Attributes:
        kind: "embedded" or "vllm".
        model: what it was started with.
        folder, version: what it serves now.
        key: that it wants, empty for none.
    """

    kind: str
    url: str
    dialect: Dialect
    model: str
    folder: str
    version: int = -1
    next_version: int = 1
    key: str = ""

    def run(self, body: Body[T]) -> T:
        """Run `body` with a client."""

        async def main() -> T:
            async with EngineSession() as http:
                return await body(EngineClient("engine 0", self.url, http.session, dialect=self.dialect, api_key=self.key))

        return asyncio.run(main())

    async def sampling(self, *starts: Callable[[], Coroutine[Any, Any, T]]) -> list["asyncio.Task[T]"]:
        """Start calls, and return once the engine was seen to run samples; calls that were all answered before that are made again."""
        async with asyncio.timeout(120):
            while True:
                calls = [asyncio.create_task(start()) for start in starts]
                while not all(call.done() for call in calls):
                    if await asyncio.to_thread(self.num_running):
                        return calls
                for call in calls:
                    call.result()

    def num_running(self) -> int:
        """Samples under way."""
        asked = urllib.request.Request(f"{self.url}/metrics", headers={"Authorization": f"Bearer {self.key}"})
        with urllib.request.urlopen(asked, timeout=60) as response:
            text = response.read().decode()
        (count,) = re.findall(r"^(?:vllm:num_requests_running|offbeat_engine_running)(?:\{.*\})? (\d+)", text, re.M)
        return int(count)

    def serve(self, folder: str) -> "Engine":
        """Have it serve these weights."""
        if folder != self.folder:
            self.run(lambda client: self.publish(client, folder))
        return self

    async def publish(
        self, client: EngineClient, weights: str, *, interrupt: Interrupt = "recompute", folder: str = "", broadcast: str = "",
    ) -> None:
        """Stage and switch to a new version: the weights of that folder, read from it or from another, or received."""
        manifest = Manifest(self.next_version, folder or weights, "", CANARY, (), broadcast)
        self.next_version += 1
        await client.stage(manifest, timeout_s=30)
        await client.switch(manifest, interrupt=interrupt, timeout_s=60)
        self.folder, self.version = weights, manifest.version


@contextmanager
def embedded(model: str, **options: Any) -> Iterator[Engine]:
    """The embedded engine, on threads of this process."""
    key = "of-this-test"
    server = EngineServer(EngineOptions(
        model=model, version=-1, max_adapters=MAX_ADAPTERS, max_adapter_rank=MAX_RANK, max_running=64, api_key=key, **options))
    try:
        yield Engine("embedded", server.start(), EmbeddedDialect(), model, model, key=key)
    finally:
        server.stop()


@contextmanager
def vllm_group(root: Path, *runs: tuple[str, dict[str, str]]) -> Iterator[list[tuple[str, str]]]:
    """vLLM servers, started at once as a run starts them: per model its settings; their URLs and keys."""

    async def start(launcher: LocalLauncher, index: int, model: str, settings: dict[str, str]) -> tuple[str, str]:
        config = small_config(
            root, model, inference__engine="vllm", inference__max_running="64", inference__start_timeout_s="240", **settings)
        (root / str(index)).mkdir()
        group = await EngineGroup.start(launcher, config.for_engines, log_dir=root / str(index))
        return (await group.serve(model=model, tokenizer=model, version=-1)).urls["engine 0"], group.key

    launcher = LocalLauncher(stop_timeout_s=5)
    with asyncio.Runner() as runner, ExitStack() as stack:
        stack.callback(lambda: runner.run(launcher.__aexit__(None)))
        yield runner.run(gather_all(start(launcher, index, *run) for index, run in enumerate(runs)))


def run_in_vllm(*arguments: str) -> list[str]:
    """Run Python in vLLM's environment, with the modules that Offbeat has inside it; the lines that it prints."""
    env = os.environ | {"PYTHONPATH": str(Path(inside.__file__ or "").parent)}
    done = subprocess.run([".venv-vllm/bin/python", *arguments], env=env, capture_output=True, text=True, timeout=300, check=True)
    return done.stdout.splitlines()


def play_inside(*acts: tuple[str, str]) -> list[str]:
    """What becomes of acts of Offbeat's endpoints on a stand-in for vLLM's engine, a line each; see support/vllm_engine.py."""
    return run_in_vllm(str(SUPPORT / "vllm_engine.py"), json.dumps(acts))[-len(acts):]
