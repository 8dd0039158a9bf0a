"""Reading weights back from layers that have packed them away; `tests/engines` reads them back from a real vLLM."""

import importlib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from offbeat.model.peft_io import Adapter, write_adapter

WIDTH, VOCAB = 16, 12


class Packed:
    """Computes with a copy that nobody sees, as kernels that pack weights do."""

    def __init__(self) -> None:
        self.hidden: Tensor = torch.zeros(0)

    def apply(self, _layer: nn.Module, x: Tensor) -> Tensor:
        return x @ self.hidden.T


class Linear(nn.Module):
    def __init__(self, *, rank: int = 0, ranks: int = 1) -> None:
        super().__init__()
        self.quant_method = Packed()
        self.weight = nn.Parameter(torch.zeros(0))  # packed away
        self.tp_rank, self.tp_size = rank, ranks

    def load(self, *parts: Tensor) -> None:
        self.weight = nn.Parameter(torch.zeros(0, dtype=parts[0].dtype))
        self.quant_method.hidden = torch.cat(parts)
        self.output_partition_sizes, self.input_size_per_partition = [len(part) for part in parts], parts[0].shape[1]


class VocabParallelEmbedding(nn.Module):
    def __init__(self, *, own: slice = slice(0, VOCAB)) -> None:
        super().__init__()
        self.quant_method = Packed()
        self.weight = nn.Parameter(torch.zeros(VOCAB + 4, WIDTH))  # padded
        self.shard_indices = SimpleNamespace(org_vocab_start_index=own.start, org_vocab_end_index=own.stop)


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


