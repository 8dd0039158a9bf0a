"""A vLLM worker that goes wrong as it is told to. Runs in vLLM's processes, in the place of Offbeat's own extension:

    PYTHONPATH=.../offbeat/engine/inside:.../tests/support OFFBEAT_TEST_FAULT=FILE vllm serve MODEL \
        --worker-extension-cls vllm_faults.FaultyWorker ...

What goes wrong stands in the file, as JSON: `fault`, of the next load of weights, and `adapter`, the folder that is read in the
place of any that is asked for. Everything is done to vLLM itself, below what Offbeat has inside it; of several workers, things go wrong in
the last one alone.
"""

import json
import os
from collections.abc import Iterable
from functools import wraps
from pathlib import Path
from typing import Any

import vllm_worker
from safetensors.torch import load_file
from torch import Tensor
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.lora.worker_manager import WorkerLoRAManager
from vllm_files import read_files
from vllm_worker import Told, WorkerExtension
from weight_faults import EXPERTS, LOADING, spoil

_LOAD_ADAPTER = WorkerLoRAManager._load_adapter
_REPACK_HEADS = vllm_worker.repack_heads


def told(what: str) -> str:
    """What is to go wrong now; empty if nothing is."""
    path = Path(os.environ["OFFBEAT_TEST_FAULT"])
    return json.loads(path.read_text()).get(what, "") if path.exists() else ""


@wraps(_LOAD_ADAPTER)
def load_adapter(self: WorkerLoRAManager, lora_request: Any) -> Any:
    """Read the folder that was asked for, or another one."""
    if get_tensor_model_parallel_rank() == get_tensor_model_parallel_world_size() - 1:
        lora_request.lora_path = told("adapter") or lora_request.lora_path
    return _LOAD_ADAPTER(self, lora_request)


WorkerLoRAManager._load_adapter = load_adapter


class FaultyWorker(WorkerExtension):
    """Offbeat's extension over a worker with a fault."""

    rank: int
    faulty_had: list[str] | None = None
    """Files of the weights that it computed with before."""

    def offbeat_load(self, files: list[str], started_with: list[str]) -> Told:
        last = self.vllm_config.parallel_config.world_size - 1
        fault, had = told("fault") if self.rank == last else "", self.faulty_had or started_with
        reload = self.model_runner.reload_weights

        def reload_wrongly(*, weights_iterator: Iterable[tuple[str, Tensor]]) -> None:
            old = {name: tensor for file in had for name, tensor in load_file(file).items()}
            reload(weights_iterator=iter(spoil(fault, dict(weights_iterator), old).items()))

        try:
            if fault in (*LOADING, *EXPERTS):
                self.model_runner.reload_weights = reload_wrongly
            if fault == "tied head old":  # as vLLM for CPUs leaves it after a reload
                vllm_worker.repack_heads = lambda _model: None
            answer, error = super().offbeat_load(files, started_with)
        finally:
            self.model_runner.reload_weights, vllm_worker.repack_heads = reload, _REPACK_HEADS
        if fault == "weights gone":  # as memory is that was given back and taken again
            for parameter in self.model_runner.get_model().parameters():
                parameter.data.zero_()
        if fault == "old weights come back":
            reload(weights_iterator=read_files(had))
            vllm_worker.repack_heads(self.model_runner.get_model())
            vllm_worker.repack_experts(self.model_runner.get_model())
        elif not error:
            self.faulty_had = files
        return answer, error
