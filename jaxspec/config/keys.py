"""The keys of a `config.json` that are read, and the types and ranges of their values."""

import dataclasses
import types
from collections.abc import Callable, ItemsView, Iterator, Mapping
from copy import copy
from typing import Any, Union, get_args, get_origin, get_type_hints

from jaxspec.config.errors import INT32_MAX, ConfigError

Check = Callable[[Any], str | None]
"""Takes a value that is not null; returns what is wrong with it, as "must be …", or None."""


class Keys(Mapping[str, Any]):
    """The contents of a `config.json` that remember which keys were asked for, by name or by `{**keys}`.

    Iterating asks for none, nor does `items`. Whoever asks for an object asks for all that is in it, unless
    it does so by `inner`.
    """

    def __init__(self, values: Mapping[str, Any]):
        self._values, self._prefix = values, ""
        self._asked: set[str] = set()
        self._there = dict(values.items())

    def __getitem__(self, key: str) -> Any:
        self._asked.add(self._prefix + key)
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def items(self) -> ItemsView[str, Any]:
        return self._values.items()

    def with_values(self, values: Mapping[str, Any], prefix: str | None = None) -> "Keys":
        """Other contents; what is asked for is remembered here, too, with `prefix` before its name."""
        keys = copy(self)
        keys._values, keys._prefix = values, self._prefix if prefix is None else prefix
        return keys

    def inner(self, key: str, *, is_named: bool = True) -> "Keys":
        """The object of this name, whose keys are remembered one by one; an empty one if there is none.

        Args:
          is_named: whether its keys are "key.name" for `unread`; otherwise they are as those beside it.
        """
        values = self.get(key) or {}
        prefix = f"{self._prefix}{key}." if is_named else self._prefix
        self._there |= {prefix + name: value for name, value in values.items()}
        return self.with_values(values, prefix)

    def unread(self) -> dict[str, Any]:
        """The keys that nobody asked for and that may mean something, with their values.

        Null, false, 0 and what is empty stand for what is not there.
        """
        return {
            name: value
            for name, value in self._there.items()
            if name not in self._asked
            and name.rpartition(".")[2] not in _WITHOUT_MEANING
            and (value not in (None, False, [], {}) or (value is False and UNCHANGED.get(name) is True))
        }


def inner_keys(config: Mapping[str, Any], key: str, *, is_named: bool = True) -> Mapping[str, Any]:
    """`Keys.inner`, also of a configuration that remembers nothing."""
    return config.inner(key, is_named=is_named) if isinstance(config, Keys) else config.get(key) or {}


def joined(*configs: Mapping[str, Any]) -> Mapping[str, Any]:
    """The keys of several configurations, of which the last one with a key counts.

    It remembers what is asked for if one of them does.
    """
    values = {key: value for config in configs for key, value in config.items()}
    keys = next((config for config in configs if isinstance(config, Keys)), None)
    return values if keys is None else keys.with_values(values)


def check_keys(config: Mapping[str, Any], name: str = "config.json") -> None:
    """Checks the types and ranges of all values, also in nested objects; unknown keys are ignored.

    Null is allowed, since most keys are optional. The bounds are far beyond any published model, but small
    enough that the shapes that follow from a config can be compared with its checkpoint in a short time.

    Args:
      config: the contents of a `config.json`.
      name: the file, for messages.

    Raises:
      ConfigError: a value has the wrong type or is out of range; the message names the key.
    """
    for key, value in config.items():
        check = KEYS.get(key)
        if check is None or value is None:
            continue
        if problem := check(value):
            raise ConfigError(f"{name}: {key} {problem}, got {value!r}")
        if isinstance(value, Mapping):
            check_keys(value, name)


