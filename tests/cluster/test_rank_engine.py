"""One rank's engine under a configuration; whole groups of them train in `test_train_group.py` and `test_spmd_trainers.py`."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from offbeat.cluster.material import read_material
from offbeat.cluster.messages import BroadcastRequest, ExportRequest, Objective, PublishRequest, Shard
from offbeat.cluster.rank_engine import RankEngine, build_model
from offbeat.dist import broadcast
from offbeat.model.hf_io import read_safetensors
from offbeat.model.peft_io import read_adapter
from ranks import run_alone
from small_run import small_config
from train_samples import make_batch


def test_a_rank_trains_publishes_and_goes_on_from_what_it_saved(
    tmp_path: Path, model_dir: str, monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = small_config(tmp_path, model_dir, sft__optimizer__lr="0.5", train__optimizer__lr="1e-2")

    def body(groups, _):
        engine = RankEngine.build(model_dir, config, groups)
        engine.set_objective(Objective("ppo", 10))
        batch = make_batch(2, 2)
        trained = engine.train_step(Shard(batch, ((np.arange(4),),)))
        assert trained.metrics["train/lr"] == 1e-2 and engine.step == 1
        assert 0 < trained.busy_s <= trained.end_s - trained.start_s + 0.5
        published = engine.publish(PublishRequest(1, str(tmp_path / "v1"), "float32", (3, 4, 5)))
        assert len(published.fingerprint) == 32 and len(published.canary_logprobs) == 2 and max(published.canary_logprobs) < 0
        engine.save(tmp_path / "saved")
        engine.export(ExportRequest(str(tmp_path / "export"), model_dir))
        engine.set_objective(Objective("sft", 10))
        assert engine.step == 0
        assert engine.train_step(Shard(batch, ((np.arange(4),),))).metrics["train/lr"] < 0.5 + 1e-9
        engine.load(tmp_path / "saved")
        assert engine.step == 1
        again = engine.publish(PublishRequest(2, str(tmp_path / "v2"), "float32", (3, 4, 5)))
        assert again == published
        offered = [
            engine.publish(PublishRequest(version, str(tmp_path / "v3"), "float32", (3, 4, 5), BroadcastRequest("127.0.0.1", 1, 20)))
            for version in (3, 4)]
        assert [replace(one, broadcast="") for one in offered] == [published] * 2
        with pytest.raises((OSError, RuntimeError)):  # an offer ends with the next
            broadcast.receive(offered[0].broadcast, device=torch.device("cpu"))
        received = broadcast.receive(offered[1].broadcast, device=torch.device("cpu"))
        written = dict(read_safetensors(tmp_path / "v1"))
        assert received is not None and received.keys() == written.keys() and not (tmp_path / "v3").exists()
        assert all(torch.equal(received[name], tensor) for name, tensor in written.items())
        monkeypatch.setattr(broadcast, "count", lambda: iter([2]))  # a receiver that broke two rounds
        assert broadcast.receive(offered[1].broadcast, device=torch.device("cpu")) is None
        assert (tmp_path / "v3" / "model.safetensors").read_bytes() == (tmp_path / "v1" / "model.safetensors").read_bytes()
        engine.publish(PublishRequest(5, str(tmp_path / "v5"), "float32", (3, 4, 5)))
        return True

    assert run_alone(body)
    exported = dict(read_safetensors(tmp_path / "export"))
    assert exported.keys() == dict(read_safetensors(tmp_path / "v1")).keys()
    assert (tmp_path / "export" / "tokenizer.json").exists()


def test_a_rank_trains_an_adapter_where_the_configuration_asks_for_one(tmp_path: Path, model_dir: str) -> None:
    config = small_config(tmp_path, model_dir, model__lora__rank="2", model__lora__targets='["q_proj"]', train__optimizer__lr="1e-2")

    def body(groups, _):
        engine = RankEngine.build(model_dir, config, groups)
        engine.set_objective(Objective("ppo", 10))
        engine.train_step(Shard(make_batch(2, 2), ((np.arange(4),),)))
        published = engine.publish(PublishRequest(1, str(tmp_path / "v1"), "float32", (3, 4, 5)))
        assert published.fingerprint == read_adapter(tmp_path / "v1").fingerprint()
        engine.export(ExportRequest(str(tmp_path / "export"), model_dir))
        return True

    assert run_alone(body)
    assert read_adapter(tmp_path / "v1").rank == 2
    exported, base = (dict(read_safetensors(folder)) for folder in (tmp_path / "export", model_dir))
    assert {name.rpartition(".")[0].rpartition(".")[2] for name in base if not (exported[name] == base[name]).all()} == {"q_proj"}


def test_the_tiny_model_is_built_where_it_is_asked_for(tmp_path: Path) -> None:
    material = read_material(small_config(tmp_path))
    assert material.build is not None
    material.tokenizer.save(material.model)
    build_model(material.build)
    assert (Path(material.model) / "model.safetensors").exists()
