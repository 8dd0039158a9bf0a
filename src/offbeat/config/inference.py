"""[inference]: the engines that generate samples."""

from typing import Literal

from pydantic import field_validator

from offbeat.config.base import Change, Section, field
from offbeat.config.engine_kinds import ENGINE_KINDS, KIND_NAMES, EngineKind, WeightForm


class InferenceConfig(Section):
    """Engines that the run starts, or uses by URL."""

    on_resume = Change.FREE
    read_by = ("rl", "sft")

    engine: Literal[KIND_NAMES] = field(  # pyright: ignore[reportInvalidTypeForm]
        "embedded", "Kind of engine: the embedded one, or vLLM or SGLang, which run in separate environments.",
        on_resume=Change.TOLD, basic=True)
    num_engines: int = field(1, "Engine processes.", ge=1)
    devices_per_engine: int = field(
        0, "Accelerators for each engine, over which vLLM and SGLang split the model (tensor parallelism); 0 takes one where this machine "
        "shows enough of them, else the CPU, as on a Ray cluster.", ge=0)
    min_engines: int = field(1, "Minimum number of healthy engines; with fewer, the run waits for one to recover.", ge=1)
    urls: tuple[str, ...] = field((), "Engines that already run, instead of starting num_engines; $OFFBEAT_API_KEY is sent as their key.")
    python: str = field(
        "", "Python interpreter of the environment with vLLM or SGLang; empty takes .venv-vllm or .venv-sglang in the working directory.")
    arguments: tuple[str, ...] = field((), "Further arguments for a vLLM or SGLang server, as on its command line.")
    forward: Literal["auto", "direct", "hf"] = field(
        "auto",
        "Forward pass of the embedded engine: a fast path for models like Llama and Qwen, or Hugging Face's modules for any model; auto"
        " prefers the fast path.", on_resume=Change.TOLD)
    quantization: Literal["none", "int8", "int4", "fp8"] = field(
        "none",
        "Form of the weights that engines sample with; the policy that samples then differs from the trainer's, which"
        " policy/logprob_gap_* show and algorithm.weight corrects for. int8 rounds weights and their inputs to 8 bits: in the embedded"
        " engine on a CPU, where products with few rows are about three times as fast, and for models of the fast path; and in vLLM. int4"
        " (weights alone) and fp8 are for vLLM with model.dtype bfloat16; fp8 gains time only on accelerators that compute in it.",
        on_resume=Change.TOLD)
    max_running: int = field(512, "Maximum number of samples decoded together.", ge=1)
    max_queued: int = field(4096, "Maximum number of waiting requests; beyond it the engine answers 429.", ge=1)
    max_context: int = field(0, "Longest prompt plus generation, in tokens; 0 takes the model's context.", ge=0, on_resume=Change.TOLD)
    max_cache_bytes: int = field(
        0,
        "Bytes of the embedded engine's cache of keys and values; a request waits until its longest answer fits. 0 takes a quarter of the "
        "machine's memory, divided among its engines, or half of what is free on an accelerator.", ge=0)
    prefix_caching: bool = field(
        True,
        "Keep what was computed of earlier prompts and answers until the weights change, so that prompts which begin alike, such as the "
        "turns of an agent, compute their rest alone. The numbers are the same up to rounding.")
    batch_invariant: bool | Literal["auto"] = field(
        "auto",
        "Compute each token of the embedded engine to the same bits whatever else is in its batch, so that a synchronous run on one rank "
        "and one engine repeats bit for bit; costs 2 to 16 % of its time in decoding. In float32 on CPUs, by the direct forward alone. "
        "auto does so, where it can, with rollout.max_head_offpolicyness = 0.", on_resume=Change.TOLD)
    seeded_requests: bool = field(
        False,
        "Send a seed with each request of training, a function of run.seed, the prompt, its try, the sample and the turn, so that sampled "
        "tokens do not depend on engines, routing and retries; with batch_invariant, nor on rounding. Off, engines draw their own.",
        on_resume=Change.TOLD)
    max_prefill_per_round: int = field(
        512,
        "Prompt tokens that the embedded engine computes in a round beside samples that decode; a longer prompt takes several rounds. "
        "Lower it for streams that must not pause, raise it for long prompts with short answers.", ge=1)
    threads: int = field(0, "CPU threads per engine; 0 divides the available cores among the run's engines and train ranks.", ge=0)
    max_adapters: int = field(32, "LoRA adapters that an engine holds at once; the least recently used is evicted.", ge=1)
    max_adapter_rank: int = field(64, "Largest rank of an adapter that an engine takes.", ge=1)
    start_timeout_s: float = field(180.0, "Seconds until an engine must answer.", gt=0)
    probe_interval_s: float = field(2.0, "Seconds between two health probes of an engine.", gt=0)
    probe_timeout_s: float = field(
        15.0, "Seconds for an engine to answer a probe before it is quarantined. One that is late but computes, on the machine of "
        "the run, is asked once more, for three times as long.", gt=0)
    stall_timeout_s: float = field(
        60.0, "Seconds for which a step of the embedded engine may compute nothing before the engine counts as hung and is quarantined; a "
        "step that computes may take five times as long. Raise it for a machine that is overloaded or very slow.", gt=0)
    heal_timeout_s: float = field(
        120.0, "Seconds with fewer than min_engines after which the run gives up waiting for an engine to recover.", gt=0)
    request_timeout_s: float = field(
        300.0, "Seconds for one generation request, or token_timeout_s for each token that it may generate if that is more.", gt=0)
    token_timeout_s: float = field(
        1.0, "Seconds allowed for each token that a request may generate, so that long answers are not lost; rollout.episode_timeout_s, "
        "rollout.batch_timeout_s and evaluate.timeout_s grow along.", ge=0)

    @property
    def kind(self) -> EngineKind:
        """Abilities of engines of this kind."""
        return ENGINE_KINDS[self.engine]

    @property
    def form(self) -> WeightForm | None:
        """Form of the weights; None where they stay whole, and where this kind of engine has no such form."""
        return next((form for form in self.kind.forms if form.name == self.quantization), None)

    @field_validator("arguments")
    @classmethod
    def _refuse_key(cls, arguments: tuple[str, ...]) -> tuple[str, ...]:
        """Refuse keys in arguments, because every user of the machine can read command lines."""
        if any(argument.partition("=")[0] == "--api-key" for argument in arguments):
            raise ValueError("a server's arguments must not hold --api-key; leave it out, because the run gives its servers a key")
        return arguments
