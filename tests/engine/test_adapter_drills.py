"""Adapters, int8 matrices and forward passes that are not what was published: each refused at its first proof, right ones never.

Each version is one step of sign descent at a learning rate of 1e-6, which in bfloat16 no canary can tell from the version before.
"""

from collections.abc import Callable

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

from offbeat.data.tokenizer import character_tokenizer
from offbeat.engine.adapters import HeldAdapter
from offbeat.engine.engine import EmbeddedEngine
from offbeat.engine.forward import fingerprint_tensors
from offbeat.engine.int8 import Int8Weight, find_kernel
from offbeat.engine.loader import load_engine
from offbeat.engine.options import EngineOptions
from offbeat.errors import EngineError, RefusedError
from offbeat.model.peft_io import Adapter, write_adapter
from offbeat.weights.proof import BY_WEIGHTS, ProofJudge, Verdict
from offbeat.weights.protocol import Manifest, Proof
from router_noise import plant_noise

LR = 1e-6
CANARY = [5, 9, 20, 3, 8, 8, 11, 7, 30, 12, 3, 17, 6, 33, 41, 2]
SIZES = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 24,
         "max_position_embeddings": 64, "tie_word_embeddings": True, "bos_token_id": None}
MOE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
DTYPES = ["float32", "bfloat16"]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory) -> Callable[[str], str]:
    """Models with strong weights, so that every token depends on its context."""
    folders: dict[str, str] = {}

    def folder(kind: str) -> str:
        if kind not in folders:
            path, tokenizer = tmp_path_factory.mktemp(kind), character_tokenizer()
            tokenizer.save(path)
            special = {"vocab_size": tokenizer.vocab_size, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
            config = Qwen3MoeConfig(**SIZES, **MOE, **special) if kind == "moe" else Qwen3Config(intermediate_size=64, **SIZES, **special)
            with torch.random.fork_rng():
                torch.manual_seed(3)
                model = AutoModelForCausalLM.from_config(config)
                for name, parameter in model.named_parameters():
                    parameter.data.normal_(1.0 if "norm" in name else 0.0, 0.25)
            model.save_pretrained(path)
            folders[kind] = str(path)
        return folders[kind]

    return folder


def stepped(tensor: torch.Tensor, random: torch.Generator) -> torch.Tensor:
    """One step of sign descent."""
    return tensor + LR * torch.randn(tensor.shape, generator=random).sign()


# -- adapters ----------------------------------------------------------------------------------------------------------------------------


def serve_older(engine: EmbeddedEngine, name: str, older: Adapter) -> None:
    """Another adapter under the right name: the version before, whose numbers differ by one step."""
    engine.adapters._held[name] = HeldAdapter("elsewhere", older)


def swap_experts(engine: EmbeddedEngine, name: str, _older: Adapter) -> None:
    """Two experts' parts of the adapter in each other's place."""
    engine.adapters.place([name])
    one, other = (engine.adapters._stack.weights(f"model.layers.1.mlp.experts.down_proj.{expert}") for expert in (1, 2))
    assert one is not None and other is not None, "both are adapted"
    kept = one.b.clone()
    one.b.copy_(other.b)
    other.b.copy_(kept)


def keep_half(engine: EmbeddedEngine, name: str, older: Adapter) -> None:
    """B of one matrix as before."""
    engine.adapters.place([name])
    weights, module = engine.adapters._stack.weights("model.layers.0.self_attn.q_proj"), "model.layers.0.self_attn.q_proj"
    assert weights is not None, "it is adapted"
    slot = engine.adapters._stack.adapters.index(engine.adapters._held[name].adapter)
    up = older.pairs[module][1]
    weights.b[slot, :, : older.rank] = up.view(weights.b.shape[1], -1, older.rank).transpose(1, 2)


class Tenant:
    """What publishes an adapter of all layers, experts included, to an engine: versions that are a step apart."""

    def __init__(self, engine: EmbeddedEngine) -> None:
        self._engine, self._judge, self._random = engine, ProofJudge.of(0.0, "bfloat16"), torch.Generator().manual_seed(2)
        self._version = 0
        self._adapter = Adapter(2, 1.0, {
            name: (self._draw(2, linear.inputs), self._draw(linear.outputs, 2)) for name, linear in engine.adapters._linears.items()})

    def _draw(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._random) * 0.1

    def publish(self, fault: Callable[[EmbeddedEngine, str, Adapter], None] | None = None) -> Verdict:
        """Publish a version, let the engine go wrong, and judge its proof."""
        engine, older = self._engine, self._adapter
        self._version += 1
        self._adapter = Adapter(2, 1.0, {
            name: (stepped(a, self._random), stepped(b, self._random)) for name, (a, b) in older.pairs.items()})
        name = f"alice@{self._version}"
        engine.adapters.unload(f"alice@{self._version - 1}")
        engine.adapters.add(name, name, self._adapter)
        expected = engine.score(CANARY, adapter=name)[1]
        if fault is not None:
            with torch.inference_mode():
                fault(engine, name, older)
        found = engine.score(CANARY, adapter=name)[1]
        proof = Proof(self._version, engine.live_adapter(name)[1].fingerprint(), tuple(found))
        wanted = Manifest(self._version, name, self._adapter.fingerprint(), tuple(CANARY), tuple(expected), adapter="alice")
        return self._judge.judge("a", wanted, proof)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fault", [serve_older, swap_experts, keep_half])
def test_an_adapter_of_other_numbers_is_refused_at_once_and_a_right_one_is_proven(folder_of, dtype: str, fault) -> None:
    tenant = Tenant(load_engine(EngineOptions(model=folder_of("moe"), dtype=dtype)))
    assert {tenant.publish().means for _ in range(20)} == {BY_WEIGHTS}
    verdict = tenant.publish(fault)
    assert verdict.refused and "its weights have fingerprint" in verdict.reason
    assert tenant.publish().means == BY_WEIGHTS


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["moe", "dense"])
def test_an_adapter_that_binds_to_no_module_gives_no_proof(folder_of, dtype: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = load_engine(EngineOptions(model=folder_of(kind), dtype=dtype))
    tenant = Tenant(engine)
    assert tenant.publish().means == BY_WEIGHTS
    forward = engine._forward
    run = forward._run_prompts if kind == "dense" else forward._run  # pyright: ignore

    def without(*args: object, **kwargs: object) -> object:
        return run(*args[:-1], None) if kind == "dense" else run(*args, **{**kwargs, "lora": None})

    with monkeypatch.context() as patch:
        patch.setattr(forward, "_run_prompts" if kind == "dense" else "_run", without)
        with pytest.raises(EngineError, match="adapter alice@2 took part in none of the model's layers"):
            tenant.publish()
        assert engine.score(CANARY)[1], "the base model scores as before"
    assert tenant.publish().means == BY_WEIGHTS


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_adapter_of_names_that_the_model_does_not_have_is_refused_when_it_is_read(folder_of, dtype: str, tmp_path) -> None:
    engine = load_engine(EngineOptions(model=folder_of("moe"), dtype=dtype))
    folder = tmp_path / "foreign"
    write_adapter(Adapter(2, 1.0, {"transformer.h.0.attn.c_attn": (torch.ones(2, 48), torch.ones(48, 2))}), folder, base_model="m")
    with pytest.raises(RefusedError, match=r"adapts 'transformer\.h\.0\.attn\.c_attn', which is not a linear layer of this model"):
        engine.adapters.read(str(folder))


# -- whole weights -----------------------------------------------------------------------------------------------------------------------


class Trainer:
    """What publishes whole weights to an engine, from float32 numbers that lie anywhere between two of its format."""

    def __init__(self, folder: str, engine: EmbeddedEngine, dtype: str, *, forms: tuple[str, ...]) -> None:
        self._engine, self._judge, self._random = engine, ProofJudge.of(0.0, *forms), torch.Generator().manual_seed(7)
        self._dtype = getattr(torch, dtype)
        model = load_engine(EngineOptions(model=folder))
        self._state = {
            name: tensor + tensor.abs() * 2**-9 * (2 * torch.rand(tensor.shape, generator=self._random) - 1)
            for name, tensor in model._forward.tensors().items()}

    def publish(self, fault: Callable[[EmbeddedEngine], None] | None = None) -> Verdict:
        """Publish a version, let the engine go wrong, and judge its proof."""
        self._state = {name: stepped(tensor, self._random) for name, tensor in self._state.items()}
        state = {name: tensor.to(self._dtype) for name, tensor in self._state.items()}
        engine, version = self._engine, self._engine.version + 1
        engine.stage(version, (f"v{version}", ""), engine._forward.prepare(state))  # pyright: ignore
        engine.switch(version, "recompute")
        expected = engine.score(CANARY)[1]
        if fault is not None:
            fault(engine)
        served, fingerprint = engine.fingerprinter()
        proof = Proof(served, fingerprint(), tuple(engine.score(CANARY)[1]))
        return self._judge.judge("a", Manifest(version, "", fingerprint_tensors(state), tuple(CANARY), tuple(expected)), proof)


def spoil_scale(engine: EmbeddedEngine) -> None:
    """One scale of a quantised matrix is off by a thousandth after it was quantised again."""
    matrix, kernel = engine._forward.installed().layers[1].down, find_kernel()  # pyright: ignore
    read = matrix._read()
    scales = read.scales.clone()
    scales[3] *= 1.001
    matrix._packed = kernel.pack(Int8Weight(read.ints, scales))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_wrong_scale_after_weights_were_quantised_again_is_refused_at_once(folder_of, dtype: str) -> None:
    engine = load_engine(EngineOptions(model=folder_of("dense"), dtype=dtype, quantization="int8"))
    trainer = Trainer(folder_of("dense"), engine, dtype, forms=(dtype, "int8"))
    assert {trainer.publish().means for _ in range(20)} == {BY_WEIGHTS}
    verdict = trainer.publish(spoil_scale)
    assert verdict.refused and "its weights have fingerprint" in verdict.reason
    assert trainer.publish().means == BY_WEIGHTS


def shift_experts(engine: EmbeddedEngine) -> None:
    """Tokens go to other experts, as after an upgrade that reads the router's answer in another order."""
    plant_noise(engine, share=1.0)


def turn_otherwise(engine: EmbeddedEngine) -> None:
    """Positions turn queries and keys by other angles."""
    rotary = engine._forward._model.model.rotary_emb  # pyright: ignore
    rotary.inv_freq = rotary.inv_freq * 2


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fault", [shift_experts, turn_otherwise])
def test_an_engine_that_computes_gibberish_with_right_weights_is_refused(folder_of, dtype: str, fault) -> None:
    engine = load_engine(EngineOptions(model=folder_of("moe"), dtype=dtype))
    trainer = Trainer(folder_of("moe"), engine, dtype, forms=(dtype,))
    assert trainer.publish().means == BY_WEIGHTS
    verdict = trainer.publish(fault)
    assert verdict.refused and "its canary log-probabilities are off by" in verdict.reason
