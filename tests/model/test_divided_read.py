"""What ranks read in parts is to the bit what they keep of a model that each has read whole, in every mesh that divides it."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.core_model_loading import Chunk, Concatenate, MergeModulelist, Transpose, WeightConverter

from offbeat.model import divided_read
from offbeat.model.divided_read import WholeOnlyError
from offbeat.trainer.model_trainer import ModelTrainer
from offbeat.trainer.reward_trainer import RewardTrainer
from offbeat.trainer.strategies import choose, load
from offbeat.trainer.value_trainer import ValueTrainer
from ranks import run_ranks
from train_samples import TINY, VOCAB, arranged, configure

SIZES = {
    "vocab_size": VOCAB, "hidden_size": TINY.hidden_size, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "intermediate_size": 50, "max_position_embeddings": 64, "pad_token_id": 0}
FAMILIES = {
    "qwen3": {"tie_word_embeddings": True},
    "llama": {"attention_bias": True, "tie_word_embeddings": False},
    "gemma2": {"sliding_window": 6},  # tied, with a buffer, and read from bfloat16
    "qwen3_moe": {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
}
HEAD, EMBEDDINGS = "lm_head.weight", "model.embed_tokens.weight"

CASES = {
    2: [
        ("tp2", "qwen3", ModelTrainer), ("tp2", "qwen3", ValueTrainer), ("tp2", "llama", ModelTrainer), ("tp2", "llama", RewardTrainer),
        ("tp2", "gemma2", ModelTrainer), ("tp2 ep2", "qwen3_moe", ModelTrainer), ("tp2", "untied", ModelTrainer),
        ("tp2", "head", ModelTrainer), ("tp2", "head", ValueTrainer), ("fsdp", "qwen3", ValueTrainer), ("fsdp", "llama", RewardTrainer),
        ("fsdp", "gemma2", ModelTrainer), ("fsdp", "untied", ModelTrainer), ("ep2", "qwen3_moe", ModelTrainer),
        ("shard2 ep2", "qwen3_moe", ValueTrainer)],
    4: [
        ("tp2", "qwen3", ModelTrainer), ("shard2 tp2", "qwen3", ModelTrainer), ("shard2 tp2", "llama", ValueTrainer),
        ("cp2 tp2", "llama", ModelTrainer), ("shard2 tp2 ep2", "qwen3_moe", ModelTrainer), ("fsdp", "qwen3_moe", ModelTrainer),
        ("ep2", "qwen3_moe", ModelTrainer), ("shard4 ep2", "qwen3_moe", ModelTrainer)],
}
"""By number of ranks: a mesh, a family, and what is trained."""

READ_WHOLE = [
    ("fsdp", "qwen3_moe", 4),  # six experts over four ranks leave one without
    ("fsdp", "untied", 2), ("tp2", "untied", 2)]  # FSDP2 and the plan of the layers took head and embeddings for one


def build(folder):
    """A random model of each family, each in a folder of its name; and two whose checkpoints hold other weights than config.json says."""
    for family, settings in FAMILIES.items():
        with torch.random.fork_rng():
            torch.manual_seed(1)
            model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**SIZES | settings))
            model.to(torch.bfloat16 if family == "gemma2" else torch.float32).save_pretrained(folder / family)
    rewrite(folder / "llama", folder / "untied", tied=True, change=lambda state: state)
    rewrite(folder / "qwen3", folder / "head", tied=True, change=lambda state: {
        HEAD if name == EMBEDDINGS else name: tensor for name, tensor in state.items()})
    return str(folder)


def rewrite(source, folder, *, tied, change):
    folder.mkdir()
    config = json.loads((source / "config.json").read_text()) | {"tie_word_embeddings": tied}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(change(load_file(source / "model.safetensors")), folder / "model.safetensors", metadata={"format": "pt"})


def state_of(model):
    """By name: the parts that this rank holds, how they are cut, and what shares its weights with others; buffers, too."""
    parameters, found = dict(model.named_parameters(remove_duplicate=False)), {}
    for name, tensor in {**parameters, **dict(model.named_buffers())}.items():
        here, cut = (tensor.to_local(), (tensor.placements, tensor.shape)) if isinstance(tensor, DTensor) else (tensor, None)
        others = [other for other, each in parameters.items() if each is tensor]
        found[name] = (cut, here.dtype, here.device, tensor.requires_grad, others, here.detach().clone())
    return found


def load_both(groups, folder, kind):
    """What a rank has of a model that it has read in parts, and of one that it has read whole; and how often it has read which way."""
    config, reads = configure(folder, precision="bf16_mixed" if groups.world == 4 else "float32"), []

    def read(divide):
        reads.append("whole" if divide is None else "parts")
        return kind._load_model(folder, config, divide)

    model, _ = load(read, groups=groups, precision=config.train.computes_in)
    other = kind._load_model(folder, config, None)
    choose(other, groups=groups, precision=config.train.computes_in)
    assert model.all_tied_weights_keys == other.all_tied_weights_keys
    assert model._keys_to_ignore_on_load_unexpected == other._keys_to_ignore_on_load_unexpected
    assert vars(model.config).keys() == vars(other.config).keys()
    return state_of(model), state_of(other), reads


def _load_all(groups, folder):
    for mesh, family, kind in CASES[groups.world]:
        case = f"{mesh}, {family}, {kind.__name__}"
        parts, whole, reads = load_both(arranged(groups, mesh), str(Path(folder) / family), kind)
        is_whole = (kind is ModelTrainer and (mesh, family, groups.world) in READ_WHOLE) or (family, kind) == ("head", ValueTrainer)
        assert reads == (["parts", "whole"] if is_whole else ["parts"]), case
        assert parts.keys() == whole.keys(), case
        for name, (*form, values) in whole.items():
            assert parts[name][:-1] == tuple(form), (case, name)
            assert torch.equal(parts[name][-1], values), (case, name)


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.drill)])
def test_parts_that_are_read_are_parts_of_the_whole(tmp_path, world):
    run_ranks(_load_all, world=world, argument=build(tmp_path))


def part(shape, sizes, placements):
    """As much of a DTensor as is looked at."""
    return SimpleNamespace(shape=shape, ndim=len(shape), placements=placements, device_mesh=SimpleNamespace(size=lambda axis: sizes[axis]))


@pytest.fixture
def checked(monkeypatch):
    """Checks a model of one parameter, "experts.up", for what it is converted with."""
    monkeypatch.setattr(divided_read, "DTensor", SimpleNamespace)

    def check(cut, *operations, target="experts.up"):
        model = SimpleNamespace(named_parameters=lambda: [("experts.up", cut)])
        converters = [WeightConverter("experts.*.up", target, operations=list(operations))] if operations else []
        divided_read._check_readable(model, converters)

    return check


def test_experts_that_are_stacked_are_read_in_parts_unless_their_features_are_cut(checked):
    checked(part((6, 10, 4), [2], [Shard(0)]), MergeModulelist(dim=0), Concatenate(dim=1))
    checked(part((6, 10, 4), [2], [Shard(2)]), MergeModulelist(dim=0), Concatenate(dim=1))
    with pytest.raises(WholeOnlyError, match="has 'experts.up' converted by Concatenate while it is read"):
        checked(part((6, 10, 4), [2], [Shard(1)]), MergeModulelist(dim=0), Concatenate(dim=1))


@pytest.mark.parametrize("operation", [Chunk(dim=0), Transpose(0, 1)])
def test_weights_that_are_rearranged_are_read_whole(checked, operation):
    with pytest.raises(WholeOnlyError, match=f"has 'experts.up' converted by {type(operation).__name__} while it is read"):
        checked(part((6, 10), [2], [Shard(0)]), operation)
    checked(part((6, 10), [2], [Shard(0)]), operation, target="others")


def test_a_rank_that_has_nothing_of_experts_or_of_a_slice_reads_whole(checked):
    checked(part((3,), [4], [Shard(0)]))
    checked(part((7, 4), [2, 2], [_StridedShard(0, split_factor=2), Shard(0)]))
    checked(part((3, 4), [2, 2], [Replicate(), Shard(0)]))
    with pytest.raises(WholeOnlyError, match="has 'experts.up' of 3 rows, fewer than there are ranks to divide them"):
        checked(part((3, 4), [4], [Shard(0)]), MergeModulelist(dim=0))
    with pytest.raises(WholeOnlyError, match="has 'experts.up' of 5 rows"):
        checked(part((5, 4), [3, 2], [_StridedShard(0, split_factor=2), Shard(0)]))
