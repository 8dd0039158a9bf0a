"""[inference]: the engines that generate."""

from typing import Literal

from offbeat.config.base import Section, field


class InferenceConfig(Section):
    """Engines that the run starts."""

    num_engines: int = field(1, "Engine processes.", ge=1)
    min_engines: int = field(1, "Fewest healthy engines with which a run goes on.", ge=1)
    forward: Literal["auto", "direct", "hf"] = field(
        "auto",
        "Embedded engine's forward: own fast path for Llama- and Qwen-like models, or Hugging Face's modules for any; "
        "auto prefers the fast one.")
    max_running: int = field(512, "Samples decoded together, the slots of the cache.", ge=1)
    max_queued: int = field(4096, "Requests waiting before the engine answers 429.", ge=1)
    max_context: int = field(0, "Longest prompt plus generation, in tokens; 0 takes the model's context.", ge=0)
    threads: int = field(1, "CPU threads per engine.", ge=1)
    start_timeout_s: float = field(120.0, "Seconds until an engine must answer.", gt=0)
    request_timeout_s: float = field(300.0, "Seconds for one generation request.", gt=0)
