"""Small random models of the families that read images, with the settings of their processors. Called by `image_models`.

Each maker takes the settings of a text model, the id of the first of three tokens for images and videos, and whether large images are cut.
"""

import transformers

_SIGLIP = {
    "model_type": "siglip_vision_model", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "image_size": 32, "patch_size": 8, "vision_use_head": False}
_LLAMA = {"model_type": "llama", "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}}


def _idefics3(text, image, splits, name="Idefics3"):
    config = getattr(transformers, f"{name}Config")(
        text_config={**text, **_LLAMA}, vision_config={name: size for name, size in _SIGLIP.items() if name not in (
            "model_type", "vision_use_head")}, scale_factor=2, image_token_id=image, pad_token_id=text["pad_token_id"],
        tie_word_embeddings=False)
    processor = {
        "image_processor_type": f"{name}ImageProcessor", "processor_class": f"{name}Processor", "do_image_splitting": splits,
        "size": {"longest_edge": 64 if splits else 32}, "max_image_size": {"longest_edge": 32}, "image_seq_len": 4}
    return getattr(transformers, f"{name}ForConditionalGeneration")(config), processor


def _smolvlm(text, image, splits):
    return _idefics3(text, image, splits, "SmolVLM")


def _qwen_vl(text, image, name, patch, **vision):
    head = text["head_dim"]
    rope = {"rope_type": "default", "mrope_section": [head // 8, head // 8, head // 4], "rope_theta": 10_000.0}
    rope |= {"mrope_interleaved": True} if name.startswith("Qwen3") else {}
    config = getattr(transformers, f"{name}Config")(
        text_config={**text, "rope_parameters": rope},
        vision_config={"depth": 2, "num_heads": 2, "patch_size": patch, "spatial_merge_size": 2, "temporal_patch_size": 2, **vision},
        image_token_id=image, video_token_id=image + 1, vision_start_token_id=image + 2, tie_word_embeddings=False)
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen2_5_VLProcessor", "patch_size": patch, "merge_size": 2,
        "temporal_patch_size": 2, "size": {"shortest_edge": (2 * patch) ** 2, "longest_edge": (6 * patch) ** 2}}
    return getattr(transformers, f"{name}ForConditionalGeneration")(config), processor


def _qwen2_vl(text, image, _splits):
    return _qwen_vl(text, image, "Qwen2VL", 7, embed_dim=16, hidden_size=text["hidden_size"])


def _qwen2_5_vl(text, image, _splits):
    return _qwen_vl(
        text, image, "Qwen2_5_VL", 7, hidden_size=16, intermediate_size=24, out_hidden_size=text["hidden_size"], window_size=28,
        fullatt_block_indexes=[1])


def _qwen3_vl(text, image, _splits, name="Qwen3VL"):
    return _qwen_vl(
        text, image, name, 7, hidden_size=16, intermediate_size=24, out_hidden_size=text["hidden_size"], num_position_embeddings=16,
        deepstack_visual_indexes=[0, 1])


def _qwen3_vl_moe(text, image, splits):
    return _qwen3_vl(
        {**text, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "norm_topk_prob": True}, image,
        splits, "Qwen3VLMoe")


def _gemma3(text, image, _splits):
    theta = {"rope_type": "default", "rope_theta": 10_000.0}
    own = {
        **text, "query_pre_attn_scalar": text["head_dim"], "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {"sliding_attention": theta, "full_attention": theta}}
    config = transformers.Gemma3Config(
        text_config=own, vision_config=_SIGLIP, mm_tokens_per_image=4, image_token_index=image + 1, boi_token_index=image,
        eoi_token_index=image + 3, tie_word_embeddings=False, pad_token_id=text["pad_token_id"], eos_token_id=text["eos_token_id"])
    processor = {
        "image_processor_type": "Gemma3ImageProcessor", "processor_class": "Gemma3Processor", "size": {"height": 32, "width": 32}}
    return transformers.Gemma3ForConditionalGeneration(config), processor


def _llava_onevision(text, image, _splits):
    sizes = [[32, 32], [32, 64], [64, 32], [64, 64]]
    config = transformers.LlavaOnevisionConfig(
        text_config={**text, **_LLAMA}, vision_config=_SIGLIP, image_token_index=image, video_token_index=image + 1,
        image_grid_pinpoints=sizes, tie_word_embeddings=False)
    processor = {
        "image_processor_type": "LlavaOnevisionImageProcessor", "processor_class": "LlavaOnevisionProcessor",
        "size": {"height": 32, "width": 32}, "image_grid_pinpoints": sizes}
    return transformers.LlavaOnevisionForConditionalGeneration(config), processor


def _internvl(text, image, splits):
    vision = {
        "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": [32, 32],
        "patch_size": [8, 8]}
    config = transformers.InternVLConfig(
        text_config={**text, **_LLAMA}, vision_config=vision, image_token_id=image, image_seq_length=4, tie_word_embeddings=False)
    processor = {
        "image_processor_type": "GotOcr2ImageProcessor", "processor_class": "InternVLProcessor", "size": {"height": 32, "width": 32},
        "max_patches": 4 if splits else 1}
    return transformers.InternVLForConditionalGeneration(config), processor


MAKERS = {
    "gemma3": _gemma3, "idefics3": _idefics3, "internvl": _internvl, "llava_onevision": _llava_onevision, "qwen2_5_vl": _qwen2_5_vl,
    "qwen2_vl": _qwen2_vl, "qwen3_vl": _qwen3_vl, "qwen3_vl_moe": _qwen3_vl_moe, "smolvlm": _smolvlm}
