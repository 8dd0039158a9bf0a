"""Proofs by real vLLM on CPUs in bfloat16: whether the right engine is believed, and when a stale one is found out.

A trainer in float32 takes AdamW steps on random text and publishes each version to one vLLM server, which is judged twice: by all that it
shows, and as if it could show nothing but the canary (`offbeat.weights.proof`). Then the server is given one version's folder again and
again, under ever newer numbers, until the second judge refuses it. The same over 400 publishes without vLLM: `tests/proof_drills.py`.

    python benchmarks/proof.py [--model FOLDER] [--publishes 40] [--stale 60] [--lrs 1e-6 1e-5 1e-4] [--dtype bfloat16]

Without a model a small random one is built. vLLM has to be in `.venv-vllm`.
"""

import argparse
import asyncio
import json
import shutil
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measure import ROOT, WORK, note
from transformers import PreTrainedModel

from offbeat.config.root import Config
from offbeat.data.tokenizer import character_tokenizer
from offbeat.fleet.engine_group import EngineGroup
from offbeat.fleet.kinds import MAKERS
from offbeat.inference.client import EngineClient, EngineSession
from offbeat.model.fingerprint import fingerprint
from offbeat.model.load import load_causal_lm
from offbeat.trainer.export import export_folder
from offbeat.trainer.policy import canary_logprobs
from offbeat.trainer.state import Dtype, full_state, parameter_bytes, rounded
from offbeat.weights.proof import Outcome, ProofJudge, Verdict
from offbeat.weights.protocol import Manifest, Proof
from offbeat.workers.local import LocalLauncher

sys.path.insert(0, str(ROOT / "tests"))
from contract import build_model

CANARY_TOKENS = 64
TIMEOUT_S = 120.0


class Trainer:
    """Learns random text, and writes versions."""

    def __init__(self, folder: str, *, lr: float, dtype: Dtype, directory: Path) -> None:
        self.model: PreTrainedModel = load_causal_lm(folder, attention="packed")
        self._folder, self._dtype, self._directory = folder, dtype, directory
        self._vocab = self.model.config.vocab_size
        self._random = torch.Generator().manual_seed(7)
        self.canary = tuple(torch.randint(self._vocab, (CANARY_TOKENS,), generator=torch.Generator().manual_seed(1)).tolist())
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)

    def step(self) -> None:
        tokens = torch.randint(self._vocab, (2, 32), generator=self._random)
        self.model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def write(self, version: int) -> Manifest:
        """Publish into a new folder; the one before the last goes."""
        state, folder = full_state(self.model, dtype=self._dtype, keep=True), self._directory / f"v{version:08d}"
        export_folder(state, folder, model_folder=Path(self._folder), dtype=self._dtype)
        shutil.rmtree(self._directory / f"v{version - 2:08d}", ignore_errors=True)
        return Manifest(
            version, str(folder), fingerprint(parameter_bytes(self.model, state)), self.canary, self.score())

    def score(self) -> tuple[float, ...]:
        with torch.no_grad(), rounded(self.model, self._dtype):
            return canary_logprobs(self.model, self.canary)


@dataclass
class Watched:
    """A judge, and what it has said.

    Attributes:
        rms: of what trainer and engine differ by, by publish.
    """

    judge: ProofJudge
    verdicts: list[Verdict] = field(default_factory=list)
    rms: list[float] = field(default_factory=list)

    def see(self, manifest: Manifest, proof: Proof) -> Verdict:
        off = np.subtract(manifest.canary_logprobs, proof.canary_logprobs)
        self.rms.append(float(np.sqrt(np.mean(off**2))))
        self.verdicts.append(self.judge.judge("vllm", manifest, proof))
        return self.verdicts[-1]

    def counts(self) -> dict[str, int]:
        return {outcome.value: sum(verdict.outcome is outcome for verdict in self.verdicts) for outcome in Outcome}


def tell(figures: dict[str, Any]) -> None:
    """One JSON line."""
    print(json.dumps(figures), flush=True)