def test_every_column_of_a_matrix_has_its_turn(tmp_path: Path) -> None:
    readback = importlib.import_module("vllm_readback")
    path, tensors, model = str(tmp_path / "0.safetensors"), weights(0, torch.float32), Model()
    save_file(tensors, path)
    model.load(tensors)
    back = readback.ReadBack(model, [path])
    for column in range(WIDTH):
        wrong = tensors["k_proj.weight"].clone()
        wrong[:, column] += 1
        model.load(tensors | {"k_proj.weight": wrong})
        found = [name for _ in range(WIDTH // readback._NUM_COLUMNS + 1) for name in back.check([path])[0]]
        assert "k_proj.weight" in found, column


def test_nothing_is_said_where_nobody_knows_what_the_server_was_started_with(tmp_path: Path) -> None:
    readback = importlib.import_module("vllm_readback")
    path = str(tmp_path / "0.safetensors")
    save_file(weights(0, torch.float32), path)
    found, unread = readback.ReadBack(Model(), []).check([path])
    assert found == [] and len(unread) == 7  # the tied head, too


class SplitModel(nn.Module):
    """One worker's share as vLLM splits a model: q by its rows, k on all workers, o by its columns, the embedding by its tokens."""

    packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj"]}  # noqa: RUF012 (as vLLM has it)

    def __init__(self, rank: int, ranks: int) -> None:
        super().__init__()
        self.rank, self.ranks, self.own = rank, ranks, slice(rank * 8, min((rank + 1) * 8, VOCAB))
        self.embed = VocabParallelEmbedding(own=self.own)
        self.qkv_proj, self.o_proj, self.norm = Linear(rank=rank, ranks=ranks), Linear(rank=rank, ranks=ranks), nn.LayerNorm(WIDTH)

    def load(self, tensors: dict[str, Tensor]) -> None:
        def share(tensor: Tensor, dim: int) -> Tensor:
            return tensor.chunk(self.ranks, dim)[self.rank]

        self.qkv_proj.load(share(tensors["q_proj.weight"], 0), tensors["k_proj.weight"])
        self.o_proj.load(share(tensors["o_proj.weight"], 1))
        self.embed.weight.data[: self.own.stop - self.own.start] = tensors["embed.weight"][self.own]
        self.norm.weight.data = tensors["norm.weight"].clone()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_worker_compares_its_share_of_a_model_that_is_split(tmp_path: Path, rank: int) -> None:
    readback = importlib.import_module("vllm_readback")
    path, model = str(tmp_path / "0.safetensors"), SplitModel(rank, 2)
    random = torch.Generator().manual_seed(3)
    tensors = {name: tensor for name, tensor in weights(0, torch.float32).items() if name not in ("v_proj.weight", "odd.weight")}
    tensors["o_proj.weight"] = torch.randn(WIDTH, WIDTH, generator=random)
    save_file(tensors, path)
    model.load(tensors)
    back = readback.ReadBack(model, [path])
    assert back.check([path]) == ([], [])
    for name, tensor in tensors.items():
        wrong = tensor.clone()
        wrong[..., -1:] += 1  # the last columns are the last worker's, and all rows have them
        model.load(tensors | {name: wrong})
        found = {each for _ in range(WIDTH) for each in back.check([path])[0]}
        assert found == (set() if name == "o_proj.weight" and rank == 0 else {name}), name


def test_a_matrix_that_lies_otherwise_than_its_layer_multiplies_is_not_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    readback = importlib.import_module("vllm_readback")
    path, model, layer = str(tmp_path / "0.safetensors"), nn.Module(), Linear()
    model.c_proj = layer
    layer.load(torch.randn(8, WIDTH))
    save_file({"c_proj.weight": layer.quant_method.hidden.T.contiguous()}, path)
    monkeypatch.setattr(Packed, "apply", lambda *_: pytest.fail("a kernel would corrupt memory"))
    assert readback.ReadBack(model, [path]).check([path]) == ([], ["c_proj.weight"])


class RoundedKernel:
    """Computes with rounded weights that nobody sees."""

    def __init__(self, form: str) -> None:
        self.form = form
        self.hidden: Any = None

    def apply(self, _layer: nn.Module, x: Tensor) -> Tensor:
        return self.hidden.signed_sums(x).T.to(x.dtype)  # kernels, too, add whole numbers exactly


class RoundedLinear(nn.Module):
    """A layer with two parts, as vLLM has them once they are rounded."""

    packed_modules_mapping = {"gate_up": ["gate", "up"]}  # noqa: RUF012 (as vLLM has it)

    def __init__(self, form: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate_up = nn.Module()
        self.gate_up.quant_method, self.gate_up.orig_dtype = RoundedKernel(form), dtype
        self.gate_up.output_partition_sizes, self.gate_up.input_size_per_partition = [8, 8], 64

    def load(self, weight: Tensor, *, fault: str = "") -> None:
        layer, rounded = self.gate_up, importlib.import_module("rounding").round_matrix(self.gate_up.quant_method.form, weight)
        old = layer.quant_method.hidden
        if fault == "scales in another order":
            rounded = replace(rounded, scales=rounded.scales.roll(1, 0))
        if fault == "half old":
            rounded = replace(rounded, numbers=torch.cat([rounded.numbers[:, :32], old.numbers[:, 32:]], 1))
        if fault != "kernel stale":
            layer.quant_method.hidden = rounded
        if fault != "scales stale":
            layer.weight_scale = nn.Parameter(rounded.scales, requires_grad=False)


@pytest.mark.parametrize(("form", "dtype", "lr"), [
    ("int8", torch.float32, 1e-3), ("int8", torch.bfloat16, 1e-2), ("int4", torch.bfloat16, 0.2)])
@pytest.mark.parametrize("fault", ["", "kernel stale", "scales stale", "scales in another order", "half old"])
def test_rounded_weights_are_told_from_those_before_and_from_scales_of_other_rows(
    tmp_path: Path, form: str, dtype: torch.dtype, lr: float, fault: str,
) -> None:
    readback, random = importlib.import_module("vllm_readback"), torch.Generator().manual_seed(1)
    before, paths = torch.randn(16, 64, generator=random), [str(tmp_path / f"{version}.safetensors") for version in range(2)]
    versions = [before.to(dtype), (before + lr * torch.randn(16, 64, generator=random).sign()).to(dtype)]
    for weight, path in zip(versions, paths, strict=True):
        save_file({"gate.weight": weight[:8].clone(), "up.weight": weight[8:].clone()}, path)
    model = RoundedLinear(form, dtype)
    model.load(versions[0])
    back = readback.ReadBack(model, paths[:1])
    assert back.check(paths[:1]) == ([], [])
    model.load(versions[1], fault=fault)
    wrong, unread = back.check(paths[1:])
    assert unread == [] and sorted(wrong) == (["gate.weight", "up.weight"] if fault else [])


@pytest.mark.parametrize("form", ["int8", "int4"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_worker_compares_its_own_share_of_a_rounded_matrix(tmp_path: Path, form: str, rank: int) -> None:
    readback, weight = importlib.import_module("vllm_readback"), torch.randn(16, 128, generator=torch.Generator().manual_seed(2))
    path, model = str(tmp_path / "0.safetensors"), RoundedLinear(form, torch.float32)
    save_file({"gate.weight": weight[:8].clone(), "up.weight": weight[8:].clone()}, path)
    model.gate_up.tp_rank, model.gate_up.tp_size = rank, 2
    share = weight[:, 64 * rank : 64 * rank + 64]
    model.load(share)  # with scales of its own
    back = readback.ReadBack(model, [path])
    assert back.check([path]) == ([], [])
    model.load(share.roll(1, 0))
    assert back.check([path]) == (["gate.weight", "up.weight"], [])


RANK, MOST = 2, 4


class Adapted(nn.Module):
    """As vLLM builds it: A and B of each part, by slot, with room for a larger rank."""

    def __init__(self, *outputs: int) -> None:
        super().__init__()
        self.lora_a_stacked = tuple(torch.zeros(3, 1, MOST, WIDTH) for _ in outputs)
        self.lora_b_stacked = tuple(torch.zeros(3, 1, size, MOST) for size in outputs)

    def load(self, slot: int, part: int, a: Tensor, b: Tensor) -> None:
        self.lora_a_stacked[part][slot, 0, : len(a)] = a
        self.lora_b_stacked[part][slot, 0, : len(b), : b.shape[1]] = b


class Head(nn.Module):
    """Adapted, but not in parts."""

    lora_a_stacked, lora_b_stacked = torch.zeros(3, 1, MOST, WIDTH), torch.zeros(3, 1, VOCAB, MOST)


def manager(adapter: Adapter, *, number: int, slot: int) -> SimpleNamespace:
    """With one adapter in one slot."""
    qkv, out = Adapted(8, 4, 4), Adapted(WIDTH)
    for name, (a, b) in adapter.pairs.items():
        layer, part = (out, 0) if name == "model.o_proj" else (qkv, "qkv".index(name[6]))
        layer.load(slot, part, a, b * adapter.scaling)
    ids: list[int | None] = [None] * 3
    ids[slot] = number
    return SimpleNamespace(
        lora_index_to_id=ids, packed_modules_mapping={"qkv_proj": ["q_proj", "k_proj", "v_proj"]},
        modules={"model.qkv_proj": qkv, "model.o_proj": out, "logits_processor": Head()})


def adapter(seed: int, *names: str) -> Adapter:
    random, outputs = torch.Generator().manual_seed(seed), {"q": 8, "k": 4, "v": 4, "o": WIDTH}
    return Adapter(RANK, 1.5, {
        f"model.{name}_proj": (torch.randn(RANK, WIDTH, generator=random), torch.randn(outputs[name], RANK, generator=random))
        for name in names})


def test_an_adapter_is_compared_with_its_folder_tensor_by_tensor(tmp_path: Path) -> None:
    check = importlib.import_module("vllm_readback").check_adapter
    wanted, folder = adapter(1, "q", "v", "o"), str(tmp_path / "alice")
    write_adapter(wanted, Path(folder), base_model="base")
    assert check(manager(wanted, number=7, slot=1), 7, folder) == ([], [])
    assert len(check(manager(adapter(2, "q", "v", "o"), number=7, slot=1), 7, folder)[0]) == 6
    a, b = wanted.pairs["model.v_proj"]
    one = Adapter(RANK, 1.5, {**wanted.pairs, "model.v_proj": (a, b + 1e-6)})
    assert check(manager(one, number=7, slot=1), 7, folder) == (["base_model.model.model.v_proj.lora_B.weight"], [])
    more = Adapter(RANK, 1.5, {**wanted.pairs, **adapter(3, "k").pairs})
    assert check(manager(more, number=7, slot=1), 7, folder) == (["model.qkv_proj"], [])


def test_nothing_is_said_of_an_adapter_that_made_room_or_lies_otherwise_than_it_came(tmp_path: Path) -> None:
    check = importlib.import_module("vllm_readback").check_adapter
    wanted, folder = adapter(1, "q", "o"), str(tmp_path / "alice")
    write_adapter(wanted, Path(folder), base_model="base")
    wrong, unread = check(manager(wanted, number=7, slot=1), 8, folder)
    assert not wrong and len(unread) == 4
    shared = manager(adapter(2, "q", "o"), number=7, slot=0)
    for layer in shared.modules.values():
        layer.tp_size, layer.lora_config = 2, SimpleNamespace(fully_sharded_loras=True)
    wrong, unread = check(shared, 7, folder)
    assert not wrong and len(unread) == 4


@pytest.mark.parametrize("rank", [0, 1])
def test_a_worker_compares_its_share_of_an_adapter(tmp_path: Path, rank: int) -> None:
    check = importlib.import_module("vllm_readback").check_adapter
    wanted, folder = adapter(1, "q", "k", "v", "o"), str(tmp_path / "alice")
    write_adapter(wanted, Path(folder), base_model="base")

    def worker(own: Adapter) -> SimpleNamespace:
        """Half of q, all of k and v, of which there are not enough to share, and the columns of o's A."""
        qkv, out = Adapted(4, 4, 4), Adapted(WIDTH)
        out.lora_a_stacked = (torch.zeros(3, 1, MOST, WIDTH // 2),)
        bases = SimpleNamespace(output_partition_sizes=[4, 4, 4], input_size_per_partition=WIDTH), SimpleNamespace(
            output_partition_sizes=[WIDTH], input_size_per_partition=WIDTH // 2)
        for layer, base in zip((qkv, out), bases, strict=True):
            layer.base_layer, layer.tp_size, base.tp_rank, base.tp_size = base, 2, rank, 2
        for name, (a, b) in own.pairs.items():
            b = b * own.scaling
            if name == "model.o_proj":
                out.load(0, 0, a.chunk(2, 1)[rank], b)
            else:
                qkv.load(0, "qkv".index(name[6]), a, b.chunk(2)[rank] if name == "model.q_proj" else b)
        return SimpleNamespace(
            lora_index_to_id=[7, None, None], packed_modules_mapping={"qkv_proj": ["q_proj", "k_proj", "v_proj"]},
            modules={"model.qkv_proj": qkv, "model.o_proj": out})

    assert check(worker(wanted), 7, folder) == ([], [])
    for name, (a, b) in wanted.pairs.items():
        last = Adapter(RANK, 1.5, {**wanted.pairs, name: (a + (torch.arange(WIDTH) >= WIDTH // 2), b)})
        expected = [f"base_model.model.{name}.lora_A.weight"]
        assert check(worker(last), 7, folder) == ([] if name == "model.o_proj" and rank == 0 else expected, []), name
        last = Adapter(RANK, 1.5, {**wanted.pairs, name: (a, b + (torch.arange(len(b)) >= len(b) // 2)[:, None])})
        expected = [f"base_model.model.{name}.lora_B.weight"]
        assert check(worker(last), 7, folder) == ([] if name == "model.q_proj" and rank == 0 else expected, []), name
