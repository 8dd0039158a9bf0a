"""Dialect of each kind of engine, and the command that starts it where it is a server of another make. Torch-free.

A row of `MAKERS` goes with a row of `config.engine_kinds`, which has the kind's capabilities. A comment beside each flag gives its purpose.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

from offbeat.config.engine_kinds import ENGINE_KINDS
from offbeat.config.for_processes import EngineConfig
from offbeat.data.image_reader import reads_images
from offbeat.data.image_store import images_folder
from offbeat.data.model_folder import read_model_config
from offbeat.engine import inside
from offbeat.errors import ConfigError
from offbeat.inference.dialects.base import Dialect
from offbeat.inference.dialects.embedded import EmbeddedDialect
from offbeat.inference.dialects.sglang import SGLangDialect
from offbeat.inference.dialects.vllm import VllmDialect

_INSIDE = Path(inside.__file__ or "").parent
_CPU_CACHE_BYTES = 1 << 29
"""Size of vLLM's cache on a CPU; by default each engine would take most of the machine's memory."""
_SHARED_MEMORY = "0.4"
"""Share of a device's memory for an engine that a train rank shares it with; the rank's states and activations need the larger part."""
_VLLM_FORMS: Mapping[str, str] = MappingProxyType({"int8": "offbeat_int8", "int4": "offbeat_int4", "fp8": "fp8_per_channel"})
"""Values of --quantization for `inference.quantization`: two of `inside/vllm_quantized.py`, and one of vLLM's own."""
_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM accepts as --max-lora-rank."""


@dataclass(frozen=True)
class Serving:
    """Settings of one server: model and tokenizer (folders or hub ids, such as "Qwen/Qwen3-0.6B"), version of its weights, seed, key."""

    model: str
    tokenizer: str
    version: int
    seed: int
    key: str


class Maker(Protocol):
    """Makes the dialects of a kind of engine, and the command that starts one."""

    def dialect(self, config: EngineConfig, model: str) -> Dialect:
        """Return the dialect of a run's engines, to which weights or adapters of `model` are published."""
        ...

    def reader(self) -> Dialect:
        """Return the dialect of an engine to which nothing is published: a teacher's, or one of `serve.sampling_models`."""
        ...

    def command(self, config: EngineConfig, serving: Serving) -> tuple[list[str], dict[str, str]]:
        """Return the arguments of Python that start a server, without its address, and its environment variables.

        Raises:
            ConfigError: the server cannot serve this configuration, for example an adapter rank of 1024 with vLLM.
        """
        ...


class _Embedded:
    """Started in a worker by `fleet.engine_group`, without a command."""

    def dialect(self, config: EngineConfig, model: str) -> Dialect:
        return EmbeddedDialect(model=model, lora_rank=config.model.lora.rank)

    def reader(self) -> Dialect:
        return EmbeddedDialect()

    def command(self, config: EngineConfig, serving: Serving) -> tuple[list[str], dict[str, str]]:  # noqa: ARG002 - of the protocol
        raise AssertionError("the embedded engine has no command")


