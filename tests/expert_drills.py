"""A mixture of experts in the embedded engine, ways in which it goes wrong, and a trainer that publishes to it.

Each version is one step of sign descent, from float32 weights that lie anywhere between two numbers of the published format, as after many
steps. `python tests/expert_drills.py` has right engines prove 400 versions in each format at three learning rates, spoils some in each way,
and prints one JSON line for each.
"""

import json
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from offbeat.data.tokenizer import character_tokenizer
from offbeat.engine.engine import EmbeddedEngine
from offbeat.engine.forward import fingerprint_tensors
from offbeat.engine.loader import load_engine
from offbeat.engine.options import EngineOptions
from offbeat.weights.proof import BY_WEIGHTS, ProofJudge, Verdict
from offbeat.weights.protocol import Manifest, Proof

CANARY = [5, 9, 20, 3, 8, 8, 11, 7]
GATE_UP, DOWN, ROUTER, HEAD = (
    "model.layers.1.mlp.experts.gate_up_proj", "model.layers.1.mlp.experts.down_proj", "model.layers.0.mlp.gate.weight",
    "model.embed_tokens.weight")


def keep_whole(live, old):
    """All weights as before: a version that was never delivered, or that a replica has missed."""
    for name, tensor in live.items():
        tensor.copy_(old[name])


def keep_expert(live, old):
    """One expert as before."""
    for name in (GATE_UP, DOWN):
        live[name][2] = old[name][2]


def swap_experts(live, _old):
    """Two experts in each other's place."""
    for name in (GATE_UP, DOWN):
        live[name][[1, 2]] = live[name][[2, 1]]


def keep_router(live, old):
    """A router as before."""
    live[ROUTER].copy_(old[ROUTER])


def keep_half(live, old):
    """Half of a fused tensor as before: the gates are new, and what they are multiplied with is old."""
    half = live[GATE_UP].shape[1] // 2
    live[GATE_UP][:, half:] = old[GATE_UP][:, half:]


def keep_head(live, old):
    """The embeddings, and the head that is tied to them, as before."""
    live[HEAD].copy_(old[HEAD])


FAULTS = [keep_whole, keep_expert, swap_experts, keep_router, keep_half, keep_head]


def load(folder: Path, dtype: str) -> EmbeddedEngine:
    """An engine of a small model, which is written to the folder."""
    tokenizer = character_tokenizer()
    tokenizer.save(folder)
    config = Qwen3MoeConfig(
        vocab_size=tokenizer.vocab_size, hidden_size=48, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=24,
        num_experts=8, num_experts_per_tok=2, moe_intermediate_size=24, max_position_embeddings=64, tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, bos_token_id=None)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return load_engine(EngineOptions(model=str(folder), dtype=dtype))


class Trainer:
    """What publishes to an engine: its weights in float32, rounded to the engine's format.

    Attributes:
        was_spoilt: whether the last fault changed anything.
    """

    def __init__(self, engine: EmbeddedEngine, *, lr: float = 1e-6) -> None:
        self._lr, self.was_spoilt = lr, False
        self._engine, self._judge, self._random = engine, ProofJudge.of(0.0, "bfloat16"), torch.Generator().manual_seed(7)
        self._dtype = next(iter(engine._forward.tensors().values())).dtype
        self._state = {name: tensor.clone().float() for name, tensor in engine._forward.tensors().items()}
        for tensor in self._state.values():  # anywhere between two numbers of the format
            tensor += tensor.abs() * 2**-9 * (2 * torch.rand(tensor.shape, generator=self._random) - 1)
        self.publish()

    def publish(self, fault=None) -> Verdict:
        """Publish a version, spoil what the engine computes with by a fault, and judge its proof."""
        for tensor in self._state.values():
            tensor += self._lr * torch.randn(tensor.shape, generator=self._random).sign()
        state = {name: tensor.to(self._dtype) for name, tensor in self._state.items()}
        engine, version = self._engine, self._engine.version + 1
        own = dict(engine._forward._model.named_parameters())  # pyright: ignore
        old = {name: parameter.data.clone() for name, parameter in own.items()}
        engine.stage(version, (f"v{version}", ""), engine._forward.prepare(state))
        engine.switch(version, "recompute")
        _, expected = engine.score(CANARY)
        if fault is not None:
            with torch.inference_mode():
                live = {name: parameter.data for name, parameter in own.items()}
                before = fingerprint_tensors(live)
                fault(live, old)
                self.was_spoilt = fingerprint_tensors(live) != before
        served, fingerprint = engine.fingerprinter()
        proof = Proof(served, fingerprint(), tuple(engine.score(CANARY)[1]))
        return self._judge.judge("a", Manifest(version, "", fingerprint_tensors(state), tuple(CANARY), tuple(expected)), proof)


def drill(dtype: str, lr: float, *, publishes: int = 400, spoilt: int = 10) -> None:
    """Publish to a right engine, and then by turns to one that is spoilt in each way and healed; print what was said of them."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(load(Path(folder), dtype), lr=lr)
        told = [trainer.publish() for _ in range(publishes)]
        print(json.dumps({
            "engine": "right", "dtype": dtype, "lr": lr, "publishes": publishes, "refused": sum(each.refused for each in told),
            "by_weights": sum(each.means == BY_WEIGHTS for each in told)}), flush=True)
        for fault in FAULTS:
            verdicts = []
            for _ in range(spoilt):
                verdict = trainer.publish(fault)
                verdicts += [verdict.refused] if trainer.was_spoilt else []
                assert trainer.publish().means == BY_WEIGHTS
            print(json.dumps({
                "engine": fault.__name__, "dtype": dtype, "lr": lr, "differed": len(verdicts),
                "refused_at_once": sum(verdicts)}), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for format_of_weights in ("float32", "bfloat16"):
        for rate in (1e-6, 1e-5, 1e-4):
            drill(format_of_weights, rate)
