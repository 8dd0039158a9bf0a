"""Published weights as files; `tests/engines` has a real vLLM read them."""

import importlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from offbeat.model.fingerprint import fingerprint
from offbeat.model.peft_io import Adapter, read_adapter, write_adapter


def test_the_fingerprint_of_a_folder_is_the_trainers_of_the_same_weights(tmp_path: Path) -> None:
    files = importlib.import_module("vllm_files")
    tensors = {"b.weight": torch.randn(3, 5), "a.weight": torch.randn(600, 600).bfloat16()}
    save_file(tensors | {"layers.0.gate.e_score_correction_bias": torch.zeros(4)}, tmp_path / "model.safetensors")
    expected = fingerprint((name, tensor.view(-1).view(torch.uint8).numpy()) for name, tensor in tensors.items())
    assert files.fingerprint_files(files.files_of(str(tmp_path))) == expected


def test_the_fingerprint_of_an_adapters_folder_is_the_trainers(tmp_path: Path) -> None:
    files = importlib.import_module("vllm_files")
    adapter = Adapter(4, 0.5, {"model.layers.0.self_attn.o_proj": (torch.randn(4, 8), torch.randn(8, 4))})
    write_adapter(adapter, tmp_path / "v0", base_model="base")
    told = files.fingerprint_files(files.files_of(str(tmp_path / "v0")), dtype=torch.float32)
    assert told == adapter.fingerprint() == read_adapter(tmp_path / "v0").fingerprint()


def test_received_weights_are_a_file_for_other_processes_until_they_are_forgotten() -> None:
    files = importlib.import_module("vllm_files")
    memory = files.MemoryFile({"a": torch.arange(3)})
    ((name, tensor),) = files.read_files([memory.path])
    assert (name, tensor.tolist()) == ("a", [0, 1, 2])
    path = memory.path
    del memory, tensor
    assert not path.exists()


def test_a_file_in_memory_is_one_like_any_other_and_takes_the_tensors_that_it_is_given() -> None:
    files = importlib.import_module("vllm_files")
    dtypes = (torch.int8, torch.bfloat16, torch.bool, torch.float64, torch.float32, torch.int64, torch.float8_e4m3fn)
    tensors = {str(dtype): torch.arange(15).view(3, 5).to(dtype).T for dtype in dtypes}
    tensors |= {"none": torch.zeros(0, 3), "one": torch.tensor(2.5)}
    given = dict(tensors)
    memory = files.MemoryFile(given)
    assert not given, "they are not held twice"
    read = load_file(memory.path)
    assert read.keys() == tensors.keys()
    assert all(read[name].dtype == tensor.dtype and read[name].tolist() == tensor.tolist() for name, tensor in tensors.items())
    assert files.read_shapes([memory.path]) == {name: list(tensor.shape) for name, tensor in tensors.items()}


def test_weights_of_another_model_and_files_that_are_cut_are_refused(tmp_path: Path) -> None:
    files = importlib.import_module("vllm_files")
    (tmp_path / "model").mkdir()
    save_file({"a": torch.zeros(2, 3), "lm_head.weight": torch.zeros(1)}, tmp_path / "model" / "model.safetensors")
    other = tmp_path / "other.safetensors"
    save_file({"a": torch.zeros(2, 4)}, other)
    with pytest.raises(files.RefusedError, match=r"v1 is another model than .*: a is \[2, 4\] there, \[2, 3\] here"):
        files.check_weights([other], "v1", str(tmp_path / "model"), tied=True)
    save_file({"a": torch.zeros(2, 3)}, other)
    files.check_weights([other], "v1", str(tmp_path / "model"), tied=True)
    other.write_bytes(other.read_bytes()[:-4])
    with pytest.raises(files.RefusedError, match="is not a complete safetensors file"):
        files.check_weights([other], "v1", str(tmp_path / "model"), tied=True)
