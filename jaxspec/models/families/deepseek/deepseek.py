"""DeepSeek-V3: latent attention, and routed experts with sigmoid scores.

Source: the `DeepseekV3ForCausalLM` of transformers.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxspec_kernels.choose_experts import choose_experts
from jaxspec_kernels.row_sum import sum_in_order

from jaxspec.attention import AttentionKind, LayerCacheShape
from jaxspec.config import ConfigError, ModelConfig, MoeConfig, RopeConfig
from jaxspec.config.latent import LatentConfig
from jaxspec.files import CheckpointError, TensorSource
from jaxspec.files.gguf.architecture import GGUFArchitecture, split_experts
from jaxspec.files.gguf.metadata import Metadata
from jaxspec.models.decoder import Decoder
from jaxspec.models.layers.latent_attention import LatentAttention, latent_cache_shape
from jaxspec.models.layers.moe import STACKED_EXPERTS, MoE
from jaxspec.models.layers.transformer import MLP
from jaxspec.sharding import PendingSum
from jaxspec.weights.parameters import Whole, parameter

if TYPE_CHECKING:
    from jaxspec.files.gguf.tensor import GGUFTensor


class DeepseekMoE(MoE):
    """Routed experts, stored one tensor per expert, plus a shared network that every row goes through.

    Attributes:
      bias_name: the name, in a checkpoint, of the bias on the choice of experts.
      shared_type: the class of the shared network.
    """

    bias_name: ClassVar[str] = "gate.e_score_correction_bias"
    shared_type: ClassVar[Callable[..., Any]] = MLP

    def __init__(self, config: ModelConfig, name: str, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        assert config.moe is not None
        args: dict[str, Any] = {"dtype": dtype, "rngs": rngs}
        moe = config.moe
        super().__init__(config, name, **args)
        # Always float32: training changes it in steps that are too small for bfloat16.
        self.selection_bias = parameter(
            rngs,
            (moe.num_experts,),
            (None,),
            Whole(f"{name}.{self.bias_name}", (moe.num_experts,)),
            dtype=jnp.dtype(jnp.float32),
            init="zeros",
        )
        shared = replace(config, intermediate_size=moe.shared_size)
        self.shared = self.shared_type(shared, f"{name}.shared_experts", **args) if moe.shared_size else None

    def route(self, x: jax.Array, *tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        """See `MoE.route`. The bias affects which experts are chosen, but not their weights."""
        scores = jax.nn.sigmoid(self.router(x, out_dtype=jnp.float32))
        _, chosen = choose_experts(
            self._in_best_groups(scores + self.selection_bias[...]), keep=self.config.experts_per_token
        )
        weights = jnp.take_along_axis(scores, chosen, axis=-1)
        if self.config.normalize:
            weights = weights / (sum_in_order(weights) + 1e-20)
        return weights * self.config.scale, chosen

    def _in_best_groups(self, choice: jax.Array) -> jax.Array:
        """Scores f32[R, E], -inf outside the groups whose two best scores have the largest sums."""
        groups, kept = self.config.num_groups, self.config.groups_per_token
        if kept == groups:
            return choice
        grouped = choice.reshape(len(choice), groups, -1)
        best, _ = jax.lax.top_k(grouped, 2)
        _, chosen = jax.lax.top_k(sum_in_order(best)[..., 0], kept)
        is_kept = (chosen[:, :, None] == jnp.arange(groups)).any(axis=1)
        return jnp.where(is_kept[:, :, None], grouped, -jnp.inf).reshape(choice.shape)

    def __call__(self, x: jax.Array, *tokens: jax.Array) -> jax.Array | PendingSum:
        routed = super().__call__(x, *tokens)
        return routed if self.shared is None else routed + self.shared(x)


GATING = {0: "softmax", 1: "softmax", 2: "sigmoid", 3: "softmax_weight"}
"""The scoring function for a GGUF's `expert_gating_func`; 0 if it is missing, as in DeepSeek-V2's files."""


def _gguf_config(meta: Metadata) -> dict[str, Any]:
    heads, rotated = meta.size("attention.head_count"), meta.size("rope.dimension_count")
    # Files that store the two halves of the up projection give the sizes of the latent under `key_length` and
    # `value_length`, and those of a head under the names with `_mla`.
    key_size = meta.positive("attention.key_length_mla", meta.positive("attention.key_length", 0))
    value_size = meta.positive("attention.value_length_mla", meta.positive("attention.value_length", 0))
    gating = meta.count("expert_gating_func", 0)
    config: dict[str, Any] = {
        # block_count includes MTP layers, which are not read from GGUFs.
        "num_hidden_layers": meta.size("block_count") - meta.count("nextn_predict_layers", 0),
        "num_nextn_predict_layers": 0,
        "num_key_value_heads": heads,
        "q_lora_rank": meta.positive("attention.q_lora_rank", None),
        "kv_lora_rank": meta.size("attention.kv_lora_rank"),
        "qk_nope_head_dim": key_size - rotated,
        "qk_rope_head_dim": rotated,
        "head_dim": rotated,  # as transformers calls it
        "v_head_dim": value_size,
        "rope_interleave": True,
        "moe_intermediate_size": meta.size("expert_feed_forward_length"),
        "n_routed_experts": meta.size("expert_count"),
        "n_shared_experts": meta.count("expert_shared_count", 0),
        "num_experts_per_tok": meta.size("expert_used_count"),
        "n_group": meta.positive("expert_group_count", 1),
        "topk_group": meta.positive("expert_group_used_count", 1),
        "norm_topk_prob": meta.flag("expert_weights_norm", False),
        "routed_scaling_factor": meta.decimal("expert_weights_scale", 1.0),
        "first_k_dense_replace": meta.count("leading_dense_block_count", 0),
        "scoring_func": GATING.get(gating, gating),
        "topk_method": "noaux_tc",  # read by vLLM
    }
    # In the published models mscale equals mscale_all_dim, so the factor of cosine and sine is 1.
    if weight := meta.decimal("rope.scaling.yarn_log_multiplier", 0.0):
        config["rope_scaling"] = dict.fromkeys(("mscale", "mscale_all_dim"), weight / 0.1)
    return config


def _gguf_tensors(tensors: Mapping[str, "GGUFTensor"], config: Mapping[str, Any]) -> dict[str, TensorSource]:
    from jaxspec.files.gguf.tensor import JoinedTensor  # imports slowly

    found = split_experts(tensors, config)
    for name, keys in tensors.items():
        stem, is_half, _ = name.partition(".k_b_proj.")
        values = tensors.get(f"{stem}.v_b_proj.weight")
        if not is_half or values is None:
            continue
        if len(keys.shape) != 3 or (*values.shape[:1], *values.shape[2:]) != keys.shape[:2]:
            raise CheckpointError(
                f"{keys.header.path}: {name!r} of shape {list(keys.shape)} and the values of "
                f"{list(values.shape)} are not the halves of one projection"
            )
        heads, rank, nope = keys.shape
        shape = (heads * (nope + values.shape[1]), rank)
        found[f"{stem}.kv_b_proj.weight"] = JoinedTensor((keys, values), shape, _join_halves)
        del found[name], found[f"{stem}.v_b_proj.weight"]
    return named_biases(found)


def named_biases(tensors: Mapping[str, TensorSource]) -> dict[str, TensorSource]:
    """The tensors, with the bias on the choice of experts under its name in a checkpoint."""
    return {
        name.replace(".e_score_correction.bias", ".e_score_correction_bias"): tensor
        for name, tensor in tensors.items()
    }


def _join_halves(keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    """[heads * (nope + v), rank] of keys [heads, rank, nope] and values [heads, v, rank]."""
    return np.concatenate([keys.swapaxes(1, 2), values], axis=1).reshape(-1, keys.shape[1])


class Deepseek(Decoder):
    """A target network."""

    defaults: ClassVar = {
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
    }
    has_windows = False
    recycles_normed = True
    attention_type = LatentAttention
    moe_type = DeepseekMoE
    gguf = GGUFArchitecture(
        "deepseek2",
        "DeepseekV3ForCausalLM",
        (
            *(f"self_attn.{name}_proj" for name in ("q_a", "q_b", "kv_b", "k_b", "v_b")),
            "self_attn.kv_a_proj_with_mqa",
            "self_attn.q_a_layernorm",
            "self_attn.kv_a_layernorm",
            "mlp.gate",
            "mlp.gate.e_score_correction",
            *(f"mlp.shared_experts.{name}_proj" for name in ("gate", "up", "down")),
            *STACKED_EXPERTS,
        ),
        config=_gguf_config,
        tensors=_gguf_tensors,
    )

    @classmethod
    def own_fields(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        for key, built in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc"), ("moe_layer_freq", 1)):
            if config.get(key, built) != built:
                raise ConfigError(f"{key} {config[key]!r} is not supported; supported: {built}")
        layers = range(config["num_hidden_layers"])
        # transformers 5 lists the type of each GLM layer; published checkpoints give the count of dense ones.
        kinds = config.get("mlp_layer_types") or ["dense"] * config["first_k_dense_replace"]
        moe = MoeConfig(
            num_experts=config["n_routed_experts"],
            experts_per_token=config["num_experts_per_tok"],
            intermediate_size=config["moe_intermediate_size"],
            normalize=bool(config["norm_topk_prob"]),
            dense_layers=tuple(i for i in layers if kinds[i : i + 1] == ["dense"]),
            num_groups=config["n_group"] or 1,
            groups_per_token=config["topk_group"] or 1,
            scale=float(config["routed_scaling_factor"]),
            shared_size=config["moe_intermediate_size"] * (config["n_shared_experts"] or 0),
        )
        latent, rope = LatentConfig.from_hf(config), RopeConfig.from_hf(config)
        return {
            "head_dim": latent.qk_rope_head_dim,
            "attention_scale": latent.scale(rope),
            "rope": rope,
            "moe": moe,
            "latent": latent,
        }

    @classmethod
    def layer_cache(cls, config: ModelConfig, kind: AttentionKind) -> LayerCacheShape:
        return latent_cache_shape(config)