async def serve(client: EngineClient, manifest: Manifest) -> tuple[Proof, float]:
    """What the engine proves when it serves a version, and how long that took."""
    start = time.monotonic()
    await client.stage(manifest, timeout_s=TIMEOUT_S)
    await client.switch(manifest, interrupt="recompute", timeout_s=TIMEOUT_S)
    return await client.prove(manifest.canary, timeout_s=TIMEOUT_S), time.monotonic() - start


async def run(client: EngineClient, args: argparse.Namespace, directory: Path, model: str, lr: float, first: int) -> int:
    """One learning rate, from version `first` on; gives the next version."""
    trainer = Trainer(model, lr=lr, dtype=args.dtype, directory=directory)
    shown, hidden = (Watched(ProofJudge.of(0.0, args.dtype)) for _ in range(2))
    took, version = [], first
    for version in range(first, first + args.publishes):
        manifest = trainer.write(version)
        proof, seconds = await serve(client, manifest)
        took.append(seconds)
        for watched, told in ((shown, proof), (hidden, replace(proof, fingerprint=None))):
            if (verdict := watched.see(manifest, told)).refused:
                note(f"a right engine was refused at publish {version - first}: {verdict.reason}")
        trainer.step()
    tell({
        "benchmark": "proof", "engine": "right", "model": Path(model).name, "dtype": args.dtype, "lr": lr, "publishes": args.publishes,
        "by_what_it_shows": shown.counts(), "by_the_canary_alone": hidden.counts(), "largest_rms": max(hidden.rms),
        "median_rms": float(np.median(hidden.rms)), "largest_mean_gap": max(verdict.gap for verdict in hidden.verdicts),
        "publish_s": round(float(np.median(took)), 3)})
    stale, before = trainer.write(version + 1), trainer.score()
    for number in range(version + 1, version + 1 + args.stale):
        told = replace(stale, version=number, canary_logprobs=trainer.score())
        proof, _ = await serve(client, replace(stale, version=number))
        verdict = hidden.see(told, replace(proof, fingerprint=None))
        if verdict.refused:
            break
        trainer.step()
    tell({
        "benchmark": "proof", "engine": "stale", "model": Path(model).name, "dtype": args.dtype, "lr": lr, "refused": verdict.refused,
        "versions_until_refused": number - version - 1, "reason": verdict.reason,
        "moved_rms": float(np.sqrt(np.mean(np.subtract(told.canary_logprobs, before) ** 2)))})
    return number + 1


async def main(args: argparse.Namespace) -> None:
    async with AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm")))
        model = args.model or build_model(directory / "small", seed=0, tied=True)
        if args.model is None:
            character_tokenizer().save(Path(model))
        settings = {
            "model": {"path": model, "dtype": args.dtype},
            "inference": {
                "engine": "vllm", "max_running": 16, "start_timeout_s": 300.0, "python": str(ROOT / ".venv-vllm" / "bin" / "python"),
                "max_context": 256, "threads": 1},
            "data": {"task": "sort_digits"}, "run": {"dir": str(WORK)}}
        config = Config.model_validate(settings)
        launcher = await stack.enter_async_context(LocalLauncher(stop_timeout_s=10))
        engines = await EngineGroup.start(launcher, config.for_engines, log_dir=directory)
        served = await engines.serve(model=model, tokenizer=model, version=-1)
        http = await stack.enter_async_context(EngineSession())
        dialect = MAKERS[config.inference.engine].dialect(config.for_engines, model)
        client = EngineClient("vllm", served.urls["engine 0"], http.session, dialect=dialect, api_key=served.key)
        version = 0
        for lr in args.lrs:
            version = await run(client, args, directory, model, lr, version)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=None, help="folder of a Hugging Face model")
    parser.add_argument("--publishes", type=int, default=40)
    parser.add_argument("--stale", type=int, default=60, help="publishes of one version's weights under newer numbers, at most")
    parser.add_argument("--lrs", type=float, nargs="+", default=[1e-6, 1e-5, 1e-4])
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    torch.set_num_threads(1)
    asyncio.run(main(parser.parse_args()))
