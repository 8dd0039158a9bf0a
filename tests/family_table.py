"""The families of docs/models.md: tiny random configurations with what makes each special (windows, caps, sinks, ropes, experts, states).

Weights are strong, so that every token depends on its whole context, and windows shorter than the sequences that `families.py` runs.
"""

from dataclasses import dataclass, field
from typing import Any

LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [3.0, 4.0, 5.0, 6.0],
            "original_max_position_embeddings": 24}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
EXPERTS = ("model.layers.0.mlp.experts.0.gate_proj.weight", "model.layers.0.mlp.experts.3.down_proj.weight")
MIXTRAL_EXPERTS = ("model.layers.0.block_sparse_moe.experts.0.w1.weight", "model.layers.0.block_sparse_moe.gate.weight")
LINEAR_SIZES = {
    "linear_conv_kernel_dim": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "layer_types": ["linear_attention", "full_attention"],
}
MLA = {"q_lora_rank": 12, "kv_lora_rank": 12, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 6, "n_routed_experts": 4,
       "n_shared_experts": 1, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "moe_intermediate_size": 12, "head_dim": 4,
       "num_key_value_heads": 4, "num_experts_per_tok": 1}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_d_conv": 2, "mamba_expand": 2, "mamba_n_groups": 1,
         "mamba_d_ssm": 64, "mamba_chunk_size": 8}


@dataclass(frozen=True)
class Family:
    """One row of the table.

    Attributes:
        name: what users call it.
        model_type: of its config.json, for `AutoConfig`.
        settings: beside the common sizes; None removes one of those.
        names: weights that its published checkpoints hold under these names.
        remark: what the row stands for, where the name does not say it.
    """

    name: str
    model_type: str
    settings: dict[str, Any] = field(default_factory=dict)
    names: tuple[str, ...] = ("model.layers.0.self_attn.q_proj.weight",)
    remark: str = ""


SIZES = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "intermediate_size": 48, "max_position_embeddings": 128, "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0,
}

SLIDING_FULL = ["sliding_attention", "full_attention"]

