"""Reading experts back from layers that keep them in another order; `tests/engines` reads them back from a real vLLM."""

import importlib
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

EXPERTS, WIDTH, INNER, PADDED = 4, 96, 24, 32
Names = tuple[str, str, str]
QWEN: Names = ("gate_proj", "up_proj", "down_proj")
MIXTRAL: Names = ("w1", "w3", "w2")


def pack(weight: Tensor, isa: str) -> Tensor:
    """What stands for vLLM's packing: in blocks of 32 rows by columns, as its portable kernel has it, or by pairs of them."""
    assert isa in ("vec", "pairs"), "vLLM ends the process if it does not know it"
    blocks = weight.view(len(weight), -1, 32, weight.shape[2])
    if isa == "vec":
        return blocks.transpose(2, 3).reshape(weight.shape)
    return blocks.unflatten(3, (-1, 2)).transpose(2, 3).reshape(weight.shape)


@pytest.fixture(autouse=True)
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    package, ops = ModuleType("vllm"), ModuleType("vllm._custom_ops")
    vars(ops)["cpu_prepack_moe_weight"] = pack
    monkeypatch.setitem(sys.modules, "vllm", package)
    monkeypatch.setitem(sys.modules, "vllm._custom_ops", ops)
    importlib.import_module("vllm_experts")._orders.clear()


class RoutedExperts(nn.Module):
    """One worker's experts as vLLM has them: split by their inner numbers, or some of the experts."""

    def __init__(self, names: Names = QWEN, *, isa: str | None, rank: int = 0, ranks: int = 1, own: range = range(EXPERTS)) -> None:
        super().__init__()
        self.ckpt_gate_proj_name, self.ckpt_up_proj_name, self.ckpt_down_proj_name = names
        parallel = SimpleNamespace(tp_rank=rank, tp_size=ranks, dp_size=1, enable_eplb=False)
        self.moe_config = SimpleNamespace(moe_parallel_config=parallel, is_act_and_mul=True)
        kernel = SimpleNamespace(fused_experts=SimpleNamespace(**({} if isa is None else {"isa": isa, "_use_zentorch": False})))
        self.quant_method = SimpleNamespace(moe_kernel=kernel)
        self._isa, self._rank, self._ranks, self._own = isa, rank, ranks, own

    def _map_global_expert_id_to_local_expert_id(self, number: int) -> int:
        if number not in self._own:
            raise ValueError("not here")
        return self._own.index(number)

    def load(self, tensors: dict[str, Tensor]) -> None:
        def share(number: int, name: str, dim: int) -> Tensor:
            own = tensors[f"mlp.experts.{number}.{name}.weight"].chunk(self._ranks, dim)[self._rank]
            return torch.cat([own, own.new_zeros(*((PADDED - INNER, WIDTH) if dim == 0 else (WIDTH, PADDED - INNER)))], dim)

        gate, up, down = self.ckpt_gate_proj_name, self.ckpt_up_proj_name, self.ckpt_down_proj_name
        w13 = torch.stack([torch.cat([share(number, gate, 0), share(number, up, 0)]) for number in self._own])
        w2 = torch.stack([share(number, down, 1) for number in self._own])
        for name, weight in (("w13_weight", w13), ("w2_weight", w2)):
            setattr(self, name, nn.Parameter(weight if self._isa is None else pack(weight, self._isa), requires_grad=False))


def model_of(layer: RoutedExperts) -> nn.Module:
    model = nn.Module()
    model.mlp = nn.Module()
    model.mlp.experts = nn.Module()
    model.mlp.experts.routed_experts = layer
    return model


def weights(dtype: torch.dtype, names: Names = QWEN, *, ranks: int = 1) -> dict[str, Tensor]:
    random, (gate, up, down) = torch.Generator().manual_seed(0), names
    shapes = {gate: (ranks * INNER, WIDTH), up: (ranks * INNER, WIDTH), down: (WIDTH, ranks * INNER)}
    return {
        f"mlp.experts.{number}.{name}.weight": torch.randn(*shape, generator=random).to(dtype)
        for number in range(EXPERTS) for name, shape in shapes.items()}


