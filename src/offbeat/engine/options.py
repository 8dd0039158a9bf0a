"""Settings that an embedded engine starts with. Torch-free, so that the command line and the cluster can build them."""

from dataclasses import dataclass, field
from typing import Literal

from offbeat.errors import ConfigError
from offbeat.types import Version


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Settings of one engine process.

    Attributes:
        model: folder of a Hugging Face causal language model, its tokenizer included.
        tokenizer: folder of the tokenizer; empty uses the model's.
        dtype: number format of the weights and of the cache.
        quantization: "int8" computes the products of the direct forward, on a CPU, with int8 weights and activations.
        forward: "direct" is the fast path for Llama- and Qwen-like models, "hf" runs any model's own modules; "auto" prefers the first.
        max_running: samples decoded together, which is the number of cache slots.
        max_queued: requests that may wait before another is refused (HTTP 429).
        max_context: longest prompt plus generation in tokens; 0 uses the model's context length.
        max_cache_bytes: bound on keys and values of all running samples; requests that may not fit wait. 0 uses a quarter of the machine's
            memory, divided among `num_engines`, or half of the free memory of the engine's accelerator.
        prefix_caching: keep keys and values of samples that have ended, in an eighth of the cache at most; see `prefixes`.
        batch_invariant: whether a token's numbers are the same bits in every batch; "auto" where they can be, see `batch_invariant`.
        max_prefill_tokens: prompt tokens computed in one round while nothing decodes, and in one batch, padding included.
        max_prefill_per_round: prompt tokens computed in one round beside samples that decode; a longer prompt takes several rounds.
        max_adapters: LoRA adapters held at once; to make room, the least recently used that no request uses is evicted.
        stall_timeout_s: seconds without computing after which a step counts as hung; see `stall.StepWatch`.
        seed: seed of the engine's own generator, which serves requests without a seed.
        api_key: bearer token that every request must carry; empty for none.
        version: version of the weights in `model`; -1 before a run has published any.
        images: folder of the images whose ids prompts may hold, in which those of chats are stored; empty takes none.
        image_files: folder that paths of images in chats may lead to; empty refuses paths.
        max_stored_bytes: of the images that chats bring; 0 is no bound. See `ImageStore`.
    """

    model: str
    tokenizer: str = ""
    dtype: Literal["float32", "bfloat16"] = "float32"
    quantization: Literal["none", "int8"] = "none"
    forward: Literal["auto", "direct", "hf"] = "auto"
    max_running: int = 512
    max_queued: int = 4096
    max_context: int = 0
    max_cache_bytes: int = 0
    prefix_caching: bool = True
    batch_invariant: bool | Literal["auto"] = False
    num_engines: int = 1
    max_prefill_tokens: int = 8192
    max_prefill_per_round: int = 512
    max_adapters: int = 32
    max_adapter_rank: int = 64
    stall_timeout_s: float = 60.0
    seed: int = 0
    api_key: str = field(default="", repr=False)
    version: Version = 0
    images: str = ""
    image_files: str = ""
    max_stored_bytes: int = 0

    def __post_init__(self) -> None:
        ones = (
            "max_running", "max_queued", "num_engines", "max_prefill_tokens", "max_prefill_per_round", "max_adapters", "max_adapter_rank")
        for name, least in (*((name, 1) for name in ones), ("max_context", 0), ("max_cache_bytes", 0), ("max_stored_bytes", 0),
                            ("version", -1)):
            value = getattr(self, name)
            if value < least:
                raise ConfigError(f"engine option {name} must be >= {least}, got {value}")
        if not self.stall_timeout_s > 0:
            raise ConfigError(f"engine option stall_timeout_s must be > 0, got {self.stall_timeout_s}")


@dataclass(frozen=True)
class EngineStart:
    """Serve an embedded engine: its options as JSON, the key among them, and where to listen; port 0 takes a free one."""

    options: str = field(repr=False)
    host: str = "127.0.0.1"
    port: int = 0


@dataclass(frozen=True)
class EngineAddress:
    """Address of an engine, such as "http://127.0.0.1:8000"."""

    url: str