def without_nulls(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config without null values, also in nested objects, except for keys where null says something."""
    kept = {key: value for key, value in config.items() if value is not None or key in _NULL_SAYS_NONE}
    return {key: without_nulls(value) if isinstance(value, Mapping) else value for key, value in kept.items()}


def own_values(kind: type, base: type, config: Mapping[str, Any]) -> dict[str, Any]:
    """The values of those fields of a dataclass that `base` lacks: the keys of a config with their names.

    Args:
      kind: a subclass of the dataclass `base`; a field of another type than those of `config.json` is left to
        the caller.
      config: the contents of a `config.json`, checked by `check_keys` and without nulls.

    Raises:
      ConfigError: a value does not have its field's type.
    """
    inherited, hints = {field.name for field in dataclasses.fields(base)}, get_type_hints(kind)
    values: dict[str, Any] = {}
    for field in dataclasses.fields(kind):
        check = _OF_TYPE.get(_without_none(hints[field.name]))
        if field.name in inherited or check is None or config.get(field.name) is None:
            continue
        value = config[field.name]
        if problem := check(value):
            raise ConfigError(f"config.json: {field.name} {problem}, got {value!r}")
        values[field.name] = tuple(value) if isinstance(value, list) else value
    return values


def _without_none(hint: Any) -> Any:
    """T of `T | None`; any other type itself."""
    others = [each for each in get_args(hint) if each is not types.NoneType]
    return others[0] if get_origin(hint) in (Union, types.UnionType) and len(others) == 1 else hint


def _number(words: str, types: tuple[type, ...], low: float, high: float) -> Check:
    def check(value: Any) -> str | None:
        # Not isinstance, for which booleans are integers. `not >=` also catches NaN.
        if type(value) not in types or not value >= low:
            return f"must be {words}"
        return f"must be at most {high}" if value > high else None

    return check


def _count(high: int, *, low: int = 1) -> Check:
    return _number("a positive integer" if low == 1 else "a whole number from 0 on", (int,), low, high)


def _real(words: str, low: float, high: float = 1e30) -> Check:
    return _number(words, (int, float), low, high)


def _one_of(words: str, fits: Callable[[Any], bool]) -> Check:
    return lambda value: None if fits(value) else f"must be {words}"


def _list(words: str, item: type) -> Check:
    return _one_of(
        words, lambda value: isinstance(value, list | tuple) and all(type(each) is item for each in value)
    )


_OBJECT = _one_of("an object", lambda value: isinstance(value, Mapping))
_TEXT = _one_of("a string", lambda value: isinstance(value, str))
_FLAG = _one_of("true or false", lambda value: isinstance(value, bool))
_TEXTS, _INTEGERS = _list("a list of strings", str), _list("a list of integers", int)
_SIZE, _DEPTH, _EXPERTS, _POSITIONS = _count(2**24), _count(1024), _count(4096), _count(INT32_MAX)
_FEW = _count(64, low=0)
_REAL, _POSITIVE = _real("a number", -1e30), _real("a number above 0", 1e-30)
_NOT_NEGATIVE = _real("a number, 0 or more", 0.0)
_FACTORS = _one_of(
    "a list of numbers above 0",
    lambda value: isinstance(value, list | tuple) and not any(_POSITIVE(each) for each in value),
)
_OF_TYPE: Mapping[Any, Check] = {
    bool: _FLAG,
    int: _number("an integer", (int,), -INT32_MAX, INT32_MAX),
    float: _REAL,
    str: _TEXT,
    tuple[int, ...]: _INTEGERS,
    tuple[str, ...]: _TEXTS,
}
# Frequencies are powers of theta, and YaRN divides by its logarithm.
_THETA = _real("a number above 1", 1.001)

KEYS: Mapping[str, Check] = {
    "text_config": _OBJECT,
    "transformer_layer_config": _OBJECT,
    "eagle_config": _OBJECT,
    "dflash_config": _OBJECT,
    "speculators_config": _OBJECT,
    "verifier": _OBJECT,
    "quantization_config": _OBJECT,
    "compression_config": _OBJECT,
    "rope_scaling": _OBJECT,
    "rope_parameters": _OBJECT,
    "per_layer_config": _OBJECT,
    "main": _OBJECT,
    "compress": _OBJECT,
    "compress_rates": _OBJECT,
    "full_attention": _OBJECT,
    "sliding_attention": _OBJECT,
    "model_type": _TEXT,
    "hidden_act": _TEXT,
    "markov_head_type": _TEXT,
    "hidden_activation": _TEXT,
    "rope_type": _TEXT,
    "type": _TEXT,
    "quant_method": _TEXT,
    "hybrid_override_pattern": _TEXT,
    "mtp_hybrid_override_pattern": _TEXT,
    "tie_word_embeddings": _FLAG,
    "attention_bias": _FLAG,
    "mlp_bias": _FLAG,
    "conv_bias": _FLAG,
    "tie_embedding": _FLAG,
    "block_auto_adjust_ff_dim": _FLAG,
    "bias": _FLAG,
    "use_sliding_window": _FLAG,
    "norm_topk_prob": _FLAG,
    "use_conv_bias": _FLAG,
    "use_bias": _FLAG,
    "attention_k_eq_v": _FLAG,
    "enable_moe_block": _FLAG,
    "use_double_wide_mlp": _FLAG,
    "rope_interleave": _FLAG,
    "truncate": _FLAG,
    "norm_before_residual": _FLAG,
    "norm_output": _FLAG,
    "enable_confidence_head": _FLAG,
    "confidence_head_with_markov": _FLAG,
    "sample_from_anchor": _FLAG,
    "causal_head": _FLAG,
    "use_aux_hidden_state": _FLAG,
    "sliding_window_non_causal": _FLAG,
    "causal": _FLAG,
    "is_causal": _FLAG,
    "use_ordered_embeddings": _FLAG,
    "architectures": _TEXTS,
    "layer_types": _TEXTS,
    "layers_block_type": _TEXTS,
    "mtp_layers_block_type": _TEXTS,
    "mlp_layer_types": _TEXTS,
    "mlp_only_layers": _INTEGERS,
    "full_attn_idxs": _INTEGERS,
    "attn_type_list": _INTEGERS,
    "no_rope_layers": _INTEGERS,
    "compress_ratios": _INTEGERS,
    "vocab_size": _SIZE,
    "hidden_size": _SIZE,
    "intermediate_size": _SIZE,
    "block_ff_dim": _SIZE,
    "block_multiple_of": _SIZE,
    "head_dim": _SIZE,
    "rotary_dim": _SIZE,
    "global_head_dim": _SIZE,
    "num_global_key_value_heads": _SIZE,
    "hidden_size_per_layer_input": _count(2**24, low=0),
    "vocab_size_per_layer_input": _count(2**24, low=0),
    "num_attention_heads": _SIZE,
    "num_key_value_heads": _SIZE,
    "moe_intermediate_size": _SIZE,
    "shared_expert_intermediate_size": _SIZE,
    "linear_num_key_heads": _SIZE,
    "linear_num_value_heads": _SIZE,
    "linear_key_head_dim": _SIZE,
    "linear_value_head_dim": _SIZE,
    "linear_conv_kernel_dim": _FEW,
    "conv_L_cache": _count(64),
    "moe_shared_expert_intermediate_size": _SIZE,
    "moe_latent_size": _SIZE,
    "mamba_num_heads": _SIZE,
    "mamba_head_dim": _SIZE,
    "n_groups": _SIZE,
    "ssm_state_size": _SIZE,
    "conv_kernel": _FEW,
    "q_lora_rank": _SIZE,
    "kv_lora_rank": _SIZE,
    "qk_nope_head_dim": _SIZE,
    "qk_rope_head_dim": _SIZE,
    "v_head_dim": _SIZE,
    "target_hidden_size": _SIZE,
    "backbone_hidden_size": _SIZE,
    "num_centroids": _SIZE,
    "markov_rank": _count(2**16, low=0),
    "centroid_intermediate_top_k": _SIZE,
    "draft_vocab_size": _SIZE,
    "o_groups": _SIZE,
    "o_lora_rank": _SIZE,
    "index_n_heads": _SIZE,
    "index_head_dim": _SIZE,
    "index_topk": _POSITIONS,
    "compressed_sparse_attention": _POSITIONS,
    "heavily_compressed_attention": _POSITIONS,
    "compress_rate_csa": _POSITIONS,
    "compress_rate_hca": _POSITIONS,
    "num_hidden_layers": _DEPTH,
    "num_target_layers": _DEPTH,
    "sliding_window_pattern": _DEPTH,
    "decoder_sparse_step": _DEPTH,
    "full_attention_interval": _DEPTH,
    "no_rope_layer_interval": _DEPTH,
    "max_window_layers": _count(1024, low=0),
    "first_k_dense_replace": _count(1024, low=0),
    "num_kv_shared_layers": _count(1024, low=0),
    "num_hash_layers": _count(1024, low=0),
    "hc_mult": _count(64),
    "hc_sinkhorn_iters": _count(1024),
    "num_nextn_predict_layers": _FEW,
    "n_shared_experts": _FEW,
    "num_experts": _EXPERTS,
    "num_local_experts": _EXPERTS,
    "n_routed_experts": _EXPERTS,
    "num_experts_per_tok": _EXPERTS,
    "top_k_experts": _EXPERTS,
    "n_group": _EXPERTS,
    "topk_group": _EXPERTS,
    "max_position_embeddings": _POSITIONS,
    "original_max_position_embeddings": _POSITIONS,
    "sliding_window": _POSITIONS,
    "factor": _POSITIVE,
    "low_freq_factor": _POSITIVE,
    "high_freq_factor": _POSITIVE,
    "beta_fast": _POSITIVE,
    "beta_slow": _POSITIVE,
    "query_pre_attn_scalar": _POSITIVE,
    "final_logit_softcapping": _NOT_NEGATIVE,
    "logit_scale": _POSITIVE,
    "swiglu_limit": _POSITIVE,
    "block_ffn_dim_multiplier": _real("a number above 0", 1e-30, 1024),
    "attention_multiplier": _POSITIVE,
    "logits_scaling": _POSITIVE,
    "rope_theta": _THETA,
    "rope_local_base_freq": _THETA,
    "compress_rope_theta": _THETA,
    "rms_norm_eps": _real("a number from 0 to 1", 0.0, 1.0),
    "norm_eps": _real("a number from 0 to 1", 0.0, 1.0),
    "layer_norm_epsilon": _real("a number from 0 to 1", 0.0, 1.0),
    "hc_eps": _real("a number from 0 to 1", 0.0, 1.0),
    "partial_rotary_factor": _real("a number above 0, at most 1", 1e-30, 1.0),
    "mscale": _NOT_NEGATIVE,
    "mscale_all_dim": _NOT_NEGATIVE,
    "time_step_limit": _one_of("a list of two", lambda value: isinstance(value, list) and len(value) == 2),
    "factors": _FACTORS,
    "short_factor": _FACTORS,
    "long_factor": _FACTORS,
    "attention_factor": _REAL,
    "swiglu_alpha": _REAL,
    "routed_scaling_factor": _REAL,
    "input_embedding_scale": _REAL,
}
"""Every key whose value is used other than in a comparison, at any depth of the config."""

UNCHANGED: Mapping[str, Any] = {
    **dict.fromkeys(("logit_scale", "output_multiplier", "lm_head_multiplier", "input_embedding_scale"), 1.0),
    **dict.fromkeys(("embedding_multiplier", "residual_multiplier", "logits_scaling", "scale_emb"), 1.0),
    **dict.fromkeys(("routed_scaling_factor", "router_scaling_factor", "attention_value_scale"), 1.0),
    **dict.fromkeys(("attention_multiplier", "query_pre_attn_scalar", "scale_depth", "dim_model_base")),
    **dict.fromkeys(("clip_qkv", "attention_chunk_size", "swiglu_limit", "swiglu_alpha", "rotary_dim")),
    **dict.fromkeys(("rope_local_base_freq", "no_rope_layers")),
    **dict.fromkeys(("attention_sink_bias", "attn_temperature_tuning", "use_qk_norm", "qk_layernorm"), False),
    **dict.fromkeys(("alibi", "parallel_attn", "use_parallel_residual", "use_sliding_window"), False),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping", "router_logit_softcapping"), 0.0),
    **dict.fromkeys(("rope_is_neox_style", "is_neox_style", "causal", "is_causal"), True),
}
"""Keys that change what a decoder computes, but no tensor of it, each with the value that changes nothing.
Where nobody reads such a key, another value is an error."""

_WITHOUT_MEANING = frozenset(
    {
        # What transformers writes whatever the model, now or in older versions.
        *("_name_or_path", "architectures", "auto_map", "chunk_size_feed_forward", "dtype", "torch_dtype"),
        *("id2label", "label2id", "problem_type", "is_encoder_decoder", "transformers_version", "use_cache"),
        *("output_attentions", "output_hidden_states", "return_dict", "cache_implementation"),
        *("_attn_implementation", "attn_implementation", "_attn_implementation_autoset", "model_type"),
        *("max_length", "min_length", "temperature", "top_k", "top_p", "typical_p", "num_beams"),
        *("num_beam_groups", "num_return_sequences", "repetition_penalty", "length_penalty", "pruned_heads"),
        *("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "diversity_penalty", "tf_legacy_loss"),
        # Tokens; what else a model sees and hears.
        *("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "sep_token_id"),
        *("image_token_id", "video_token_id", "audio_token_id", "image_token_index", "vision_token_id"),
        *("vision_start_token_id", "vision_end_token_id", "boi_token_id", "eoi_token_id", "vision_config"),
        # Training.
        *("initializer_range", "attention_dropout", "hidden_dropout", "embd_pdrop", "resid_pdrop"),
        *("classifier_dropout", "output_router_logits", "router_aux_loss_coef", "router_jitter_noise"),
        *("aux_loss_alpha", "seq_aux", "ep_size", "pretraining_tp", "rescale_prenorm_residual"),
        *("time_step_floor", "time_step_max", "time_step_min", "num_anchors", "confidence_head_alpha"),
        # How others run it, and what jaxspec reads elsewhere.
        *("use_mamba_kernels", "num_logits_to_keep", "mamba_ssm_cache_dtype", "mamba_ssm_dtype"),
        *("chunk_size", "residual_in_fp32", "moe_shared_expert_overlap", "quantization_config"),
        *("compression_config", "unsloth_fixed", "unsloth_version", "transformers.js_config"),
        *("speculators_model_type", "speculators_version", "speculators_config", "embed_requires_grad"),
        *("modal_type", "target_model_type", "target_text_model_type", "attention_mode"),
        *("num_target_layers", "max_seq_len", "mtp_num_hidden_layers", "has_no_defaults_at_init"),
        # What no tensor is there for, or tensors decide: loading compares them with the layers.
        *("tie_word_embeddings", "has_lm_head", "parallel_draft_heads_num_layers", "eagle_decoder_type"),
        *("num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok", "norm_topk_prob"),
        *("moe_intermediate_size", "shared_expert_intermediate_size", "decoder_sparse_step"),
        *("mlp_only_layers", "full_attention_interval", "linear_num_key_heads", "linear_num_value_heads"),
        *("linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim"),
        # What follows from other keys, or is read only beside others that are not there.
        *("qk_head_dim", "qk_rope_head_dim", "expand", "experts_per_token", "initial_context_length"),
        *("sliding_window_pattern", "_sliding_window_pattern", "sliding_window", "max_window_layers"),
        *("rope_theta", "rope_scaling", "compress_rope_theta", "block_ffn_dim_multiplier"),
        *("block_multiple_of", "no_rope_layer_interval"),
    }
)
"""Keys that may stand in a `config.json` though nobody reads them."""

_NULL_SAYS_NONE = frozenset(
    {
        *("head_dim", "num_key_value_heads", "q_lora_rank", "rope_scaling", "rope_parameters"),
        *("sliding_window", "norm_topk_prob", "rope_interleave", "truncate"),
    }
)
