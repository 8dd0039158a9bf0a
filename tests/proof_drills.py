"""Engines that cannot show their weights, right and wrong ones, and what the judge says of them publish by publish.

The trainer is a small model in float32 that takes real AdamW steps; an engine is the same model in a number format of its own, by other
kernels. `python tests/proof_drills.py` runs every drill over 400 publishes at three learning rates, and prints one JSON line for each.
"""

import copy
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from offbeat.trainer.state import rounded
from offbeat.weights.proof import Outcome, ProofJudge, Verdict
from offbeat.weights.protocol import Manifest, Proof

DTYPES = ("float32", "bfloat16")
FAULTS = ("", "stale", "half loaded", "one layer stale", "one layer wrong", "tied head stale")
FAULTY_FROM = 5
"""The version after which an engine with a fault goes wrong."""
VOCAB, LENGTH = 64, 48


def build(seed: int) -> Qwen3ForCausalLM:
    """A model with strong weights, so that every token depends on its context; in bfloat16, as models are that others have trained."""
    config = Qwen3Config(
        vocab_size=VOCAB, hidden_size=64, num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=1, head_dim=32,
        intermediate_size=96, max_position_embeddings=128, tie_word_embeddings=True, attn_implementation="sdpa")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
        for name, parameter in model.named_parameters():
            parameter.data.normal_(1.0 if "norm" in name else 0.0, 0.1)
            parameter.data = parameter.data.bfloat16().float()
    return model


@torch.no_grad()
def score(model: Qwen3ForCausalLM, tokens: torch.Tensor) -> tuple[float, ...]:
    """Log-probability of each token but the first."""
    table = model(input_ids=tokens[None], use_cache=False).logits[0, :-1].float().log_softmax(-1)
    return tuple(table.gather(1, tokens[1:, None])[:, 0].tolist())


class Trainer:
    """A model that learns random text by AdamW."""

    def __init__(self, dtype: str, *, lr: float, seed: int = 0) -> None:
        self.model = build(seed)
        self._dtype = dtype
        self.canary = torch.randint(VOCAB, (LENGTH,), generator=torch.Generator().manual_seed(100))
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
        self._random = torch.Generator().manual_seed(seed + 1)

    def step(self) -> None:
        """One step; the gradients are of text that is new each time."""
        tokens = torch.randint(VOCAB, (4, 32), generator=self._random)
        self.model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def manifest(self, version: int) -> Manifest:
        """What it publishes in its engines' number format."""
        with rounded(self.model, self._dtype):
            return Manifest(version, "", "the trainer's", tuple(self.canary.tolist()), score(self.model, self.canary))


class Engine:
    """Another number format, other kernels, no fingerprint, and perhaps a fault."""

    def __init__(self, dtype: str, fault: str) -> None:
        self._dtype = getattr(torch, dtype)
        self._fault = fault
        self._old: dict[str, torch.Tensor] = {}
        config = copy.deepcopy(build(0).config)
        config._attn_implementation = "eager"
        config.tie_word_embeddings = False
        self._model = Qwen3ForCausalLM(config).to(self._dtype).eval()

    def load(self, trainer: Qwen3ForCausalLM, version: int) -> None:
        state = {name: tensor.to(self._dtype) for name, tensor in trainer.state_dict().items()}
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
        faulty = version > FAULTY_FROM
        self._model.load_state_dict({name: self._old[name] if faulty and self._keeps(name) else state[name] for name in state})
        if faulty and self._fault == "one layer wrong":
            wrong = build(99).state_dict()["model.layers.1.mlp.down_proj.weight"]
            self._model.get_parameter("model.layers.1.mlp.down_proj.weight").data.copy_(wrong)
        if not faulty:
            self._old = {name: tensor.clone() for name, tensor in state.items()}

    def _keeps(self, name: str) -> bool:
        """Whether a tensor stays as it was, because of the fault."""
        match self._fault:
            case "stale":
                return True
            case "half loaded":
                return name.startswith(("model.layers.2", "model.layers.3", "model.norm", "lm_head"))
            case "one layer stale":
                return name.startswith("model.layers.1.")
            case "tied head stale":
                return name == "lm_head.weight"
        return False

    def prove(self, manifest: Manifest) -> Proof:
        return Proof(manifest.version, None, score(self._model, torch.tensor(manifest.canary)))


@dataclass(frozen=True)
class Drill:
    """Publishes in which an engine was judged.

    Attributes:
        verdicts: by version; the last is the refusal, if there was one.
        moved: root mean square, over the canary's tokens, of the trainer's move since the engine went wrong.
        off: the largest root mean square of what trainer and engine differed by.
    """

    verdicts: tuple[Verdict, ...]
    moved: float
    off: float

    def count(self, outcome: Outcome) -> int:
        return sum(verdict.outcome is outcome for verdict in self.verdicts)


def play(dtype: str, lr: float, num_publishes: int, faults: tuple[str, ...] = FAULTS) -> dict[str, Drill]:
    """Publish, and judge one engine of each fault until it is refused."""
    trainer, judge = Trainer(dtype, lr=lr), ProofJudge.of(0.0, dtype)
    engines = {fault: Engine(dtype, fault) for fault in faults}
    verdicts: dict[str, list[Verdict]] = {fault: [] for fault in faults}
    moved, off, before = dict.fromkeys(faults, 0.0), dict.fromkeys(faults, 0.0), ()
    for version in range(num_publishes):
        if version:
            trainer.step()
        manifest = trainer.manifest(version)
        before = manifest.canary_logprobs if version <= FAULTY_FROM else before
        move = rms(manifest.canary_logprobs, before)
        for fault, engine in engines.items():
            if verdicts[fault] and verdicts[fault][-1].refused:
                continue
            engine.load(trainer.model, version)
            proof = engine.prove(manifest)
            verdicts[fault].append(judge.judge(fault, manifest, proof))
            moved[fault], off[fault] = move, max(off[fault], rms(proof.canary_logprobs, manifest.canary_logprobs))
    return {fault: Drill(tuple(verdicts[fault]), moved[fault], off[fault]) for fault in faults}


def rms(one: tuple[float, ...], other: tuple[float, ...]) -> float:
    """Root mean square of a difference."""
    return (torch.tensor(one) - torch.tensor(other)).square().mean().sqrt().item()


def lines(num_publishes: int) -> Iterator[dict[str, object]]:
    """One line for each drill."""
    for dtype in DTYPES:
        for lr in (1e-6, 1e-5, 1e-4):
            for fault, drill in play(dtype, lr, num_publishes).items():
                refused = drill.verdicts[-1].refused
                yield {
                    "benchmark": "proof", "dtype": dtype, "lr": lr, "engine": fault or "right", "publishes": len(drill.verdicts),
                    "refused": refused, "versions_until_refused": len(drill.verdicts) - 1 - FAULTY_FROM if refused else None,
                    "moved_since_nats_per_token": round(drill.moved, 7), "proven": drill.count(Outcome.PROVEN),
                    "inconclusive": drill.count(Outcome.UNSURE), "largest_rms": drill.off,
                    "largest_gap": max(verdict.gap for verdict in drill.verdicts),
                    "reason": drill.verdicts[-1].reason if refused else ""}


if __name__ == "__main__":
    torch.set_num_threads(1)
    for line in lines(int(sys.argv[1]) if len(sys.argv) > 1 else 400):
        print(json.dumps(line), flush=True)
