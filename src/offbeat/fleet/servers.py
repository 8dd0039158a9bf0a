"""Command lines and environments that start engines of other makes, from the configuration. Torch-free.

A comment beside each flag says what it is for; `inference.arguments` come last and win. The server's key is in its environment, because
anyone on the machine can read a command line.
"""

import subprocess
from pathlib import Path

from offbeat.config.root import Config
from offbeat.engine import inside
from offbeat.errors import ConfigError

_INSIDE = Path(inside.__file__ or "").parent
_CPU_CACHE_BYTES = 1 << 29
"""Size of vLLM's cache on a CPU; by default each engine would take most of the machine's memory."""
_SHARED_MEMORY = "0.4"
"""Share of a device's memory for an engine that a train rank shares it with; the rank's states and activations need the larger part."""
_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM accepts as --max-lora-rank."""
_ASK_PACKAGE = "import importlib.util, sys; sys.exit(importlib.util.find_spec(sys.argv[1]) is None)"
_ASK_TIMEOUT_S = 30.0


def server_command(
    config: Config, *, model: str, tokenizer: str, version: int, seed: int, key: str,
) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return the command (without its address) and the environment variables of one server of kind `inference.engine`.

    Args:
        key: key that the server is to require.

    Raises:
        ConfigError: the environment does not exist, or the engine cannot serve this rank.
    """
    python = _find_python(config)
    if config.inference.engine == "vllm":
        command, env = _vllm(config, model, tokenizer, seed)
        env |= {"OFFBEAT_VERSION": str(version), "VLLM_API_KEY": key}  # `Inside` requires it on all paths, vLLM itself below /v1
    else:
        command, env = _sglang(config, model, tokenizer, seed)
        env["OFFBEAT_ENGINE_KEY"] = key
    return (str(python), *command, *config.inference.arguments), env


def engine_python(config: Config) -> Path:
    """Find the Python that starts the servers, and check that it has their package.

    Raises:
        ConfigError: it does not exist, or lacks the package.
    """
    kind, python = config.inference.engine, _find_python(config)
    try:
        done = subprocess.run([str(python), "-c", _ASK_PACKAGE, kind], capture_output=True, timeout=_ASK_TIMEOUT_S, check=False)
        reason = f"it ended with exit code {done.returncode} when asked for it" if done.returncode else ""
    except (OSError, subprocess.TimeoutExpired) as exc:
        reason = str(exc)
    if reason:
        raise ConfigError(
            f"inference.engine = {kind!r} needs a Python with {kind} in it, and {python} is not one: {reason}; "
            "set inference.python to the Python of an environment that has it")
    return python


def _find_python(config: Config) -> Path:
    """Return the path unresolved, since it is a link that leads out of its environment."""
    kind = config.inference.engine
    python = Path(config.inference.python or f".venv-{kind}/bin/python").absolute()
    if not python.is_file():
        make = "run `make vllm`, or " if kind == "vllm" else ""
        raise ConfigError(
            f"inference.engine = {kind!r} needs a Python with {kind} in it, and {python} does not exist; "
            f"{make}set inference.python to the Python of an environment that has it")
    return python


def _vllm(config: Config, model: str, tokenizer: str, seed: int) -> tuple[list[str], dict[str, str]]:
    inference, lora = config.inference, config.model.lora
    command = [
        str(_INSIDE / "vllm_serve.py"),  # vLLM's own command line, which a signal to the whole job does not end
        "serve", model, "--tokenizer", tokenizer, "--dtype", config.model.number_format, "--seed", str(seed),
        "--max-num-seqs", str(inference.max_running),
        "--generation-config", "vllm",  # otherwise the model's own sampling defaults apply to every request
        "--logprobs-mode", "processed_logprobs",  # those of the distribution that was sampled
        "--scheduling-policy", "priority",  # proofs go ahead of waiting requests
        "--middleware", "vllm_inside.Inside", "--worker-extension-cls", "vllm_inside.WorkerExtension"]
    env = {"PYTHONPATH": str(_INSIDE), "VLLM_NO_USAGE_STATS": "1"}
    if inference.max_context:
        command += ["--max-model-len", str(inference.max_context)]
    if not inference.prefix_caching or config.weights.interrupt == "keep":  # new requests must not use what old weights computed
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


def _lora_rank(config: Config) -> int:
    wanted = config.inference.max_adapter_rank
    if wanted > _LORA_RANKS[-1]:
        raise ConfigError(f"inference.max_adapter_rank must be <= {_LORA_RANKS[-1]} with vLLM, got {wanted}")
    return min(rank for rank in _LORA_RANKS if rank >= wanted)


def _sglang(config: Config, model: str, tokenizer: str, seed: int) -> tuple[list[str], dict[str, str]]:
    inference, lora = config.inference, config.model.lora
    command = [
        str(_INSIDE / "sglang_keyed.py"),  # the server, which takes its key from its environment
        "--model-path", model, "--tokenizer-path", tokenizer, "--dtype", config.model.number_format,
        "--random-seed", str(seed), "--max-running-requests", str(inference.max_running)]
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
    return command, {}
