"""What the rehearsal of `make gpu-check` finds without a GPU: it passes, and planted faults fail it."""

import importlib
import inspect
import sys

import numpy as np
import pytest
import torch

from fake_cuda import CUDA, fake_cuda
from offbeat.config.algorithms import AlgorithmConfig
from offbeat.losses import compose
from offbeat.losses.targets import Targets
from offbeat.model import varlen
from test_gpu_check import BENCHMARKS, call


@pytest.fixture(scope="module")
def rehearsal():
    """The module of the parts."""
    before = list(sys.path)
    sys.path[:0] = [str(BENCHMARKS), str(BENCHMARKS / "gpu")]
    try:
        yield importlib.import_module("rehearsal")
    finally:
        sys.path[:] = before


def a_family(rehearsal, name):
    return next(family for family in rehearsal._FAMILIES.FAMILIES if family.name == name)


def test_every_preset_and_loss_of_pairs_computes_on_fake_cuda_tensors(rehearsal):
    found = rehearsal.losses()
    assert found["presets"] > 25 and found["of pairs"] > 10


def test_adapters_and_the_embedded_engine_run_on_fake_cuda_tensors_and_wait_once_per_step(rehearsal):
    assert rehearsal.adapters() == {"adapters": 2}
    found = rehearsal.engine()
    assert found["direct steps"] == found["hf steps"] > 8
    for path in ("direct", "hf"):
        assert f"engine/sampler.py {found[f'{path} steps']}" in found[f"{path} waits"]


@pytest.mark.parametrize("name", ["Qwen3", "Gemma 2", "Qwen3 MoE", "GPT-OSS", "Falcon-H1"])
def test_a_micro_batch_of_a_family_waits_nowhere_in_our_code(rehearsal, name):
    try:
        waits = rehearsal._micro_batch(a_family(rehearsal, name), rehearsal.PACKED)
    except (rehearsal.ModelError, ValueError, KeyError):
        waits = rehearsal._micro_batch(a_family(rehearsal, name), None)
    assert [wait for wait in waits if not wait.startswith("transformers")] == []


@pytest.mark.drill
def test_every_family_runs_on_fake_cuda_tensors(rehearsal):
    found = rehearsal.families()
    assert found["packed"] + found["apart"] == len(rehearsal._FAMILIES.FAMILIES) and found["packed"] > 35


def test_an_argument_too_many_of_a_private_operator_is_found(rehearsal, monkeypatch):
    source = inspect.getsource(varlen._kernel)
    planted = source.replace("call.window_size, *shared)", "call.window_size, *shared, None, None, None, None, None, None)")
    assert planted != source
    scope = vars(varlen).copy()
    exec(planted, scope)
    monkeypatch.setattr(varlen, "_kernel", scope["_kernel"])
    with pytest.raises(RuntimeError, match=r"_varlen_attn\(\) expected at most"):
        rehearsal._micro_batch(a_family(rehearsal, "Qwen3"), rehearsal.PACKED)


def test_a_tensor_on_the_wrong_device_is_found(rehearsal, monkeypatch):
    monkeypatch.setattr(compose, "upload", lambda array, _device: torch.from_numpy(np.ascontiguousarray(array)))
    with pytest.raises(Exception, match="at least two devices"):
        rehearsal._loss("gspo", rehearsal.policy_loss(AlgorithmConfig(preset="gspo")))


def test_a_host_wait_is_found_and_its_place_told(rehearsal, monkeypatch):
    over_sequences = Targets.over_sequences

    def reads(self, values, how):
        int(self.sequences.max())
        return over_sequences(self, values, how)

    monkeypatch.setattr(Targets, "over_sequences", reads)
    [first, *_] = rehearsal._loss("gspo", rehearsal.policy_loss(AlgorithmConfig(preset="gspo")))
    assert first.startswith("gspo: losses/") and first.endswith("aten._local_scalar_dense.default")


def test_a_missing_wheel_is_found(rehearsal):
    with pytest.raises(RuntimeError, match="zstandard>=0.23 is not installed"):
        rehearsal.rehearsal(lambda: ["zstandard>=0.23"])["packages"]()
    assert rehearsal.rehearsal(list)["packages"]() == {"missing": "none"}


def test_fake_cuda_tensors_refuse_what_a_gpu_refuses_and_note_what_waits():
    with fake_cuda() as waits:
        there, here = torch.ones(3, 2, device=CUDA), torch.ones(3, 2)
        with pytest.raises(RuntimeError, match="two devices"):
            there + here
        assert (there @ there.T)[0, :2].device == CUDA and waits.found == []
        assert there[there > 0].shape == (6,) and there.sum().item() == 1.0
        assert there.cpu().numpy().tolist() == [[0.0, 0.0]] * 3
        assert there[here[:, 0] > 0].shape == (3, 2)
    names = [wait.split()[1] for wait in waits.found]
    assert names.count("aten._local_scalar_dense.default") == 1 and names.count("aten._to_copy.default") == 1 and len(names) == 4
    with fake_cuda(), torch.autocast("cuda", torch.bfloat16):
        assert (torch.ones(2, 2, device=CUDA) @ torch.ones(2, 2, device=CUDA)).dtype == torch.bfloat16


@pytest.mark.drill
def test_the_rehearsal_writes_its_results_after_every_part(tmp_path):
    done = call("--rehearse", "--out", str(tmp_path / "found.json"), "--parts", "interfaces", "packages", "fake losses", "head")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "found.json").read_text().count('"result"') == 4