def told(layer: RoutedExperts, tensors: dict[str, Tensor], live: dict[str, Tensor], path: Path) -> list[str]:
    """What is found to differ, in as many proofs as there are columns, once the layer computes with `live` instead of its tensors."""
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    layer.load(tensors)
    back = importlib.import_module("vllm_readback").ReadBack(model_of(layer), [str(path)])
    assert back.check([str(path)]) == ([], [])
    layer.load(live)
    return sorted({name for _ in range(WIDTH) for name in back.check([str(path)])[0]})


@pytest.mark.parametrize("isa", [None, "vec", "pairs"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("names", [QWEN, MIXTRAL])
def test_each_projection_of_each_expert_is_told_from_all_others(
    tmp_path: Path, isa: str | None, dtype: torch.dtype, names: Names,
) -> None:
    tensors, layer = weights(dtype, names), RoutedExperts(names, isa=isa)
    for name, tensor in tensors.items():
        assert told(layer, tensors, tensors | {name: tensor.roll(1, 0)}, tmp_path / "0.safetensors") == [name]
    one, two = (f"mlp.experts.{number}.{names[1]}.weight" for number in (1, 2))
    assert told(layer, tensors, tensors | {one: tensors[two], two: tensors[one]}, tmp_path / "0.safetensors") == [one, two]


@pytest.mark.parametrize("isa", [None, "vec"])
def test_every_column_of_an_expert_has_its_turn(tmp_path: Path, isa: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module("vllm_readback"), "_NUM_NUMBERS", 1)
    tensors, layer, name = weights(torch.float32), RoutedExperts(isa=isa), "mlp.experts.3.gate_proj.weight"
    for column in (0, 1, 40, WIDTH - 1):
        wrong = tensors[name].clone()
        wrong[5, column] += 1
        assert told(layer, tensors, tensors | {name: wrong}, tmp_path / "0.safetensors") == [name]


@pytest.mark.parametrize("isa", [None, "vec"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_worker_compares_its_share_of_every_expert(tmp_path: Path, isa: str | None, rank: int) -> None:
    tensors, layer = weights(torch.float32, ranks=2), RoutedExperts(isa=isa, rank=rank, ranks=2)
    name, other = "mlp.experts.1.up_proj.weight", "mlp.experts.2.down_proj.weight"
    up, down = tensors[name].clone(), tensors[other].clone()
    up[INNER:] += 1  # the second worker's
    down[:, :INNER] += 1  # the first worker's
    assert told(layer, tensors, tensors | {name: up, other: down}, tmp_path / "0.safetensors") == [[other], [name]][rank]


def test_a_worker_compares_the_experts_that_it_has(tmp_path: Path) -> None:
    tensors, layer = weights(torch.float32), RoutedExperts(isa="vec", own=range(2, 4))
    live = {name: tensor + 1 for name, tensor in tensors.items()}
    assert told(layer, tensors, live, tmp_path / "0.safetensors") == [name for name in sorted(tensors) if int(name.split(".")[2]) in (2, 3)]


def unread(layer: RoutedExperts, tensors: dict[str, Tensor], path: Path) -> list[str]:
    save_file(tensors, path)
    back = importlib.import_module("vllm_readback").ReadBack(model_of(layer), [str(path)])
    wrong, names = back.check([str(path)])
    assert wrong == []
    return sorted(names)


def test_nothing_is_said_of_experts_that_are_spread_or_kept_otherwise(tmp_path: Path) -> None:
    tensors = weights(torch.float32)
    for change in ({"enable_eplb": True}, {"dp_size": 2}):
        layer = RoutedExperts(isa="vec")
        layer.load(tensors)
        vars(layer.moe_config.moe_parallel_config).update(change)
        assert unread(layer, tensors, tmp_path / "0.safetensors") == sorted(tensors)
    layer = RoutedExperts(isa=None)
    layer.load(tensors)
    layer.w13_weight.data = layer.w13_weight.roll(PADDED, 1)  # the up projection above the gates
    assert unread(layer, tensors, tmp_path / "0.safetensors") == sorted(name for name in tensors if "down" not in name)


def test_an_expert_of_another_form_is_not_read(tmp_path: Path) -> None:
    tensors, layer = weights(torch.float32), RoutedExperts(isa="vec")
    layer.load(tensors)
    name = "mlp.experts.0.up_proj.weight"
    assert unread(layer, tensors | {name: torch.zeros(PADDED + 1, WIDTH)}, tmp_path / "0.safetensors") == [name]
