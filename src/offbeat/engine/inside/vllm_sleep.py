"""A vLLM server's sleep, as far as vLLM does not do it by itself. Used by `vllm_inside`.

On accelerators vLLM frees the memory of its cache and weights, if it was started with --enable-sleep-mode. On a CPU it frees nothing: a
server that sleeps there only waits.
"""

from typing import Any

from vllm_files import RefusedError


def check_sleep(engine: Any, *, on_cpu: bool) -> None:
    """Raise RefusedError if an engine was started without the flag that it takes to free memory in a sleep."""
    if not on_cpu and not engine.vllm_config.model_config.enable_sleep_mode:
        raise RefusedError("this server cannot be put to sleep, because it runs without --enable-sleep-mode")
