"""A tiny random model of every causal language model that transformers can build.

Sizes are small, and so are all thresholds (windows, chunks, original context lengths, sparse budgets): what a model
does only beyond 4096 tokens it does here beyond 8, or where it is told to. Weights are large enough that every token
depends on what stands before it. A name is a model type of transformers, such as "llama", or one with a variant, such
as "llama/dynamic".
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging as transformers_logging

VOCAB = 64
HIDDEN, HEADS, KEY_HEADS, HEAD = 64, 4, 2, 16
WINDOW = 8
ORIGINAL = 16
"""Context length before which scaled rotary embeddings are not scaled."""
LONGEST = 512
"""Positions that every model has, more than all packed sequences together, so that a model that numbers them through
is wrong instead of failing; but for the variant whose rotary embedding changes where they end."""
SCALE = 0.25
"""Standard deviation of weights."""

_SIZES: list[tuple[int, str]] = [
    (
        HIDDEN,
        "hidden_size n_embd d_model emb_dim embedding_dim embedding_size word_embed_proj_dim lru_width "
        "input_embedding_size output_embedding_size hidden_size_global ple_embed_dim attention_hidden_size",
    ),
    (
        2 * HIDDEN,
        "intermediate_size ffn_dim ffn_hidden_size dim_ff dff d_inner encoder_ffn_dim decoder_ffn_dim "
        "feed_forward_size intermediate_size_mlp dense_intermediate_size prefix_dense_intermediate_size mamba_d_ssm",
    ),
    (
        32,
        "moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size expert_ffn_hidden_size "
        "moe_shared_expert_intermediate_size hidden_size_per_layer_input router_hidden_size",
    ),
    (
        HEAD,
        "head_dim kv_channels dim_head d_head attention_head_size v_head_dim qk_nope_head_dim qk_rope_head_dim "
        "index_head_dim swa_head_dim linear_head_dim linear_key_head_dim linear_value_head_dim mamba_d_head "
        "mamba_head_dim query_pre_attn_scalar kv_lora_rank q_lora_rank o_lora_rank laurel_rank hc_lowrank "
        "gated_norm_rank",
    ),
    (
        WINDOW,
        "sliding_window sliding_window_size attention_window_size window_size local_attention attention_chunk_size "
        "floor_scale log_scaling_n_floor index_topk keep_window_size rel_extent chunk_size mamba_chunk_size block_size "
        "local_attn_chunk_length lsh_attn_chunk_length",
    ),
    (
        8,
        "rotary_dim state_size ssm_state_size mamba_d_state mamba_n_heads mamba_num_heads d_rel adapter_rank "
        "time_step_rank mamba_dt_rank image_size patch_size spatial_dims num_mel_bins",
    ),
    (
        HEADS,
        "num_attention_heads n_head n_heads num_heads attention_heads encoder_attention_heads decoder_attention_heads "
        "num_encoder_attention_heads num_decoder_attention_heads swa_num_attention_heads linear_num_heads "
        "linear_num_value_heads n_mamba_heads num_local_experts num_experts n_routed_experts moe_num_experts "
        "index_block_size index_n_heads",
    ),
    (
        2,
        "num_key_value_heads num_kv_heads swa_num_key_value_heads linear_num_key_heads num_experts_per_tok "
        "num_experts_per_token moe_topk moe_top_k moe_k top_k_experts n_groups mamba_n_groups mamba_ngroups "
        "index_topk_blocks o_groups zero_expert_num n_group num_expert_group hc_mult hc_count altup_num_inputs "
        "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers num_blocks num_encoder_layers "
        "num_decoder_layers depth sliding_window_pattern no_rope_layer_interval global_attn_every_n_layers "
        "attn_layer_period expert_layer_period layer_group_size",
    ),
    (
        1,
        "num_dense_layers first_k_dense_replace max_window_layers attn_layer_offset expert_layer_offset topk_group "
        "n_shared_experts num_shared_experts moe_num_shared_experts moe_layer_start_index moe_layer_end_index",
    ),
    (LONGEST, "max_position_embeddings n_positions n_ctx max_seq_len model_max_length context_length"),
    (ORIGINAL, "original_max_position_embeddings"),
]
_WINDOWS = {*next(names for size, names in _SIZES if size == WINDOW).split(), "indexer_budget"}
SMALL: dict[str, Any] = {name: size for size, names in _SIZES for name in names.split()} | {
    "use_sliding_window": True,
    "is_decoder": True,
    "is_encoder": False,
    "num_nextn_predict_layers": 0,
    "attn_temperature_tuning": True,
    "use_associative_scan": False,
    "use_mamba_kernels": False,
    # Factors that are 1 or out of reach by default, so that one forgotten would go unnoticed.
    "embedding_multiplier": 1.5,
    "residual_multiplier": 0.8,
    "attention_multiplier": 0.3,
    "logits_scaling": 0.8,
    "logit_scale": 0.7,
    "lm_head_multiplier": 0.8,
    "logits_mup_width_multiplier": 0.8,
    "routed_scaling_factor": 1.5,
    "attn_logit_softcapping": 4.0,
    "final_logit_softcapping": 5.0,
    "logits_soft_cap": 5.0,
    "output_logit_soft_cap": 5.0,
    "clip_qkv": 3.0,
}
"""What a configuration is given under each name that it knows."""

LAYERS = ("layer_types", "layers_block_type", "mlp_layer_types", "indexer_types", "block_types")
"""Lists with one entry per layer."""
WINDOWED = ["sliding_attention", "full_attention"]
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": ORIGINAL,
    "factor": LONGEST / ORIGINAL,
    "short_factor": [1.0] * (HEAD // 2),
    "long_factor": [1.0 + i / 4 for i in range(HEAD // 2)],
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": ORIGINAL,
    "factor": LONGEST / ORIGINAL,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_HYBRIDS: dict[str, Any] = {
    "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
    "num_key_value_heads": HEADS,
    "attention_hidden_size": 2 * HIDDEN,
    "attention_head_dim": 2 * HEAD,
}
_SHARED_KEYS: dict[str, Any] = {"layer_types": WINDOWED * 2, "num_kv_shared_layers": 2}

_MIXERS = re.compile(
    r"Attention$|Mixer$|Mamba2?$|DeltaNet|ShortConv|RecurrentBlock|CCA$|LSTMLayer$|Indexer$|DeltaAttention$|MLA$"
)

SPECIAL: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "blt": {"encoder_hash_byte_group_vocab": 64, "use_cache": False},
    "cohere_compass_text": {"rope_parameters": dict.fromkeys(WINDOWED, PLAIN_ROPE)},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2}},
    "deepseek_v4": {
        "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
    },
    "gemma2": {"attn_implementation": "eager"},  # transformers before 5.18 drop the cap in others, and we step aside
    "gemma3n_text": {**_SHARED_KEYS, "activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0]},
    "gemma4_text": {"global_head_dim": 2 * HEAD},
    "gemma4_unified_text": {"global_head_dim": 2 * HEAD},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"], "position_embedding_type": "rope"},
    "hrm_text": {"H_cycles": 1, "L_cycles": 1, "L_bp_cycles": [1], "embedding_scale": 2.0},
    "inkling_text": {"unpadded_vocab_size": VOCAB - 5},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"head_dim": 2 * HEAD},
    "minicpm3": {"scale_emb": 2, "dim_model_base": 48},
    "minimax_m3_vl_text": {
        "layer_types": ["minimax_m3_sparse", "full_attention"],
        "mlp_layer_types": ["sparse", "dense"],
    },
    "phi3": {"rope_parameters": LONGROPE},
    "phi4_multimodal": {"rope_parameters": LONGROPE},
    "phimoe": {"rope_parameters": {**LONGROPE, "short_mscale": 1.1, "long_mscale": 1.3}},
    "qwen4_exp_text": {
        "indexer_n_heads": HEADS,
        "indexer_kv_heads": 1,
        "indexer_head_dim": HEAD,
        "indexer_budget": WINDOW,
        "indexer_compress_ratio": 2,
        "layer_types": ["linear_attention", "indexed_attention"],
    },
    "roc_bert": {
        "pronunciation_vocab_size": VOCAB,
        "pronunciation_embed_dim": HEAD,
        "shape_vocab_size": VOCAB,
        "shape_embed_dim": HEAD,
    },
    "xlstm": {"qk_dim_factor": 1.0},
    "xmod": {"default_language": "en_XX"},
    "zamba": _HYBRIDS,
    "zamba2": _HYBRIDS,
    "zaya": {"num_experts_per_tok": 1, "layer_types": ["hybrid", "hybrid_sliding"]},
}
"""What a model type is given beyond `SMALL`."""

VARIANTS: dict[str, dict[str, Any]] = {
    "bloom/sequential": {"apply_residual_connection_post_layernorm": True},
    "cohere/normed": {"use_qk_norm": True},
    "deepseek_v2/one_rank": {"q_lora_rank": None},
    "deepseek_v3/yarn": {"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}},
    "falcon/alibi": {"alibi": True, "parallel_attn": False, "bias": True, "multi_query": False, "num_kv_heads": HEADS},
    "falcon/new": {"new_decoder_architecture": True},
    "gemma2/full": {"layer_types": ["full_attention"], "attn_logit_softcapping": None},
    "gemma4_text/experts": {
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 32,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
    },
    "gemma4_text/shared": {**_SHARED_KEYS, "use_double_wide_mlp": True},
    "gpt2/scaled": {"scale_attn_by_inverse_layer_idx": True, "reorder_and_upcast_attn": True},
    "gpt_bigcode/heads": {"multi_query": False},
    "gpt_neox/sequential": {"use_parallel_residual": False},
    "granitemoehybrid/nope": {"position_embedding_type": None},
    "llama/dynamic": {"rope_parameters": DYNAMIC, "max_position_embeddings": ORIGINAL},
    "llama/longrope": {"rope_parameters": LONGROPE},
    "llama/biased": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "llama/yarn": {"rope_parameters": YARN},
    "mistral/full": {"sliding_window": None},
    "mixtral/full": {"sliding_window": None},
    "opt/projected": {"word_embed_proj_dim": 32, "do_layer_norm_before": False},
    "phi3/plain": {"rope_parameters": PLAIN_ROPE, "sliding_window": None},
    "phimoe/plain": {"rope_parameters": PLAIN_ROPE, "sliding_window": None},
    "qwen2/full": {"use_sliding_window": False, "layer_types": ["full_attention"], "sliding_window": None},
    "qwen3/full": {"use_sliding_window": False, "layer_types": ["full_attention"], "sliding_window": None},
    "qwen2_moe/full": {"use_sliding_window": False, "layer_types": ["full_attention"], "sliding_window": None},
    "qwen3_moe/full": {"use_sliding_window": False, "sliding_window": None, "mlp_only_layers": [0]},
    "qwen4_exp_text/embeddings": {"ple_layer_ids": [1], "ngram_vocab_size_base": 64, "split_ngram_parts": 1},
    "smollm3/full": {"use_sliding_window": False, "layer_types": ["full_attention"], "sliding_window": None},
    "stablelm/parallel": {"use_parallel_residual": True, "qk_layernorm": True, "use_qkv_bias": True},
    "zamba2/rope": {"use_mem_rope": True, "use_shared_attention_adapter": True, "num_mem_blocks": 2},
}
"""Other configurations of a model type that take another path through its code."""

UNBUILDABLE: dict[str, str] = {
    "cpmant": "not causal: it reads its input in both directions",
    "gemma3n": "its vision tower needs timm; gemma3n_text is the language model",
    "gemma4_assistant": "a drafter that reads another model's states",
    "gemma4_unified_assistant": "a drafter that reads another model's states",
    "gpt-sw3": "the same classes as gpt2",
    "llama4": "the same model as llama4_text",
    "musicgen": "its tokens are codebooks of audio",
    "musicgen_melody": "its tokens are codebooks of audio",
    "qwen3_5": "the same model as qwen3_5_text",
    "qwen3_5_moe": "the same model as qwen3_5_moe_text",
    "qwen4_exp": "the same model as qwen4_exp_text",
    "reformer": "not causal: its hashed attention sorts the whole sequence",
    "xlm": "transformers runs it as an encoder only",
    "xlnet": "not causal: it is trained on permutations",
}
"""Model types that are left out, and why."""


def architectures() -> list[str]:
    """Every model type that `build` can make."""
    return [name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name not in UNBUILDABLE]


def variants() -> list[str]:
    """Names of other configurations of some model types, which `build` takes too."""
    return list(VARIANTS)


def build(model_type: str, *, vocab: int = VOCAB, seed: int = 0, threshold: int = WINDOW) -> Any:
    """A tiny model with random weights, on the CPU, in float32 and evaluation mode.

    Windows, chunks and budgets are of `threshold` tokens, original context lengths of twice as many.
    """
    name = model_type.partition("/")[0]
    if name in UNBUILDABLE:
        raise ValueError(f"{name} is left out: {UNBUILDABLE[name]}")
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(
        config(model_type, vocab=vocab, threshold=threshold), dtype=torch.float32
    ).eval()
    _randomise(model)
    return model


def config(model_type: str, *, vocab: int = VOCAB, threshold: int = WINDOW) -> PreTrainedConfig:
    """The small configuration of a model type or variant."""
    name = model_type.partition("/")[0]
    own = {**SPECIAL.get(name, {}), **VARIANTS.get(model_type, {})}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _small(CONFIG_MAPPING[name], vocab, threshold, own)


def kinds(model: Any) -> str:
    """What mixes the tokens in a model: classes of modules, kinds of layers, and types of rotary embeddings."""
    text = model.config.get_text_config(decoder=True)
    found = [name for name in (type(module).__name__ for module in model.modules()) if _MIXERS.search(name)]
    for name in LAYERS:
        found += [str(kind) for kind in getattr(text, name, None) or []]
    rope = getattr(text, "rope_parameters", None) or {}
    types = [entry.get("rope_type") for entry in [rope, *rope.values()] if isinstance(entry, Mapping)]
    found += [str(kind) for kind in types if kind not in (None, "default")]
    if getattr(text, "sliding_window", None) and not any("sliding" in kind for kind in found):
        found.append("sliding_window")
    return ", ".join(dict.fromkeys(found))


@cache
def _default(config_class: type[PreTrainedConfig]) -> PreTrainedConfig:
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        return config_class()
    finally:
        transformers_logging.set_verbosity(before)


def _small(
    config_class: type[PreTrainedConfig], vocab: int, threshold: int, own: Mapping[str, Any]
) -> PreTrainedConfig:
    default = _default(config_class)
    given = {**SPECIAL.get(config_class.model_type, {}), **own}
    values = default.to_dict()
    names = [*values, *(name for name in config_class.attribute_map if name not in values)]
    wanted: dict[str, Any] = {}
    for name in names:
        part = default.__dict__.get(name)
        if isinstance(part, PreTrainedConfig):
            wanted[name] = _small(type(part), vocab, threshold, given.get(name, {})).to_dict()
        elif name.startswith("vocab_size"):
            wanted[name] = vocab
        elif name in ("initializer_range", "init_std"):
            wanted[name] = SCALE
        elif name.endswith(("dropout", "pdrop", "dropout_prob", "layerdrop")) and isinstance(values.get(name), float):
            wanted[name] = 0.0
        elif name in SMALL and not (name.endswith(("capping", "_cap", "logit_scale")) and values.get(name) is None):
            wanted[name] = SMALL[name]
    if "kv_lora_rank" in names:  # keys are made for every head
        wanted["num_key_value_heads"] = HEADS
    wanted |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    rope = values.get("rope_parameters") or {}
    if "original_max_position_embeddings" in rope:
        wanted["rope_parameters"] = {**rope, "original_max_position_embeddings": ORIGINAL}
    wanted |= _layers(default, given)
    parts = {name for name, value in default.__dict__.items() if isinstance(value, PreTrainedConfig)}
    wanted |= {name: value for name, value in given.items() if name not in parts and name not in LAYERS}
    for name, target in config_class.attribute_map.items():  # two names of one thing
        if name in wanted and target in wanted:
            del wanted[name]
    settable = {name for name in wanted if not isinstance(getattr(config_class, name, None), property)}
    return config_class(**_moved({name: value for name, value in wanted.items() if name in settable}, threshold))


def _moved(values: Mapping[str, Any], threshold: int) -> dict[str, Any]:
    """With all thresholds where they are wanted."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            found[name] = _moved(value, threshold)
        elif name in _WINDOWS and value == WINDOW:
            found[name] = threshold
        elif str(name).endswith("max_position_embeddings") and value == ORIGINAL:
            found[name] = 2 * threshold
        else:
            found[name] = value
    return found


def _layers(default: PreTrainedConfig, given: Mapping[str, Any]) -> dict[str, Any]:
    """As many layers as there are kinds of them, one of each."""
    found: dict[str, list[str]] = {}
    for name in LAYERS:
        entries = given.get(name) or list(dict.fromkeys(getattr(default, name, None) or []))
        if entries == ["full_attention"] and name not in given and hasattr(default, "sliding_window"):
            entries = WINDOWED
        if entries:
            found[name] = entries
    if not found:
        return {}
    count = max(2, *(len(kinds) for kinds in found.values()))
    return {"num_hidden_layers": count} | {
        name: [kinds[i % len(kinds)] for i in range(count)] for name, kinds in found.items()
    }


def _randomise(model: nn.Module) -> None:
    """Weights that are flat or zero by initialisation are drawn anew; vectors get noise."""
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.is_floating_point():
                continue
            if parameter.ndim > 1 and parameter.numel() > 1 and float(parameter.std()) < SCALE / 2:
                parameter.normal_(0.0, SCALE)
            elif parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
