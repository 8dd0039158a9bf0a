"""A version that several ranks write: the same content as from one rank, in equal shares, complete or not there at all."""

import json
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from named_bytes import named_bytes
from offbeat.config.model import TinyConfig
from offbeat.config.train import OptimizerConfig
from offbeat.config.weights import WeightsConfig
from offbeat.errors import StorageError
from offbeat.model.changes_io import read_weights
from offbeat.model.fingerprint import fingerprint
from offbeat.model.load import load_causal_lm
from offbeat.model.tiny import build_tiny
from offbeat.sync import shard_exchange
from offbeat.trainer import parts
from offbeat.trainer.memory import LiveBytes
from offbeat.trainer.messages import BroadcastRequest, WriteRequest
from offbeat.trainer.model_trainer import ModelTrainer
from offbeat.trainer.state import full_state
from ranks import run_ranks
from train_samples import VOCAB, arranged, configure, make_batch, train

WORLD, MESH, CANARY = 4, "shard2 tp2", (5, 6, 7, 8)
SMALL_STEP = OptimizerConfig(lr=3e-6, warmup_steps=0, schedule="constant")
TINY = TinyConfig(hidden_size=64, num_layers=6, num_heads=4, num_kv_heads=2, head_dim=16, intermediate_size=96, max_positions=64)
BUCKET = 1 << 14


def ask(trainer, folder, base="", broadcast=None):
    """Have a trainer write a version: the other ranks do not know what, as in SPMD mode."""
    told = (str(folder), base, broadcast) if trainer.groups.rank == 0 else (".", "", None)
    return trainer.write_weights(WriteRequest(told[0], "bfloat16", CANARY, base=told[1], broadcast=told[2]))


