"""Multi-head latent attention: the cache holds one vector per position, which all heads share.

The up projection to each head's keys is absorbed into the queries; the one to its values is applied to the
output of attention.

Source: DeepSeek-V2, arXiv 2405.04434, section 2.1; `DeepseekV3Attention` of transformers.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from jaxspec.attention import AnyMemory, CacheShape, RopeTables, apply_rope, pairs_to_halves
from jaxspec.config import ModelConfig
from jaxspec.models.layers.transformer import RMSNorm
from jaxspec.sharding import PendingSum, later_psum, local_part, split_over
from jaxspec.weights.parameters import Fused, HeadRows, Projection, parameter, product

# transformers builds the norms of latents with its class's default, whatever the config says.
LATENT_EPS = 1e-6


def latent_cache_shape(config: ModelConfig) -> CacheShape:
    """The cache of a layer: one vector per position, the normed latent followed by the rotated key."""
    assert config.latent is not None
    return CacheShape(1, config.latent.kv_lora_rank + config.latent.qk_rope_head_dim, planes=1)


class LatentAttention(nnx.Module):
    """Latent attention. Queries are projected from the rows directly or through a latent of their own."""

    def __init__(self, config: ModelConfig, name: str, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        assert config.latent is not None
        latent, width, heads = config.latent, config.hidden_size, config.num_attention_heads
        nope, rope, values = latent.qk_nope_head_dim, latent.qk_rope_head_dim, latent.v_head_dim
        rank, query_rank = latent.kv_lora_rank, latent.q_lora_rank
        self.config, self.num_heads = latent, heads
        assert config.attention_scale is not None
        self.scale = config.attention_scale
        into_query = f"{name}.q_a_proj" if query_rank else f"{name}.q_proj"
        self.query_width = query_rank or heads * (nope + rope)
        widths = (self.query_width, rank + rope)
        names = (f"{into_query}.weight", f"{name}.kv_a_proj_with_mqa.weight")
        self.down = parameter(
            rngs,
            (width, sum(widths)),
            ("embed", None),
            Fused(
                tuple(
                    Projection(each, (width,), (out,), is_sensitive=True)
                    for each, out in zip(names, widths, strict=True)
                )
            ),
            dtype=dtype,
            fan_in=width,
        )
        self.query_norm = (
            RMSNorm(query_rank, LATENT_EPS, f"{name}.q_a_layernorm", dtype=dtype, rngs=rngs)
            if query_rank
            else None
        )
        self.query_up = (
            parameter(
                rngs,
                (query_rank, heads, nope + rope),
                (None, "kv_heads", "head_dim"),
                Projection(f"{name}.q_b_proj.weight", (query_rank,), (heads, nope + rope), is_sensitive=True),
                dtype=dtype,
                fan_in=query_rank,
            )
            if query_rank
            else None
        )
        self.latent_norm = RMSNorm(rank, LATENT_EPS, f"{name}.kv_a_layernorm", dtype=dtype, rngs=rngs)

        def up(start: int, stop: int) -> nnx.Param:
            source = HeadRows(f"{name}.kv_b_proj.weight", heads, nope + values, start, stop, rank)
            shape = (heads, stop - start, rank)
            return parameter(rngs, shape, ("kv_heads", "head_dim", None), source, dtype=dtype, fan_in=rank)

        self.key_up, self.value_up = up(0, nope), up(nope, nope + values)
        self.output = parameter(
            rngs,
            (heads, values, width),
            ("kv_heads", "head_dim", "embed"),
            Projection(f"{name}.o_proj.weight", (heads, values), (width,)),
            dtype=dtype,
            fan_in=heads * values,
        )

    def __call__(
        self, x: jax.Array, memory: AnyMemory, layer: int, rope: RopeTables
    ) -> tuple[jax.Array | PendingSum, AnyMemory]:
        """Maps x [N, M] to [N', M]; also returns the memory. `layer` is the layer's index in the memory."""
        rank = self.config.kv_lora_rank
        query, latent, key = jnp.split(
            product(x, self.down[...]), (self.query_width, self.query_width + rank), axis=-1
        )
        row = jnp.concatenate([self.latent_norm(latent), self._rotated(key, rope)], axis=-1)
        attended, memory = memory.attend_latent(
            layer, self._queries(query, rope), row, value_dim=rank, scale=self.scale
        )
        values = _by_head("nhl,hvl->nhv", attended, self.value_up[...])
        y = product(values, self.output[...], contracting=2)
        return later_psum(y, split_over(values.shape[1], self.num_heads)), memory

    def _queries(self, query: jax.Array, rope: RopeTables) -> jax.Array:
        """Absorbed queries [N, heads, rank + rope] of this device's heads.

        Args:
          query: [N, query_width], the queries, or their latents if there is a `q_lora_rank`.
        """
        if self.query_norm is not None and self.query_up is not None:
            query = product(self.query_norm(query), self.query_up[...])
        else:
            query = query.reshape(len(query), self.num_heads, -1)
            query = local_part(query, self.key_up.shape[0], along=1)
        plain, rotated = jnp.split(query, (self.config.qk_nope_head_dim,), axis=-1)
        absorbed = _by_head("nhd,hdl->nhl", plain, self.key_up[...])
        return jnp.concatenate([absorbed, self._rotated(rotated, rope)], axis=-1)

    def _rotated(self, x: jax.Array, rope: RopeTables) -> jax.Array:
        """Rotates x [N, heads..., rope]."""
        return apply_rope(pairs_to_halves(x) if self.config.rope_interleave else x, rope)


def _by_head(axes: str, x: jax.Array, kernel: jax.Array) -> jax.Array:
    """A product for each head, by einsum, in the dtype of x; sums are float32."""
    # Without "highest" a GPU would round float32 operands to TF32.
    precision = "highest" if kernel.dtype == jnp.float32 else None
    return jnp.einsum(axes, x, kernel, precision=precision, preferred_element_type=x.dtype)