FAMILIES = (
    Family("Llama 2", "llama"),
    Family("Llama 3.x", "llama", {"rope_parameters": LLAMA3}, remark="llama3 rope"),
    Family("Llama, linear rope", "llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
    Family("Llama, dynamic rope", "llama", {"rope_parameters": DYNAMIC, "max_position_embeddings": 24}, remark="up to its context"),
    Family("Mistral", "mistral", {"sliding_window": 5}, remark="window of all layers"),
    Family("Mixtral", "mixtral", {"num_local_experts": 4, "sliding_window": None}, names=MIXTRAL_EXPERTS),
    Family("Qwen2", "qwen2"),
    Family("Qwen2 MoE", "qwen2_moe", {**MOE, "shared_expert_intermediate_size": 12}, names=EXPERTS),
    Family("Qwen3", "qwen3", {"tie_word_embeddings": True}),
    Family("Qwen3, yarn", "qwen3", {"rope_parameters": YARN}),
    Family("Qwen3 MoE", "qwen3_moe", MOE, names=EXPERTS),
    Family("Qwen3-Next", "qwen3_next", {**MOE, **LINEAR_SIZES, "shared_expert_intermediate_size": 12}, names=(
        *EXPERTS, "model.layers.0.linear_attn.in_proj_qkvz.weight"), remark="linear attention, experts"),
    Family("Qwen3.5", "qwen3_5_text", LINEAR_SIZES, names=("model.layers.0.linear_attn.in_proj_qkv.weight",), remark="linear attention"),
    Family("Phi-1, Phi-2", "phi", {"partial_rotary_factor": 0.5, "num_key_value_heads": 4}, names=(
        "model.layers.0.self_attn.dense.weight",)),
    Family("Phi-3", "phi3", {"sliding_window": 6}, names=("model.layers.0.self_attn.qkv_proj.weight",), remark="window of all layers"),
    Family("Phi-3 long", "phi3", {"rope_parameters": LONGROPE}, names=(
        "model.layers.0.self_attn.qkv_proj.weight",), remark="LongRoPE, up to the original context"),
    Family("Phi-3.5 MoE", "phimoe", {"num_local_experts": 4}, names=MIXTRAL_EXPERTS),
    Family("Gemma", "gemma"),
    Family("Gemma 2", "gemma2", {"sliding_window": 6, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 8,
                                 "layer_types": SLIDING_FULL}, remark="soft cap, windows"),
    Family("Gemma 3", "gemma3_text", {"sliding_window": 6, "query_pre_attn_scalar": 8, "layer_types": SLIDING_FULL}, remark="windows"),
    Family("Gemma 4", "gemma4_text", {
        "sliding_window": 6, "global_head_dim": 16, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 64,
        "num_hidden_layers": 4, "layer_types": SLIDING_FULL * 2, "num_kv_shared_layers": 2},
           remark="windows, heads of two sizes, shared keys"),
    Family("OLMo 2", "olmo2"),
    Family("OLMo 3", "olmo3", {"sliding_window": 6, "layer_types": SLIDING_FULL}, remark="windows"),
    Family("OLMoE", "olmoe", MOE, names=EXPERTS),
    Family("SmolLM3", "smollm3", {"no_rope_layers": [1, 0]}, remark="layers without rope"),
    Family("Granite", "granite", {"attention_multiplier": 0.3, "residual_multiplier": 0.5, "logits_scaling": 2.0}),
    Family("Granite MoE", "granitemoe", {"num_local_experts": 4, "num_experts_per_tok": 2}, names=(
        "model.layers.0.block_sparse_moe.input_linear.weight",)),
    Family("Command R", "cohere", {"logit_scale": 0.5}),
    Family("Command R7B", "cohere2", {"logit_scale": 0.5, "sliding_window": 6, "layer_types": SLIDING_FULL}, remark="windows"),
    Family("StarCoder 2", "starcoder2", {"sliding_window": 5}, remark="window of all layers"),
    Family("GPT-2", "gpt2", {"num_key_value_heads": None, "head_dim": None, "n_positions": 128}, names=(
        "transformer.h.0.attn.c_attn.weight",)),
    Family("GPT-NeoX", "gpt_neox", {"num_key_value_heads": None, "head_dim": None}, names=(
        "gpt_neox.layers.0.attention.query_key_value.weight",)),
    Family("Falcon", "falcon", {"num_key_value_heads": None, "head_dim": None}, names=(
        "transformer.h.0.self_attention.query_key_value.weight",)),
    Family("BLOOM", "bloom", {"num_key_value_heads": None, "head_dim": None}, names=(
        "transformer.h.0.self_attention.query_key_value.weight",), remark="ALiBi"),
    Family("OPT", "opt", {"ffn_dim": 48, "word_embed_proj_dim": 32, "num_key_value_heads": None, "head_dim": None}, names=(
        "model.decoder.layers.0.self_attn.q_proj.weight",)),
    Family("DeepSeek-V2", "deepseek_v2", MLA, names=("model.layers.1.mlp.experts.0.gate_proj.weight",
                                                     "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"), remark="MLA, experts"),
    Family("DeepSeek-V3", "deepseek_v3", MLA, names=("model.layers.1.mlp.experts.0.gate_proj.weight",
                                                     "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"), remark="MLA, experts"),
    Family("GPT-OSS", "gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 6, "layer_types": SLIDING_FULL},
           names=("model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.self_attn.sinks"), remark="sinks, windows, experts"),
    Family("GLM-4", "glm4"),
    Family("GLM-4.5", "glm4_moe", {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "n_group": 1,
                                   "topk_group": 1, "first_k_dense_replace": 1}, names=("model.layers.1.mlp.experts.0.gate_proj.weight",)),
    Family("EXAONE 4", "exaone4", {"sliding_window": 6, "layer_types": SLIDING_FULL}, remark="windows"),
    Family("ERNIE 4.5", "ernie4_5"),
    Family("Hunyuan", "hunyuan_v1_dense"),
    Family("Seed-OSS", "seed_oss"),
    Family("Nemotron", "nemotron"),
    Family("StableLM", "stablelm"),
    Family("Llama 4", "llama4_text", {
        "num_local_experts": 2, "attention_chunk_size": 6, "intermediate_size_mlp": 48, "no_rope_layers": [1, 0]}, names=(
        "model.layers.0.feed_forward.experts.gate_up_proj",), remark="chunked attention"),
    Family("Falcon-H1", "falcon_h1", MAMBA, names=("model.layers.0.mamba.in_proj.weight",), remark="attention and Mamba side by side"),
    Family("Mamba 2", "mamba2", {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1, "chunk_size": 8,
                                 "num_key_value_heads": None}, names=("backbone.layers.0.mixer.in_proj.weight",), remark="no attention"),
    Family("LFM2", "lfm2", {"layer_types": ["conv", "full_attention"]}, names=("model.layers.0.conv.conv.weight",), remark="convolutions"),
)
