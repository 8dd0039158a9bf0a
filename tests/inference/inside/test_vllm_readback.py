"""Reading weights back from layers that have packed them away; `tests/engines` reads them back from a real vLLM."""

import importlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

WIDTH, VOCAB = 16, 12


class Packed:
    """Computes with a copy that nobody sees, as kernels that pack weights do."""

    def __init__(self) -> None:
        self.hidden: Tensor = torch.zeros(0)

    def apply(self, _layer: nn.Module, x: Tensor) -> Tensor:
        return x @ self.hidden.T


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant_method = Packed()
        self.weight = nn.Parameter(torch.zeros(0))  # packed away

    def load(self, *parts: Tensor) -> None:
        self.weight = nn.Parameter(torch.zeros(0, dtype=parts[0].dtype))
        self.quant_method.hidden = torch.cat(parts)


class VocabParallelEmbedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant_method = Packed()
        self.weight = nn.Parameter(torch.zeros(VOCAB + 4, WIDTH))  # padded


class ParallelLMHead(Linear):
    """The output head, which is tied and packed."""


class Model(nn.Module):
    """As vLLM builds it: q, k and v in one layer, the head apart from the embedding."""

    packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}  # noqa: RUF012 (as vLLM has it)

    def __init__(self) -> None:
        super().__init__()
        self.config = type("Config", (), {"tie_word_embeddings": True})()
        self.embed, self.qkv_proj, self.norm, self.lm_head = VocabParallelEmbedding(), Linear(), nn.LayerNorm(WIDTH), ParallelLMHead()

    def load(self, tensors: dict[str, Tensor], *, stale: str = "") -> None:
        if stale != "qkv_proj":
            self.qkv_proj.load(*(tensors[f"{name}_proj.weight"] for name in "qkv"))
        if stale != "lm_head":
            self.lm_head.load(tensors["embed.weight"])
        if stale != "embed":
            self.embed.weight.data[:VOCAB] = tensors["embed.weight"]
        if stale != "norm":
            self.norm.weight.data = tensors["norm.weight"].clone()


def weights(seed: int, dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"embed.weight": (VOCAB, WIDTH), "q_proj.weight": (8, WIDTH), "k_proj.weight": (4, WIDTH), "v_proj.weight": (4, WIDTH),
              "norm.weight": (WIDTH,), "odd.weight": (3, 3)}
    return {name: torch.randn(*shape, generator=generator).to(dtype) for name, shape in shapes.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("stale", "wrong"), [
    ("", []), ("qkv_proj", ["k_proj.weight", "q_proj.weight", "v_proj.weight"]), ("lm_head", ["lm_head.weight"]),
    ("embed", ["embed.weight"]), ("norm", ["norm.weight"]),
])
def test_what_a_layer_computes_with_is_told_from_what_it_was_given(
    tmp_path: Path, dtype: torch.dtype, stale: str, wrong: list[str],
) -> None:
    readback = importlib.import_module("vllm_readback")
    paths = [str(tmp_path / f"{seed}.safetensors") for seed in range(2)]
    model = Model().to(dtype)
    for seed, path in enumerate(paths):
        save_file(weights(seed, dtype), path)
    model.load(weights(0, dtype))
    back = readback.ReadBack(model, paths[:1])
    model.load(weights(1, dtype), stale=stale)
    found, unread = back.check(paths[1:])
    assert sorted(found) == wrong and unread == ["odd.weight"]


def test_nothing_is_said_where_nobody_knows_what_the_server_was_started_with(tmp_path: Path) -> None:
    readback = importlib.import_module("vllm_readback")
    path = str(tmp_path / "0.safetensors")
    save_file(weights(0, torch.float32), path)
    found, unread = readback.ReadBack(Model(), []).check([path])
    assert found == [] and len(unread) == 7  # the tied head, too
