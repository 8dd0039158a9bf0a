"""Small models with strong weights, so that every token depends on its context, and their references from Hugging Face's own modules."""

import copy
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, MistralConfig, PreTrainedConfig, Qwen2Config, Qwen3Config

from engine_http import serving
from offbeat.data.tokenizer import character_tokenizer
from offbeat.engine.engine import EmbeddedEngine
from offbeat.engine.loader import load_engine
from offbeat.engine.options import EngineOptions
from offbeat.engine.request import Output, SamplingParams
from offbeat.model.load import load_causal_lm
from offbeat.model.peft_io import Adapter, read_adapter, write_adapter

SIZES = {
    "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 80,
    "max_position_embeddings": 160,
}  # fmt: skip
GPT2_SIZES = {"n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 160}
SLIDING = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 40,
}  # fmt: skip
KINDS: dict[str, tuple[type[PreTrainedConfig], dict]] = {
    "qwen3": (Qwen3Config, {**SIZES, "tie_word_embeddings": True}),
    "qwen3-untied": (Qwen3Config, {**SIZES, "tie_word_embeddings": False}),
    "qwen2": (Qwen2Config, {**SIZES, "tie_word_embeddings": True}),
    "llama": (LlamaConfig, {**SIZES, "tie_word_embeddings": False}),
    "mistral": (MistralConfig, {**SIZES, "sliding_window": None}),
    "llama-scaled-rope": (LlamaConfig, {**SIZES, "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}),
    "llama3-rope": (LlamaConfig, {**SIZES, "rope_parameters": LLAMA3_ROPE}),
    "yarn": (Qwen3Config, {**SIZES, "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0,
                                                       "original_max_position_embeddings": 40}}),
    "qwen2-sliding": (Qwen2Config, {**SIZES, **SLIDING}),
    "gpt2": (GPT2Config, GPT2_SIZES),
    "gpt2-untied": (GPT2Config, {**GPT2_SIZES, "tie_word_embeddings": False}),
}


def build(folder: Path, kind: str, *, seed: int) -> str:
    """Write a model and its tokenizer."""
    tokenizer = character_tokenizer()
    tokenizer.save(folder)
    config_class, sizes = KINDS[kind]
    special = {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": None, "pad_token_id": tokenizer.pad_token_id}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config_class(vocab_size=tokenizer.vocab_size, **special, **sizes))
        for name, parameter in model.named_parameters():
            parameter.data.normal_(1.0 if "norm" in name and "bias" not in name else 0.0, 0.25)
    model.save_pretrained(folder)
    return str(folder)


def params(count: int, **settings) -> SamplingParams:
    return SamplingParams(max_new_tokens=count, ignore_eos=True, **settings)


def is_right(output: Output, prompt: list[int], model: "Reference") -> bool:
    """Whether an output's log-probabilities are those of a reference."""
    expected = model.logprobs(prompt + output.token_ids)[len(prompt) - 1 :]
    return torch.allclose(torch.tensor(output.logprobs), expected, atol=1e-4)


@pytest.fixture(params=["direct", "hf"])
def make_engine(request, model_folder):
    """kind, options -> engine, by each way of computing."""
    def make(kind: str = "qwen3", **options) -> EmbeddedEngine:
        return load_engine(EngineOptions(model=model_folder(kind), forward=request.param, **options))

    return make


@pytest.fixture
def slow_down():
    """Makes decode steps of an engine long enough for a test to act between them; gives the event by which it lets them go."""
    let_go = threading.Event()

    def slow(engine) -> threading.Event:
        decode = engine._forward.decode

        def slowly(*step, **options):
            let_go.wait(0.05)
            return decode(*step, **options)

        engine._forward.decode = slowly
        return let_go

    yield slow
    let_go.set()


@dataclass(frozen=True)
class Reference:
    """A model run by Hugging Face's modules, one sequence at a time without a cache."""

    folder: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "model", load_causal_lm(self.folder, attention="sdpa"))

    def merged(self, folder: str) -> "Reference":
        """The same model with an adapter's products added to its weights."""
        other = copy.deepcopy(self)
        for name, (a, b) in (adapter := read_adapter(folder)).pairs.items():
            other.model.get_submodule(name).weight.data += adapter.scaling * (b @ a)
        return other

    @torch.inference_mode()
    def logits(self, tokens: list[int]) -> torch.Tensor:
        """[L, V]."""
        return self.model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].float()

    def logprobs(self, tokens: list[int]) -> torch.Tensor:
        """[L - 1], of each token after the first."""
        logits = self.logits(tokens)[:-1].log_softmax(-1)
        return logits.gather(1, torch.tensor(tokens[1:])[:, None]).squeeze(1)


ALL_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def random_adapter(model: torch.nn.Module, *, seed: int, rank: int = 4, targets: tuple[str, ...] = ALL_TARGETS) -> Adapter:
    """An adapter that changes every logit; its scaling is 1.5."""
    generator = torch.Generator().manual_seed(seed)
    linears = {n: m for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and n.rpartition(".")[2] in targets}

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.15

    return Adapter(rank, 1.5, {n: (normal(rank, m.in_features), normal(m.out_features, rank)) for n, m in linears.items()})


@pytest.fixture(scope="session")
def adapter_folder(reference, tmp_path_factory):
    """kind, seed, rank, targets -> PEFT folder, written once."""
    written: dict[tuple, str] = {}

    def get(kind: str, seed: int, **shape) -> str:
        key = (kind, seed, *sorted(shape.items()))
        if key not in written:
            folder = tmp_path_factory.mktemp("adapter") / f"{kind}-{seed}"
            write_adapter(random_adapter(reference(kind).model, seed=seed, **shape), folder, base_model=kind)
            written[key] = str(folder)
        return written[key]

    return get


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    """kind, seed -> folder, built once."""
    built: dict[tuple[str, int], str] = {}

    def get(kind: str, seed: int = 0) -> str:
        if (kind, seed) not in built:
            built[kind, seed] = build(tmp_path_factory.mktemp(kind), kind, seed=seed)
        return built[kind, seed]

    return get


@pytest.fixture(scope="session")
def reference(model_folder):
    """kind, seed -> Reference, loaded once."""
    loaded: dict[tuple[str, int], Reference] = {}

    def get(kind: str, seed: int = 0) -> Reference:
        if (kind, seed) not in loaded:
            loaded[kind, seed] = Reference(model_folder(kind, seed))
        return loaded[kind, seed]

    return get


@pytest.fixture(scope="module")
def url(model_folder):
    """A server that the tests which change nothing share."""
    with serving(model_folder("qwen3")) as (_, url):
        yield url


@pytest.fixture(params=["direct", "hf"])
def fresh(request, model_folder):
    with serving(model_folder("qwen3"), forward=request.param, max_running=4, max_queued=2) as (server, url):
        yield server, url
