"""[model]: the causal language model that is trained."""

from typing import Literal

from offbeat.config.base import Change, Section, field

NumberFormat = Literal["float32", "bfloat16"]

NF4_BLOCK = 64
"""Numbers that share a scale in nf4, as in the paper; the scales themselves stay in float32."""

ROUNDED_BYTES = {"none": 0.0, "int8": 1.0, "nf4": 0.5 + 4 / NF4_BLOCK}
"""Bytes of a number that is rounded (`model.quantization`), its share of scales in nf4 included."""


class TinyConfig(Section):
    """A small Qwen3-architecture model made from random weights, for tests and first runs."""

    on_resume = Change.CONTENT

    hidden_size: int = field(128, "Width of the residual stream.", ge=8)
    num_layers: int = field(4, "Decoder layers.", ge=1)
    num_heads: int = field(4, "Query heads.", ge=1)
    num_kv_heads: int = field(2, "Key and value heads; divides num_heads.", ge=1)
    head_dim: int = field(32, "Width of one head.", ge=4)
    intermediate_size: int = field(256, "Width of the feed-forward layer.", ge=8)
    max_positions: int = field(512, "Context length in tokens.", ge=8)


class LoraConfig(Section):
    """Low-rank adapters on a frozen model (Hu et al. 2021), in PEFT's terms."""

    on_resume = Change.REFUSED

    rank: int = field(0, "Rank of the adapter; 0 trains the whole model.", ge=0, basic=True)
    alpha: float = field(32.0, "The adapter's output is scaled by alpha / rank.", gt=0)
    targets: tuple[str, ...] = field(
        ("all-linear",), "Names of the linear layers to adapt, such as q_proj (the last part of the full name); all-linear adapts every"
        " linear layer of the decoder, and experts, which may stand beside others, those that a mixture of experts holds in fused tensors.")
    dropout: float = field(
        0.0, "Share of the adapter's inputs dropped in supervised training (`offbeat sft`, the warm-up); never in RL, whose "
        "log-probabilities must be the policy's. Must be 0 with many tenants, whose masks would depend on each other.", ge=0, lt=1,
        on_resume=Change.TOLD)


class ModelConfig(Section):
    """The model and its number format."""

    path: str = field(
        "", "Folder or hub id of a Hugging Face causal language model; empty builds the one described under `tiny`.",
        on_resume=Change.CONTENT, basic=True)
    tokenizer: str = field(
        "", "Folder or hub id of a tokenizer; empty takes the model's, or the built-in one for a tiny model, which has a token for each"
        " digit, lower-case letter, space, line break and `+-*/=()>,.?#:`, and for nothing else, such as capital letters.",
        on_resume=Change.CONTENT)
    dtype: Literal["auto", NumberFormat] = field(
        "float32", "Number format of the engines' weights; the trainer keeps float32 masters. float32 makes both agree to 1e-4."
        ' "auto" takes bfloat16 where engines compute on devices or CPUs with instructions for it, such as AMX.'
        " On other CPUs, bfloat16 is many times slower than float32.", on_resume=Change.TOLD)
    route_replay: Literal["off", "rollout", "old_policy"] = field(
        "off", 'Experts that a mixture of experts uses in training: "rollout" takes those that each token used when the engine sampled, so'
        " that rounding cannot send it elsewhere; the trainer weighs them by its own scores. \"old_policy\" takes those of the trainer's"
        " policy before the first of a step's several updates. The default lets routers choose again: dense models have none, not all"
        " engines give experts, and they take a byte per token, layer and expert on the way.",
        on_resume=Change.TOLD)
    support_replay: Literal["auto", "rollout", "off"] = field(
        "auto", 'Tokens over which the trainer normalises where rollout.top_p, rollout.top_k or a workflow leaves tokens out at sampling:'
        ' "rollout" takes those among which the engine drew each token, so that both compute the same distribution; "off" takes all, so'
        ' that ratios to the policy that sampled are wrong. "auto" is "rollout" where engines return them and there is no teacher,'
        " which scores over all tokens. Without such settings it changes nothing.", on_resume=Change.TOLD)
    quantization: Literal["none", "int8", "nf4"] = field(
        "none", "Form of the frozen weights that an adapter is trained over (QLoRA), in the decoder's linear layers: int8 takes a byte for"
        " each, nf4 a little more than half a byte, and needs offbeat[qlora]. They are made whole for each product. Engines have their own"
        " (inference.quantization); the difference is corrected for like theirs.", on_resume=Change.TOLD)
    lora: LoraConfig = field(LoraConfig(), "Train an adapter instead of the whole model.")
    tiny: TinyConfig = field(TinyConfig(), "Sizes of the model that is built when `path` is empty.")

    @property
    def number_format(self) -> NumberFormat:
        """Number format of the engines' weights; float32 while `dtype` is open."""
        return "float32" if self.dtype == "auto" else self.dtype
