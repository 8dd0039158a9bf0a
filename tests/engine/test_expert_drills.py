"""A mixture of experts that computes with other weights than were published: refused at its first proof, right engines never.

Each version is one step of sign descent at a learning rate of 1e-6, from float32 weights that lie anywhere between two numbers of the
published format, as after many steps. No canary can tell such versions apart in bfloat16.
"""

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from offbeat.data.tokenizer import character_tokenizer
from offbeat.engine.engine import EmbeddedEngine
from offbeat.engine.forward import fingerprint_tensors
from offbeat.engine.loader import load_engine
from offbeat.engine.options import EngineOptions
from offbeat.errors import EngineError, RefusedError
from offbeat.weights.proof import BY_WEIGHTS, ProofJudge, Verdict
from offbeat.weights.protocol import Manifest, Proof

LR = 1e-6
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


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> EmbeddedEngine:
    folder, tokenizer = tmp_path_factory.mktemp("experts"), character_tokenizer()
    tokenizer.save(folder)
    config = Qwen3MoeConfig(
        vocab_size=tokenizer.vocab_size, hidden_size=48, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=24,
        num_experts=8, num_experts_per_tok=2, moe_intermediate_size=24, max_position_embeddings=64, tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, bos_token_id=None)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return load_engine(EngineOptions(model=str(folder), dtype=request.param))


class Trainer:
    """What publishes to an engine: its weights in float32, rounded to the engine's format."""

    def __init__(self, engine: EmbeddedEngine) -> None:
        self._engine, self._judge, self._random = engine, ProofJudge.of(0.0, "bfloat16"), torch.Generator().manual_seed(7)
        self._dtype = next(iter(engine._forward.tensors().values())).dtype
        self._state = {name: tensor.clone().float() for name, tensor in engine._forward.tensors().items()}
        for tensor in self._state.values():  # anywhere between two numbers of the format
            tensor += tensor.abs() * 2**-9 * (2 * torch.rand(tensor.shape, generator=self._random) - 1)
        self.publish()

    def publish(self, fault=None) -> Verdict:
        """Publish a version, spoil what the engine computes with by a fault, and judge its proof."""
        for tensor in self._state.values():
            tensor += LR * torch.randn(tensor.shape, generator=self._random).sign()
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
                assert fingerprint_tensors(live) != before, "the fault changes nothing"
        served, fingerprint = engine.fingerprinter()
        proof = Proof(served, fingerprint(), tuple(engine.score(CANARY)[1]))
        return self._judge.judge("a", Manifest(version, "", fingerprint_tensors(state), tuple(CANARY), tuple(expected)), proof)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_spoilt_mixture_is_refused_at_once_and_a_right_one_is_proven_by_its_weights(engine: EmbeddedEngine, fault) -> None:
    trainer = Trainer(engine)
    for _ in range(2):
        assert trainer.publish().means == BY_WEIGHTS
        verdict = trainer.publish(fault)
        assert verdict.refused and "its weights have fingerprint" in verdict.reason
    assert trainer.publish().means == BY_WEIGHTS


def test_right_engines_are_proven_in_many_publishes(engine: EmbeddedEngine) -> None:
    trainer = Trainer(engine)
    assert {trainer.publish().means for _ in range(40)} == {BY_WEIGHTS}


def test_nothing_is_served_that_was_not_delivered_or_that_is_gone_after_a_sleep(engine: EmbeddedEngine) -> None:
    trainer = Trainer(engine)
    with pytest.raises(RefusedError, match="is not staged"):
        engine.switch(engine.version + 1, "recompute")
    engine.sleep(keep_weights=False)
    with pytest.raises(RefusedError, match="its weights are gone"):
        engine.wake()
    with pytest.raises(EngineError, match="it sleeps"):
        engine.fingerprinter()
    assert trainer.publish().means == BY_WEIGHTS
