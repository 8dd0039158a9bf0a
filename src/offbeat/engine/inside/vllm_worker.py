"""Offbeat's methods of a vLLM worker: load a version, compare the weights in use, and look at an adapter. Used by `vllm_inside`.

vLLM calls them in every worker at once. Once a worker of several has raised, vLLM takes each answer of the others for an answer to the
next call. So these methods raise nothing: they return their answer, and a sentence that describes the error.
"""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload
from vllm.platforms import current_platform
from vllm_files import fingerprint_files, read_files
from vllm_plain import check_plain_rows, skip_plain_rows
from vllm_readback import ReadBack, check_adapter

_log = init_logger(__name__)

if current_platform.is_cpu():  # now, because a worker computes before any of its methods here is called
    skip_plain_rows()

Told = tuple[Any, str]
"""A worker's answer, and its error; empty if there is none."""


def answered(method: Callable[..., Any]) -> Callable[..., Told]:
    """Wrap a worker's method, so that it returns the exception that it raises."""

    @wraps(method)
    def answer(self: Any, *args: Any) -> Told:
        try:
            return method(self, *args), ""
        except Exception as exc:
            _log.exception("%s failed", method.__name__)
            return None, f"{type(exc).__name__}: {exc}"

    return answer


def read_answers(told: Sequence[Told]) -> list[Any]:
    """Return all workers' answers. Raises RuntimeError if something went wrong in a worker."""
    if errors := [error for _, error in told if error]:
        raise RuntimeError(errors[0])
    return [answer for answer, _ in told]


class WorkerExtension:
    """Methods added to vLLM's worker; `read_answers` reads their results."""

    model_runner: Any
    vllm_config: Any
    reload_weights: Callable[..., None]
    _offbeat_readback: ReadBack | None = None

    @answered
    def offbeat_load(self, files: list[str], started_with: list[str]) -> dict[str, Any]:
        """Load safetensors files over the current weights, on this worker's accelerator or CPU.

        Returns the fingerprint of the files, and the number of tensors that could not be compared with the weights in use. Raises
        RuntimeError if these differ from the files.
        """
        self._offbeat_read_back(started_with)
        self._offbeat_reload(files)
        return {"fingerprint": fingerprint_files(files), "num_unread": self._offbeat_compare(files)}

    @answered
    def offbeat_adapter(self, number: int, folder: str) -> tuple[list[str], list[str]]:
        """Run `check_adapter` on the adapter that vLLM knows by that number.

        Raises RuntimeError if requests without an adapter would have one added.
        """
        if current_platform.is_cpu():
            check_plain_rows()
        return check_adapter(self.model_runner.lora_manager._adapter_manager, number, folder)

    def _offbeat_reload(self, files: list[str]) -> None:
        model = self.model_runner.get_model()
        try:
            self.reload_weights(weights_iterator=read_files(files))
        except BaseException:
            # vLLM would go on with this load at the next one, and mix the two or fail each time.
            with set_current_vllm_config(self.vllm_config):
                finalize_layerwise_reload(model, self.model_runner.model_config)
            raise
        if current_platform.is_cpu():
            repack_heads(model)
            repack_experts(model)

    def _offbeat_read_back(self, started_with: list[str]) -> None:
        """Find the weights that can be read back, while the server's initial weights are in use; later calls do nothing."""
        if self._offbeat_readback is None:
            self._offbeat_readback = ReadBack(self.model_runner.get_model(), started_with)

    def _offbeat_compare(self, files: list[str]) -> int:
        """Compare the files of the version loaded last with the weights in use; returns the number of tensors that could not be compared.

        Raises RuntimeError if the weights in use differ from the files.
        """
        assert self._offbeat_readback is not None, "they were loaded"
        wrong, unread = self._offbeat_readback.check(files)
        if wrong:
            raise RuntimeError(f"{wrong[0]} and {len(wrong) - 1} other tensors are not what was read")
        return len(unread)

    offbeat_read_back, offbeat_compare = answered(_offbeat_read_back), answered(_offbeat_compare)


def repack_heads(model: torch.nn.Module) -> None:
    """Repack the output head for the CPU's kernels: after a reload a tied head still has its packed copy of the old weights."""
    # Only vLLM for CPUs has these modules.
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm  # noqa: PLC0415
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding  # noqa: PLC0415

    embedding = next(module for module in model.modules() if type(module) is VocabParallelEmbedding)
    for module in model.modules():
        if isinstance(module, ParallelLMHead) and hasattr(module, "cpu_linear"):
            if getattr(getattr(model, "config", None), "tie_word_embeddings", False):
                module.weight = embedding.weight
            dispatch_cpu_unquantized_gemm(module, remove_weight=False)


def repack_experts(model: torch.nn.Module) -> None:
    """Pack experts for the CPU's kernels, which vLLM does only when it loads them for the first time."""
    # Only vLLM for CPUs has this module.
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts  # noqa: PLC0415

    for module in model.modules():
        experts = getattr(getattr(getattr(module, "quant_method", None), "moe_kernel", None), "fused_experts", None)
        if isinstance(experts, CPUUnquantizedExperts) and hasattr(module, "w13_weight"):
            experts.process_weights_after_loading(module)
