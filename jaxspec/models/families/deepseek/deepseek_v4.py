"""DeepSeek-V4: a window and compressed entries, several residual streams, experts chosen by score or token.

Source: the `DeepseekV4ForCausalLM` of transformers 5.24; vLLM 0.33, `models/deepseek_v4`, for what drafters
read.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxspec_kernels.choose_experts import choose_experts
from jaxspec_kernels.row_sum import sum_in_order

from jaxspec.attention import AnyMemory, AttentionKind, CompressedAttention, LayerCacheShape, RopeTables
from jaxspec.config import ConfigError, ModelConfig, MoeConfig, RopeConfig, joined
from jaxspec.config.compressed import WINDOW, CompressedConfig
from jaxspec.config.streams import StreamsConfig
from jaxspec.models.decoder import LAST_STREAMS, Decoder
from jaxspec.models.layers.compressed_attention import (
    CompressedAttentionLayer,
    Float32Norm,
    compressed_cache_shape,
    compressed_kind,
)
from jaxspec.models.layers.hyper_connections import HyperConnection, StreamHead, expand
from jaxspec.models.layers.moe import MoE
from jaxspec.models.layers.transformer import MLP
from jaxspec.models.mtp_names import OWN_LAYER
from jaxspec.sharding import PendingSum, total
from jaxspec.weights.parameters import Buffer, Integers, Whole, parameter, product


@dataclass(frozen=True)
class ExpertTable(Integers):
    """The source of i32[V, k], the experts of every token, of `num_experts`."""

    num_experts: int


def _clipped(gate: jax.Array, up: jax.Array, limit: float) -> jax.Array:
    return jax.nn.silu(jnp.minimum(gate, limit)) * jnp.clip(up, -limit, limit)


class ClippedMLP(MLP):
    """A feed-forward network whose gate and up projections are clipped."""

    def __init__(self, config: ModelConfig, name: str, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        assert config.moe is not None
        super().__init__(config, name, dtype=dtype, rngs=rngs)
        self.limit = config.moe.swiglu_limit

    def __call__(self, x: jax.Array) -> jax.Array | PendingSum:
        fused = product(x, self.gate_up[...])
        return self.down(_clipped(fused[..., 0, :], fused[..., 1, :], self.limit))


class DeepseekV4MoE(MoE):
    """Routed experts beside a shared one. In the first layers a table has the experts of every token."""

    def __init__(self, config: ModelConfig, name: str, *, is_hashed: bool, dtype: jnp.dtype, rngs: nnx.Rngs):
        assert config.moe is not None
        args: dict[str, Any] = {"dtype": dtype, "rngs": rngs}
        moe = config.moe
        super().__init__(config, name, **args)
        table = (config.vocab_size, moe.experts_per_token)
        self.experts_of = (
            Buffer(
                jnp.zeros(table, jnp.int32),
                axes=(None, None),
                source=ExpertTable(f"{name}.gate.tid2eid", table, moe.num_experts),
            )
            if is_hashed
            else None
        )
        # Always float32, as in DeepSeek-V3.
        self.selection_bias = (
            None
            if is_hashed
            else parameter(
                rngs,
                (moe.num_experts,),
                (None,),
                Whole(f"{name}.gate.e_score_correction_bias", (moe.num_experts,)),
                dtype=jnp.dtype(jnp.float32),
                init="zeros",
            )
        )
        shared = replace(config, intermediate_size=moe.shared_size)
        self.shared = ClippedMLP(shared, f"{name}.shared_experts", **args) if moe.shared_size else None

    def activate(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        return _clipped(gate, up, self.config.swiglu_limit)

    def route(self, x: jax.Array, *tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        """See `MoE.route`. The bias affects which experts are chosen, but not their weights."""
        scores = jnp.sqrt(jax.nn.softplus(self.router(x, out_dtype=jnp.float32)))
        if self.experts_of is not None:
            chosen = jnp.take(self.experts_of[...], tokens[0], axis=0, mode="clip")
        else:
            assert self.selection_bias is not None
            choice = scores + self.selection_bias[...]
            _, chosen = choose_experts(choice, keep=self.config.experts_per_token)
        weights = jnp.take_along_axis(scores, chosen, axis=-1)
        return weights / (sum_in_order(weights) + 1e-20) * self.config.scale, chosen

    def shares(self, weights: jax.Array, chosen: jax.Array) -> jax.Array:
        # Nothing keeps a table from naming an expert twice.
        share = jnp.zeros((len(chosen), self.config.num_experts), jnp.float32)
        return share.at[jnp.arange(len(chosen))[:, None], chosen].add(weights)

    def __call__(self, x: jax.Array, *tokens: jax.Array) -> jax.Array | PendingSum:
        routed = super().__call__(x, *tokens)
        return routed if self.shared is None else routed + self.shared(x)


class DeepseekV4Layer(nnx.Module):
    """Attention and experts, each of which reads a mix of all residual streams and adds to all of them."""

    def __init__(self, config: ModelConfig, index: int, name: str, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        assert config.moe is not None
        assert config.compressed is not None
        args: dict[str, Any] = {"dtype": dtype, "rngs": rngs}
        width, eps = config.hidden_size, config.rms_norm_eps
        kind = compressed_kind(config.compressed, config.sliding_window or 0, index)
        self.is_hashed = index in config.moe.hash_layers
        self.attention_mix = HyperConnection(config, f"{name}.attn_hc", rngs=rngs)
        self.input_norm = Float32Norm(width, eps, f"{name}.input_layernorm", **args)
        self.attention = CompressedAttentionLayer(config, f"{name}.self_attn", kind=kind, **args)
        self.mlp_mix = HyperConnection(config, f"{name}.ffn_hc", rngs=rngs)
        self.mlp_norm = Float32Norm(width, eps, f"{name}.post_attention_layernorm", **args)
        self.mlp = DeepseekV4MoE(config, f"{name}.mlp", is_hashed=self.is_hashed, **args)

    def __call__(
        self, x: jax.Array, memory: AnyMemory, layer: int, rope: RopeTables, tokens: jax.Array
    ) -> tuple[jax.Array, AnyMemory]:
        """Maps x [N, streams, M] to [N', streams, M]; also returns the memory.

        Args:
          layer: the layer's index in the memory.
          tokens: i32[N].
        """
        read, written, mix = self.attention_mix(x)
        attended, memory = self.attention(self.input_norm(read), memory, layer, rope)
        x, written, mix = (memory.outputs(layer, each) for each in (x, written, mix))
        x = expand(total(attended), x, written, mix)
        read, written, mix = self.mlp_mix(x)
        hashed = (memory.outputs(layer, tokens),) if self.is_hashed else ()
        return expand(total(self.mlp(self.mlp_norm(read), *hashed)), x, written, mix), memory


class DeepseekV4(Decoder):
    """A target network."""

    defaults: ClassVar = {
        "vocab_size": 129280,
        "hidden_size": 4096,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 43,
        "num_attention_heads": 64,
        "num_key_value_heads": 1,
        "head_dim": 512,
        "q_lora_rank": 1024,
        "num_experts_per_tok": 6,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "routed_scaling_factor": 1.5,
        "max_position_embeddings": 1048576,
        "rope_theta": 10000.0,
        "compress_rope_theta": 160000.0,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "num_hash_layers": 3,
        "swiglu_limit": 10.0,
        "sliding_window": 128,
        "o_groups": 8,
        "o_lora_rank": 1024,
        "index_n_heads": 64,
        "index_head_dim": 128,
        "index_topk": 512,
        "num_nextn_predict_layers": 1,
    }
    recycles_normed = False
    mtp_names = OWN_LAYER
    norm_type = Float32Norm

    @classmethod
    def read_config(cls, config: Mapping[str, Any]) -> ModelConfig:
        inner = config.get("moe_intermediate_size", cls.defaults["moe_intermediate_size"])
        return super().read_config(joined(config, {"intermediate_size": inner}))

    @classmethod
    def own_fields(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        supported = (
            ("scoring_func", "sqrtsoftplus"),
            ("norm_topk_prob", True),
            ("num_key_value_heads", 1),
            ("attention_bias", False),
            ("mlp_bias", False),
        )
        for key, built in supported:
            if config.get(key, built) != built:
                raise ConfigError(f"{key} {config[key]!r} is not supported; supported: {built}")
        for key in ("head_dim", "q_lora_rank"):
            if config[key] is None:
                raise ConfigError(f"config.json: {key} must be a positive integer, got None")
        heads, groups = config["num_attention_heads"], config["o_groups"]
        if heads % groups:
            raise ConfigError(f"num_attention_heads {heads} is not a multiple of o_groups {groups}")
        depth, kinds = config["num_hidden_layers"], config.get("mlp_layer_types")
        hashed = range(min(config["num_hash_layers"], depth))
        inner = config["moe_intermediate_size"]
        rotated = _rotated_size(config)
        rope, local_rope = _ropes(config)
        return {
            "head_dim": rotated,
            "rope": rope,
            "local_rope": local_rope,
            "layer_types": ("sliding_attention",) * depth,
            "moe": MoeConfig(
                num_experts=config["n_routed_experts"],
                experts_per_token=config["num_experts_per_tok"],
                intermediate_size=inner,
                swiglu_limit=config["swiglu_limit"],
                scale=float(config["routed_scaling_factor"]),
                hash_layers=tuple(
                    hashed if kinds is None else (i for i in range(depth) if kinds[i : i + 1] == ["hash_moe"])
                ),
                shared_size=inner * (config["n_shared_experts"] or 0),
            ),
            "compressed": CompressedConfig.from_hf(config),
            "streams": StreamsConfig(config["hc_mult"], config["hc_sinkhorn_iters"], config["hc_eps"]),
        }

    def __init__(self, config: ModelConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        super().__init__(config, dtype=dtype, rngs=rngs)
        self.stream_head = StreamHead(config, "model.hc_head", rngs=rngs)

    @classmethod
    def attention_kinds(cls, config: ModelConfig) -> tuple[AttentionKind, ...]:
        assert config.compressed is not None
        return tuple(
            compressed_kind(config.compressed, config.sliding_window or 0, i)
            for i in range(config.num_hidden_layers)
        )

    @classmethod
    def layer_ropes(cls, config: ModelConfig) -> tuple[RopeConfig, ...]:
        assert config.compressed is not None
        assert config.local_rope is not None
        return tuple(
            config.local_rope if kind == WINDOW else config.rope for kind in config.compressed.layers
        )

    @classmethod
    def make_layer(cls, config: ModelConfig, index: int, **args: Any) -> nnx.Module:
        return DeepseekV4Layer(config, index, f"model.layers.{index}", **args)

    @classmethod
    def make_mtp_layer(cls, config: ModelConfig, **args: Any) -> nnx.Module:
        return DeepseekV4Layer(config, config.num_hidden_layers, "mtp.0", **args)

    @classmethod
    def mtp_kinds(cls, config: ModelConfig) -> tuple[AttentionKind, ...]:
        assert config.compressed is not None
        return (compressed_kind(config.compressed, config.sliding_window or 0, config.num_hidden_layers),)

    @classmethod
    def layer_cache(cls, config: ModelConfig, kind: AttentionKind) -> LayerCacheShape:
        assert config.compressed is not None
        assert isinstance(kind, CompressedAttention)
        return compressed_cache_shape(config.compressed, kind)

    def embed(self, tokens: jax.Array) -> jax.Array:
        """The first layer's input [N, streams, M]: in every stream the token's embedding."""
        assert self.config.streams is not None
        x = self.embedding(tokens)
        return jnp.broadcast_to(x[:, None], (len(x), self.config.streams.count, x.shape[-1]))

    def layer_inputs(self, tokens: jax.Array, x: jax.Array) -> tuple[tuple[jax.Array, ...], ...]:
        return ((tokens,),) * len(self.layers)

    def finish(self, x: jax.Array | PendingSum) -> jax.Array:
        return self.norm(self.stream_head(total(x)))

    def captured(self, streams: Sequence[Any], i: int) -> jax.Array:
        if i == LAST_STREAMS:
            return streams[i].reshape(len(streams[i]), -1)
        return streams[i].mean(axis=1)


def _rotated_size(config: Mapping[str, Any]) -> int:
    """How many of a head's entries are rotated."""
    share = config.get("partial_rotary_factor")
    if share is None and config.get("qk_rope_head_dim") is not None:
        return int(config["qk_rope_head_dim"])
    # In floating point 3/49 * 49 is slightly less than 3.
    return int(config["head_dim"] * (64 / 512 if share is None else share) + 1e-6)


def _ropes(config: Mapping[str, Any]) -> tuple[RopeConfig, RopeConfig]:
    """The ropes of layers with entries and of those without, from nested or published keys."""
    stated = config.get("rope_parameters") or {}
    if "main" in stated and "compress" in stated:
        plain, scaled = stated["main"], stated["compress"]
        if config.get("rope_scaling"):
            raise ConfigError("rope_scaling is not supported beside rope_parameters")
        rotated = _rotated_size(config)
        for each in (plain, scaled):
            share = each.get("partial_rotary_factor")
            if share is not None and int(config["head_dim"] * share + 1e-6) != rotated:
                raise ConfigError(
                    f"rope_parameters: partial_rotary_factor {share!r} is not {rotated} entries"
                )
    else:
        plain = {"rope_theta": config["rope_theta"]}
        scaled = {**(config.get("rope_scaling") or {}), **stated, "rope_theta": config["compress_rope_theta"]}
        if "yarn" in (scaled.get("rope_type"), scaled.get("type")):
            # The model does not scale cosine and sine, as YaRN otherwise does; transformers 5 says so.
            scaled = {"attention_factor": 1.0, **scaled}

    def rope(parameters: Mapping[str, Any]) -> RopeConfig:
        own = {key: value for key, value in parameters.items() if key != "partial_rotary_factor"}
        length = config["max_position_embeddings"]
        return RopeConfig.from_hf({"rope_parameters": own, "max_position_embeddings": length})

    return rope(scaled), rope(plain)