class OwnBytes(LiveBytes):
    """What this rank holds; a tensor in shards looks as large as the whole one."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)


@contextmanager
def counted(model):
    """Bytes that this rank sends and receives by dealing, and most that live in tensors made meanwhile."""
    seen, original = {"sent": 0, "received": 0}, shard_exchange.dist.all_to_all_single

    def counting(got, given, **kwargs):
        seen["sent"] += len(given)
        seen["received"] += len(got)
        return original(got, given, **kwargs)

    shard_exchange.dist.all_to_all_single = counting
    live = OwnBytes()
    for parameter in model.parameters():
        live.ignore(parameter.detach().to_local())
    try:
        with live:
            yield seen
    finally:
        shard_exchange.dist.all_to_all_single = original
    seen["peak"] = live.peak


def same(found, wanted):
    return found.keys() == wanted.keys() and all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


def files(folder):
    return sorted(path.name for path in Path(folder).glob("*.safetensors"))


def _write(groups, root):
    """Everything that is to be known of versions of one trainer, on rank 0; and what each rank moved and held."""
    shard_exchange.BUCKET_BYTES, shard_exchange._LEAST_BYTES = BUCKET, 1 << 10
    root, there = Path(root), arranged(groups, MESH)
    config = configure(root / "model").model_copy(update={"weights": WeightsConfig(whole_every_versions=8)})
    trainer = ModelTrainer.build(str(root / "model"), config=config.for_ranks, groups=there)
    train(trainer, [make_batch(2, 4)])
    whole = [full_state(trainer.model, dtype="bfloat16", keep=True)]
    first = ask(trainer, root / "v1")
    with counted(trainer.model) as seen:
        trainer._parts.write(WriteRequest(str(root / "counted"), "bfloat16", CANARY))
    found = [(first, whole[-1])]
    ask(trainer, root / "v1")
    for number in (2, 3):
        train(trainer, [make_batch(2, 4, seed=number)], optimizer=SMALL_STEP)
        whole.append(full_state(trainer.model, dtype="bfloat16", keep=True))
        found.append((ask(trainer, root / f"v{number}", base=str(root / f"v{number - 1}")), whole[-1]))
    other = ask(trainer, root / "v4", base=str(root / "v1"))  # which was not the last
    _check_failures(trainer, groups.rank, root)
    if groups.rank == 0:
        for number, (written, state) in enumerate(found, start=1):
            assert same(read_weights(root / f"v{number}"), state), number
            assert written.fingerprint == fingerprint((name, t.view(-1).view(torch.uint8).numpy()) for name, t in state.items())
            assert len(written.canary_logprobs) == len(CANARY) - 1
        assert [one.base for one, _ in found] == ["", str(root / "v1"), str(root / "v2")] and other.base == ""
        assert same(read_weights(root / "v4"), whole[-1])
        assert all(0 < one.num_bytes < 0.5 * found[0][0].num_bytes for one, _ in found[1:])
        assert first.num_bytes == sum(tensor.nbytes for tensor in whole[0].values())
    else:
        assert (first.fingerprint, first.num_bytes) == ("", 0)
    largest = max(tensor.nbytes for tensor in whole[0].values())
    return seen | {"all": sum(tensor.nbytes for tensor in whole[0].values()), "largest": largest}


def _check_failures(trainer, rank, root):
    """A disk that is full for one rank; a folder that only rank 0 sees; an offer; and what comes after each."""
    save, staging = parts.save_weights, parts.Target.staging

    def fail(*_):
        raise OSError(28, "No space left on device")

    parts.save_weights = fail if rank == 2 else save
    if rank == 0:
        with pytest.raises(StorageError, match=r"v5: rank 2: \[Errno 28\] No space left on device; free space or choose another folder"):
            ask(trainer, root / "v5")
        assert not [path for path in root.iterdir() if "v5" in path.name]
    else:
        assert ask(trainer, root / "v5").fingerprint == ""
    parts.save_weights = save
    (root / "file").touch()
    if rank == 0:
        with pytest.raises(StorageError, match=r"could not be written to .*file/v5: .*Not a directory"):
            ask(trainer, root / "file" / "v5")
    else:
        ask(trainer, root)
    assert trainer._parts._last is None, "nothing is left to build on"
    if rank:
        parts.Target.staging = property(lambda _: root / "another machine's")
    ask(trainer, root / "v6")
    parts.Target.staging = staging
    offered = ask(trainer, root / "v7", broadcast=BroadcastRequest("127.0.0.1", 1, 5.0))
    if rank == 0:
        assert files(root / "v6") == ["model.safetensors"] and offered.broadcast
        again = ask(trainer, root / "v8")
        assert again.fingerprint == offered.fingerprint
        trainer._offer.close()
    else:
        ask(trainer, root)


@pytest.mark.drill
def test_ranks_write_versions_together(tmp_path):
    build_tiny(tmp_path / "model", tiny=TINY, vocab_size=VOCAB, eos_token_id=1, pad_token_id=0, seed=7)
    ranks = run_ranks(_write, world=WORLD, argument=str(tmp_path))
    assert files(tmp_path / "v1") == [f"model-{number:05d}-of-00004.safetensors" for number in range(1, 5)]
    assert files(tmp_path / "v2") == [f"changes-{number:05d}-of-00004.safetensors" for number in range(1, 5)]
    assert not list(tmp_path.glob(".*"))
    # A Hugging Face folder like any other, with the weights of the only file that rank 0 writes alone.
    index = json.loads((tmp_path / "v1" / "model.safetensors.index.json").read_text())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "v1", dtype="auto")
    assert loaded.dtype == torch.bfloat16 and loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert set(index["weight_map"]) == {name for name, _ in loaded.named_parameters()}
    ones = {name: tensor for file in files(tmp_path / "v4") for name, tensor in load_file(tmp_path / "v4" / file).items()}
    assert same(load_file(tmp_path / "v6" / "model.safetensors"), ones)
    assert fingerprint(named_bytes(load_causal_lm(str(tmp_path / "v6"), dtype="bfloat16"))) == fingerprint(
        named_bytes(load_causal_lm(str(tmp_path / "v8"), dtype="bfloat16")))
    # Each rank has and moves its share, and no more than a few buckets beside it.
    total, largest = ranks[0]["all"], ranks[0]["largest"]
    sizes = [(tmp_path / "v1" / file).stat().st_size for file in files(tmp_path / "v1")]
    assert max(sizes) < total / WORLD + largest + 8192
    for rank in ranks:
        assert rank["received"] <= total / WORLD + largest
        assert rank["sent"] <= total / WORLD + largest
        assert rank["peak"] <= total / WORLD + 2 * largest + 3 * BUCKET
    assert sum(rank["sent"] for rank in ranks) == sum(rank["received"] for rank in ranks) < total