class _Vllm:
    def dialect(self, config: EngineConfig, model: str) -> Dialect:
        lora = config.model.lora.rank > 0
        on_cpu = not config.inference.devices_per_engine  # also of engines by URL, for which there is no other sign
        return VllmDialect(model=model, whole_weights=not lora, lora=lora, on_cpu=on_cpu, changes=config.weights.sends_changes)

    def reader(self) -> Dialect:
        return VllmDialect(model="", whole_weights=False, lora=False)

    def command(self, config: EngineConfig, serving: Serving) -> tuple[list[str], dict[str, str]]:
        inference, lora = config.inference, config.model.lora
        command = [
            str(_INSIDE / "vllm_serve.py"),  # vLLM's own command line, which a signal to the whole job does not end
            "serve", serving.model, "--tokenizer", serving.tokenizer, "--dtype", config.model.number_format, "--seed", str(serving.seed),
            "--max-num-seqs", str(inference.max_running),
            "--generation-config", "vllm",  # otherwise the model's own sampling defaults apply to every request
            "--logprobs-mode", "processed_logprobs",  # log-probabilities of the sampled distribution
            "--scheduling-policy", "priority",  # proofs go ahead of waiting requests
            "--middleware", "vllm_inside.Inside", "--worker-extension-cls", "vllm_inside.WorkerExtension"]
        env = {
            "PYTHONPATH": str(_INSIDE), "VLLM_NO_USAGE_STATS": "1", "OFFBEAT_VERSION": str(serving.version),
            "VLLM_API_KEY": serving.key}  # `Inside` requires it on all paths, vLLM itself below /v1
        if inference.quantization != "none":
            command += ["--quantization", _VLLM_FORMS[inference.quantization]]
        if inference.quantization == "int4":
            env["VLLM_CPU_INT4_W4A8"] = "0"  # by default activations are rounded, too, on CPUs with AMX
        if _reads_images(serving.model):
            env["OFFBEAT_IMAGES"] = str(images_folder(config.run_dir))
            # Images come processed, so it keeps none of its own making; it makes room for no videos.
            command += ["--mm-processor-cache-gb", "0", "--limit-mm-per-prompt", '{"image": 1, "video": 0}']
        if config.model.route_replay == "rollout":
            command += ["--enable-return-routed-experts"]
        if inference.max_context:
            command += ["--max-model-len", str(inference.max_context)]
        if not inference.prefix_caching or config.weights.interrupt == "keep":  # new requests must not use caches of old weights
            command += ["--no-enable-prefix-caching"]
        if lora.rank:
            most = str(inference.max_adapters)
            # As many in memory as are loaded: an evicted adapter that is requested again would be read from a folder that may be gone.
            command += ["--enable-lora", "--max-loras", most, "--max-cpu-loras", most, "--max-lora-rank", str(_lora_rank(config))]
            env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
        if not inference.devices_per_engine:
            command += ["--kv-cache-memory-bytes", str(_CPU_CACHE_BYTES), "--enforce-eager"]
            env["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # otherwise every engine binds itself to the same first core
        else:
            command += ["--tensor-parallel-size", str(inference.devices_per_engine)]
            if config.cluster.devices_are_shared:
                command += ["--gpu-memory-utilization", _SHARED_MEMORY]
            if config.cluster.take_turns:
                command += ["--enable-sleep-mode"]  # memory from an allocator that can give it back, and leave addresses as they are
        return command, env


class _SGLang:
    def dialect(self, config: EngineConfig, model: str) -> Dialect:  # noqa: ARG002 - of the protocol
        return SGLangDialect()

    def reader(self) -> Dialect:
        return SGLangDialect()

    def command(self, config: EngineConfig, serving: Serving) -> tuple[list[str], dict[str, str]]:
        inference, lora = config.inference, config.model.lora
        command = [
            str(_INSIDE / "sglang_keyed.py"),  # the server, which takes its key from its environment
            "--model-path", serving.model, "--tokenizer-path", serving.tokenizer, "--dtype", config.model.number_format,
            "--random-seed", str(serving.seed), "--max-running-requests", str(inference.max_running)]
        if not inference.prefix_caching:
            command += ["--disable-radix-cache"]
        if inference.max_context:
            command += ["--context-length", str(inference.max_context)]
        if lora.rank:
            command += [
                "--enable-lora", "--max-lora-rank", str(inference.max_adapter_rank), "--lora-target-modules", "all",
                "--max-loras-per-batch", str(inference.max_adapters), "--max-loaded-loras", str(inference.max_adapters)]
        if inference.devices_per_engine:
            command += ["--tensor-parallel-size", str(inference.devices_per_engine)]
            if config.cluster.devices_are_shared:
                command += ["--mem-fraction-static", _SHARED_MEMORY]
        return command, {"OFFBEAT_ENGINE_KEY": serving.key}


def _reads_images(model: str) -> bool:
    """Whether vLLM is given images in prompts for a model; one of the hub has no images in rows."""
    if not (Path(model) / "config.json").is_file():
        return False
    config = read_model_config(model)
    return reads_images(config) and config["model_type"] in ENGINE_KINDS["vllm"].image_types


def _lora_rank(config: EngineConfig) -> int:
    wanted = config.inference.max_adapter_rank
    if wanted > _LORA_RANKS[-1]:
        raise ConfigError(f"inference.max_adapter_rank must be <= {_LORA_RANKS[-1]} with vLLM, got {wanted}")
    return min(rank for rank in _LORA_RANKS if rank >= wanted)


MAKERS: Mapping[str, Maker] = MappingProxyType({"embedded": _Embedded(), "vllm": _Vllm(), "sglang": _SGLang()})
"""Makers by the names of `config.engine_kinds.ENGINE_KINDS`."""
