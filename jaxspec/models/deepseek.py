"""DeepSeek-V3 and GLM-4.7-Flash: latent attention, and experts that are scored each by itself.

Source: the `DeepseekV3ForCausalLM` and `Glm4MoeLiteForCausalLM` of transformers, which compute the same.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxspec.attention import AttentionKind, LayerCacheShape
from jaxspec.config import ModelConfig
from jaxspec.models.expert_sources import tensor_per_expert
from jaxspec.models.latent_attention import LatentAttention, latent_cache_shape
from jaxspec.models.layers import MLP, PreNormLayer, RMSNorm
from jaxspec.models.llama import Llama
from jaxspec.models.moe import MoE
from jaxspec.models.parameters import Whole, parameter


class DeepseekMoE(MoE):
    """Experts with tensors of their own, beside a shared network that every row goes through."""

    def __init__(self, config: ModelConfig, name: str, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        assert config.moe is not None
        args: dict[str, Any] = {"dtype": dtype, "rngs": rngs}
        moe = config.moe
        sources = tensor_per_expert(
            f"{name}.experts", moe.num_experts, config.hidden_size, moe.intermediate_size
        )
        super().__init__(config, f"{name}.gate", sources, router_bias=False, **args)
        # In float32 whatever the weights' dtype: it is trained in steps that bfloat16 would swallow.
        self.selection_bias = parameter(
            rngs,
            (moe.num_experts,),
            ("experts",),
            Whole(f"{name}.gate.e_score_correction_bias", (moe.num_experts,)),
            dtype=jnp.dtype(jnp.float32),
            init="zeros",
        )
        shared = replace(config, intermediate_size=moe.shared_size)
        self.shared = MLP(shared, f"{name}.shared_experts", **args) if moe.shared_size else None

    def route(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Weights f32[R, k] and experts i32[R, k] of rows x [R, M]; the bias counts in the choice alone."""
        scores = jax.nn.sigmoid(self.router(x, out_dtype=jnp.float32))
        _, chosen = jax.lax.top_k(
            self._in_best_groups(scores + self.selection_bias[...]), self.config.experts_per_token
        )
        weights = jnp.take_along_axis(scores, chosen, axis=-1)
        if self.config.normalize:
            weights = weights / (weights.sum(axis=-1, keepdims=True) + 1e-20)
        return weights * self.config.scale, chosen

    def _in_best_groups(self, choice: jax.Array) -> jax.Array:
        """f32[R, E], -inf for the experts outside the groups whose two best add up to the most."""
        groups, kept = self.config.num_groups, self.config.groups_per_token
        if kept == groups:
            return choice
        grouped = choice.reshape(len(choice), groups, -1)
        best, _ = jax.lax.top_k(grouped, 2)
        _, chosen = jax.lax.top_k(best.sum(axis=-1), kept)
        is_kept = (chosen[:, :, None] == jnp.arange(groups)).any(axis=1)
        return jnp.where(is_kept[:, :, None], grouped, -jnp.inf).reshape(choice.shape)

    def __call__(self, x: jax.Array) -> jax.Array:
        routed = super().__call__(x)
        return routed if self.shared is None else routed + self.shared(x)


class DeepseekLayer(PreNormLayer):
    """Pre-norm block over latent attention; its feed-forward network is dense or of experts."""

    def __init__(self, config: ModelConfig, name: str, *, dense: bool, dtype: jnp.dtype, rngs: nnx.Rngs):
        args: dict[str, Any] = {"dtype": dtype, "rngs": rngs}
        width, eps = config.hidden_size, config.rms_norm_eps
        self.input_norm = RMSNorm(width, eps, f"{name}.input_layernorm", **args)
        self.attention = LatentAttention(config, f"{name}.self_attn", **args)
        self.mlp_norm = RMSNorm(width, eps, f"{name}.post_attention_layernorm", **args)
        self.mlp = (MLP if dense else DeepseekMoE)(config, f"{name}.mlp", **args)


class Deepseek(Llama):
    """A target network."""

    def make_layer(self, index: int, kind: AttentionKind, **args: Any) -> nnx.Module:
        assert self.config.moe is not None
        dense = index in self.config.moe.dense_layers
        return DeepseekLayer(self.config, f"model.layers.{index}", dense=dense, **args)

    @property
    def cache_shapes(self) -> tuple[LayerCacheShape, ...]:
        return (latent_cache_shape(self.config),) * len(self.kinds)
