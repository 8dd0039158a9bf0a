"""What an embedded engine is started with. Torch-free, so that the command line and the cluster can build it."""

from dataclasses import dataclass, field
from typing import Literal

from offbeat.errors import ConfigError
from offbeat.types import Version


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Settings of one engine process.

    Attributes:
        model: folder of a Hugging Face causal language model, its tokenizer included.
        tokenizer: folder of the tokenizer; empty takes the model's.
        dtype: number format of the weights and of the cache.
        forward: "direct" is the own fast path for Llama- and Qwen-like models, "hf" runs any model's own modules; "auto" prefers the first.
        max_running: samples decoded together, the slots of the cache.
        max_queued: requests that wait before a further one is refused (HTTP 429).
        max_context: longest prompt plus generation in tokens; 0 takes the model's context.
        max_cache_bytes: of the keys and values of all that runs; requests that may not fit wait. 0 takes a quarter of the machine's memory,
            divided among `num_engines`, or half of what is free on the engine's accelerator.
        num_engines: engines that share the machine's memory.
        max_prefill_tokens: prompt tokens, padding included, computed in one step before decoding goes on.
        max_adapters: LoRA adapters held at once; the least recently used that no request uses makes room for a new one.
        max_adapter_rank: largest rank of an adapter.
        seed: of the engine's own generator, which serves requests without a seed.
        api_key: bearer token that every request must carry; empty for none.
        version: of the weights in `model`; -1 before a run has published any.
    """

    model: str
    tokenizer: str = ""
    dtype: Literal["float32", "bfloat16"] = "float32"
    forward: Literal["auto", "direct", "hf"] = "auto"
    max_running: int = 512
    max_queued: int = 4096
    max_context: int = 0
    max_cache_bytes: int = 0
    num_engines: int = 1
    max_prefill_tokens: int = 8192
    max_adapters: int = 32
    max_adapter_rank: int = 64
    seed: int = 0
    api_key: str = field(default="", repr=False)
    version: Version = 0

    def __post_init__(self) -> None:
        ones = ("max_running", "max_queued", "num_engines", "max_prefill_tokens", "max_adapters", "max_adapter_rank")
        for name, least in (*((name, 1) for name in ones), ("max_context", 0), ("max_cache_bytes", 0), ("version", -1)):
            value = getattr(self, name)
            if value < least:
                raise ConfigError(f"engine option {name} must be >= {least}, got {value}")
