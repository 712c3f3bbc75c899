"""The shape of a decoder, out of a Hugging Face `config.json`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxspec.config.errors import ConfigError
from jaxspec.config.keys import check_keys, without_nulls
from jaxspec.config.latent import LatentConfig
from jaxspec.config.moe import MoeConfig
from jaxspec.config.rope import RopeConfig, read_ropes


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a decoder, in the names of `config.json`.

    Attributes:
      layer_types: "full_attention" or "sliding_attention" per layer.
      sliding_window: positions that a sliding layer sees, or None.
      local_rope: rope of the sliding layers, where it differs from that of the others.
      compress_ratios: positions per compressed entry, for every layer; 1 for a layer without them. Empty in
        families that compress nothing.
      attention_scale: what dot products are multiplied by; None takes head_dim ** -0.5.
      attention_sinks: every head has a logit of its own in the softmax.
      moe: the routed experts, or None where every layer is dense.
      latent: latent attention, or None; `head_dim` is then the size of the rotated part.
      num_nextn_predict_layers: layers past the last one that a checkpoint may hold to predict further tokens.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 2048
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    rope: RopeConfig = field(default_factory=RopeConfig)
    layer_types: tuple[str, ...] = ()
    sliding_window: int | None = None
    local_rope: RopeConfig | None = None
    compress_ratios: tuple[int, ...] = ()
    attention_scale: float | None = None
    attention_sinks: bool = False
    moe: MoeConfig | None = None
    latent: LatentConfig | None = None
    num_nextn_predict_layers: int = 0

    def __post_init__(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ConfigError(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads {self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise ConfigError(f"head_dim {self.head_dim} is odd, and rope rotates pairs")
        for rope in (self.rope, self.local_rope):
            if rope and rope.kind == "factors" and len(rope["factors"]) != self.head_dim // 2:
                raise ConfigError(
                    f"rope_scaling: {len(rope['factors'])} factors for {self.head_dim // 2} frequencies"
                )
        if not self.layer_types:
            object.__setattr__(self, "layer_types", ("full_attention",) * self.num_hidden_layers)
        if len(self.layer_types) != self.num_hidden_layers:
            raise ConfigError(
                f"layer_types has {len(self.layer_types)} entries for {self.num_hidden_layers} layers"
            )
        unknown = sorted(set(self.layer_types) - {"full_attention", "sliding_attention"})
        if unknown:
            raise ConfigError(f"layer_types: unknown kind {unknown[0]!r}")
        if "sliding_attention" in self.layer_types and not self.sliding_window:
            raise ConfigError("layer_types has 'sliding_attention', but sliding_window is not set")
        if any(not isinstance(ratio, int) or ratio < 1 for ratio in self.compress_ratios):
            raise ConfigError(f"compress_ratios must be integers from 1 on, got {list(self.compress_ratios)}")
        if self.compress_ratios and not self.sliding_window:
            raise ConfigError("compress_ratios is set, but sliding_window is not")
        if len(self.compress_ratios) not in (0, self.num_hidden_layers):
            raise ConfigError(
                f"compress_ratios has {len(self.compress_ratios)} entries for {self.num_hidden_layers} layers"
            )

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "ModelConfig":
        """Reads the `config.json` of a decoder; absent keys take transformers' defaults.

        Of a model that also sees images, the keys of its language model count.

        Raises:
          ConfigError: a key that must be there is missing, is of another type or size than it may be, or
            asks for what is not built.
        """
        check_keys(config)
        config = without_nulls(config.get("text_config") or config)
        family = config.get("model_type")
        if not isinstance(family, str) or family not in _FAMILY_DEFAULTS:
            known = ", ".join(_FAMILY_DEFAULTS)
            raise ConfigError(f"model_type {family!r} is not supported; supported: {known}")
        config = {**_FAMILY_DEFAULTS[family], **config}
        _check_supported(config)
        for key in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
        ):
            if key not in config:
                raise ConfigError(f"config.json: {key} must be a positive integer, got None")
        heads = config["num_attention_heads"]
        layer_types, window = _layer_types(config)
        rope, local_rope = read_ropes(config)
        scalar = config.get("query_pre_attn_scalar")
        latent = LatentConfig.from_hf(config)
        head_dim = (
            latent.qk_rope_head_dim if latent else config.get("head_dim") or config["hidden_size"] // heads
        )
        if head_dim < 1:
            raise ConfigError(f"config.json: hidden_size {config['hidden_size']} is less than {heads} heads")
        return cls(
            family=family,
            vocab_size=config["vocab_size"],
            hidden_size=config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            num_hidden_layers=config["num_hidden_layers"],
            num_attention_heads=heads,
            num_key_value_heads=config.get("num_key_value_heads") or heads,
            head_dim=head_dim,
            rms_norm_eps=config.get("rms_norm_eps", 1e-6),
            max_position_embeddings=config["max_position_embeddings"],
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            attention_bias=bool(config.get("attention_bias", False)),
            mlp_bias=bool(config.get("mlp_bias", False)),
            qk_norm=family in _QK_NORM,
            rope=rope,
            local_rope=local_rope,
            attention_scale=latent.scale(rope) if latent else scalar and scalar**-0.5,
            layer_types=layer_types,
            sliding_window=window,
            compress_ratios=_compress_ratios(config),
            attention_sinks=family == "gpt_oss",
            moe=MoeConfig.from_hf(config),
            latent=latent,
            num_nextn_predict_layers=config.get("num_nextn_predict_layers") or 0,
        )


def _check_supported(config: Mapping[str, Any]) -> None:
    gemma = config["model_type"] == "gemma3_text"
    key, built = ("hidden_activation", "gelu_pytorch_tanh") if gemma else ("hidden_act", "silu")
    if config.get(key, built) != built:
        raise ConfigError(f"{key} {config[key]!r} is not supported; supported: {built}")
    for key in ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"):
        if config.get(key):
            raise ConfigError(f"{key} {config[key]!r} is not supported; supported: none")


_QK_NORM = ("qwen3", "qwen3_moe", "gemma3_text")

_FAMILY_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "llama": {"max_position_embeddings": 2048},
    "mistral": {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
    "qwen3": {
        "max_position_embeddings": 32768,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "sliding_window": 4096,
        "use_sliding_window": False,
        "max_window_layers": 28,
    },
    "qwen3_moe": {
        "max_position_embeddings": 32768,
        "num_key_value_heads": 4,
        "sliding_window": 4096,
        "use_sliding_window": False,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": (),
    },
    "gemma3_text": {
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
    },
    "deepseek_v3": {
        "vocab_size": 129280,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "max_position_embeddings": 4096,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "rope_interleave": True,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 3,
        "num_nextn_predict_layers": 1,
    },
    "glm4_moe_lite": {
        "vocab_size": 154880,
        "hidden_size": 2048,
        "intermediate_size": 10240,
        "num_hidden_layers": 47,
        "num_attention_heads": 20,
        "max_position_embeddings": 202752,
        "rms_norm_eps": 1e-5,
        "q_lora_rank": 768,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64,
        "v_head_dim": 256,
        "rope_interleave": True,
        "moe_intermediate_size": 1536,
        "n_routed_experts": 64,
        "n_shared_experts": 1,
        "num_experts_per_tok": 4,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.8,
        "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 1,
    },
    "jaxspec_indexed_window": {"max_position_embeddings": 2048, "sliding_window": 128},
    "gpt_oss": {
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "sliding_window": 128,
        "attention_bias": True,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "swiglu_limit": 7.0,
        "swiglu_alpha": 1.702,
        "rope_theta": 150000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    },
}
"""What the configuration classes of transformers 5.23 assume for keys that a file leaves out."""


def _compress_ratios(config: Mapping[str, Any]) -> tuple[int, ...]:
    """DeepSeek-V4's key, for the family of ours that has its kind of attention."""
    if config["model_type"] != "jaxspec_indexed_window":
        return ()
    if not config.get("compress_ratios"):
        raise ConfigError(
            "config.json: compress_ratios is missing: one per layer, 1 where only a window is seen"
        )
    return tuple(config["compress_ratios"])


def _layer_types(config: Mapping[str, Any]) -> tuple[tuple[str, ...], int | None]:
    """The kind of every layer, empty for "all full", and the window of the sliding ones."""
    window = config.get("sliding_window")
    if not config.get("use_sliding_window", True):
        window = None
    stated = tuple(config.get("layer_types") or ())
    if stated or window is None or config["model_type"] == "llama":
        return stated, window
    period = 2 if config["model_type"] == "gpt_oss" else config.get("sliding_window_pattern")
    if period:
        return tuple(
            "sliding_attention" if (layer + 1) % period else "full_attention"
            for layer in range(config["num_hidden_layers"])
        ), window
    # Qwen3-MoE has the key too, and transformers does not read it there.
    first = 0 if config["model_type"] == "qwen3_moe" else config.get("max_window_layers", 0)
    return tuple(
        "sliding_attention" if layer >= first else "full_attention"
        for layer in range(config["num_hidden_layers"])
    ), window
