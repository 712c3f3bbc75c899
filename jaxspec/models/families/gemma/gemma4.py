"""Gemma 4, text: two sizes of heads, layers that share keys and values, embeddings for every layer, experts.

Source: the `Gemma4ForCausalLM` of transformers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxspec_kernels.rms_norm import rms_norm

from jaxspec.attention import AnyMemory, CacheShape, LayerCacheShape, RopeTables
from jaxspec.config import ConfigError, ModelConfig, MoeConfig, RopeConfig
from jaxspec.files import CheckpointError, TensorSource
from jaxspec.files.gguf.architecture import GGUFArchitecture, check_experts
from jaxspec.files.gguf.metadata import Metadata
from jaxspec.models.decoder import Decoder
from jaxspec.models.families.gemma.gemma3 import Gemma3MLP
from jaxspec.models.families.qwen.qwen3 import QK_NORMS
from jaxspec.models.layers.moe import MoE
from jaxspec.models.layers.transformer import Attention, Embedding, Linear, RMSNorm, scaled
from jaxspec.sharding import PendingSum, total
from jaxspec.weights.expert_sources import ExpertMatrices, ExpertSources
from jaxspec.weights.parameters import Whole, parameter, product

if TYPE_CHECKING:
    from jaxspec.files.gguf.tensor import GGUFTensor


@dataclass(frozen=True)
class Gemma4Config(ModelConfig):
    """Adds keys of this family; `head_dim` and the key/value heads are those of layers with a window.

    Attributes:
      global_head_dim, global_kv_heads, global_kv_copies: those of the other layers.
      attention_k_eq_v: there, values are the projected keys.
      num_kv_shared_layers: so many layers, the last ones, read the cache of the last layer of their kind
        before them.
      use_double_wide_mlp: in these, the feed-forward network is twice as wide.
      hidden_size_per_layer_input: width of an embedding that every layer has of its own; 0 for none.
      vocab_size_per_layer_input: its number of tokens.
      final_logit_softcapping: bound of the logits, which a tanh brings about; 0 for none.
    """

    global_head_dim: int = 512
    global_kv_heads: int = 1
    global_kv_copies: int = 1
    attention_k_eq_v: bool = False
    num_kv_shared_layers: int = 0
    use_double_wide_mlp: bool = False
    hidden_size_per_layer_input: int = 0
    vocab_size_per_layer_input: int = 0
    final_logit_softcapping: float = 0.0

    def over(self, devices: int) -> "Gemma4Config":
        whole = ModelConfig.over(replace(self, num_key_value_heads=self.global_kv_heads), devices)
        own = super().over(devices)
        assert isinstance(own, Gemma4Config)
        return replace(own, global_kv_copies=whole.kv_copies)

    def is_shared(self, layer: int) -> bool:
        """Whether a layer reads another's cache."""
        return layer >= self.num_hidden_layers - self.num_kv_shared_layers

    def source_of(self, layer: int) -> int:
        """The layer whose cache a layer reads; itself in a network that reads the caches of another."""
        last = self.last_of(self.layer_types[layer]) if self.is_shared(layer) else None
        return layer if last is None else last

    def last_of(self, kind: str) -> int | None:
        """The last layer of a kind of attention among those with caches of their own; None if none is."""
        before = range(self.num_hidden_layers - self.num_kv_shared_layers)
        return max((i for i in before if self.layer_types[i] == kind), default=None)

    def of_layer(self, layer: int) -> "Gemma4Config":
        """The shape of one layer."""
        is_wide = self.use_double_wide_mlp and self.is_shared(layer)
        own = replace(self, intermediate_size=self.intermediate_size * (2 if is_wide else 1))
        if self.layer_types[layer] == "sliding_attention":
            return own
        return replace(
            own,
            head_dim=self.global_head_dim,
            num_key_value_heads=self.global_kv_heads,
            kv_copies=self.global_kv_copies,
        )


class Gemma4Norm(RMSNorm):
    """Root-mean-square norm over the last axis, in float32 to the end."""

    def __call__(self, x: jax.Array | PendingSum) -> jax.Array:
        x = total(x)
        return rms_norm(x.astype(jnp.float32), self.factors(), self.eps).astype(x.dtype)


def _unscaled_norm(x: jax.Array, eps: float) -> jax.Array:
    ones = jnp.ones(x.shape[-1:], jnp.float32)
    return rms_norm(x.astype(jnp.float32), ones, eps).astype(x.dtype)


class Gemma4Attention(Attention):
    """Attention with norms of queries, keys and values."""

    norm_type = Gemma4Norm

    def __init__(self, config: ModelConfig, name: str, **args: Any):
        super().__init__(config, name, **args)
        self.eps = config.rms_norm_eps

    def project(self, x: jax.Array) -> jax.Array:
        fused = product(x, self.qkv[...])
        group = self.output.shape[1]
        # Without a projection of their own, values are the projected keys.
        queries, keys, values = fused[..., :group, :], fused[..., group : group + 1, :], fused[..., -1:, :]
        normed = [*self.normed(queries, keys), _unscaled_norm(values, self.eps)]
        return jnp.concatenate(normed, axis=-2)


class Gemma4KeyAttention(Gemma4Attention):
    """Attention whose values are the projected keys."""

    projections = ("q_proj", "k_proj")


class Gemma4SharedAttention(Gemma4Attention):
    """Attention over the keys and values of the layer `source`."""

    projections = ("q_proj",)

    def __init__(self, config: ModelConfig, name: str, *, source: int, **args: Any):
        super().__init__(config, name, **args)
        self.source = source

    def head_norms(self, config: ModelConfig, name: str, **args: Any) -> tuple[nnx.Module, Any]:
        return Gemma4Norm(config.head_dim, config.rms_norm_eps, f"{name}.q_norm", **args), None

    def __call__(
        self, x: jax.Array, memory: AnyMemory, layer: int, rope: RopeTables
    ) -> tuple[jax.Array | PendingSum, AnyMemory]:
        queries = self.query_norm(product(x, self.qkv[...]))
        attended, memory = memory.attend_again(layer, self.source, queries, rope, scale=self.scale)
        return self.combine(attended), memory


class Gemma4MoE(MoE):
    """Routed experts that read the residual stream through a norm of their own, as their router does."""

    router_name = "router.proj"

    def __init__(self, config: ModelConfig, name: str, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        super().__init__(config, name, dtype=dtype, rngs=rngs)
        width, self.eps = config.hidden_size, config.rms_norm_eps

        def factors(size: int, leaf: str) -> nnx.Param:
            source = Whole(f"{name}.router.{leaf}", (size,))
            return parameter(rngs, (size,), (None,), source, dtype=dtype, init="ones")

        self.scale = factors(width, "scale")
        self.expert_scale = factors(self.config.num_experts, "per_expert_scale")
        self.input_norm = Gemma4Norm(
            width, self.eps, f"{name}.pre_feedforward_layernorm_2", dtype=dtype, rngs=rngs
        )

    @classmethod
    def sources(cls, name: str, count: int, width: int, inner: int) -> ExpertSources:
        return ExpertSources(
            gate_up=ExpertMatrices(f"{name}.gate_up_proj", count, width, (2, inner)),
            down=ExpertMatrices(f"{name}.down_proj", count, inner, (width,)),
        )

    def activate(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        return jax.nn.gelu(gate, approximate=True) * up

    def expert_input(self, rows: jax.Array) -> jax.Array:
        return self.input_norm(rows)

    def route(self, x: jax.Array, *tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        rows = _unscaled_norm(x, self.eps) * self.scale[...] * x.shape[-1] ** -0.5
        weights, chosen = super().route(rows, *tokens)
        return weights * self.expert_scale[...].astype(jnp.float32)[chosen], chosen


class Gemma4Layer(nnx.Module):
    """x + norm(attention(norm(x))), then x + norm(mlp(norm(x)) [+ experts]), then x + its own embedding,
    through a gate; and all of it times a factor."""

    def __init__(self, config: Gemma4Config, index: int, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        args: dict[str, Any] = {"dtype": dtype, "rngs": rngs}
        name, own = f"model.layers.{index}", config.of_layer(index)
        width, inputs = config.hidden_size, config.hidden_size_per_layer_input

        def norm(leaf: str) -> Gemma4Norm:
            return Gemma4Norm(width, config.rms_norm_eps, f"{name}.{leaf}", **args)

        kind: Any = Gemma4Attention
        if config.is_shared(index):
            kind = partial(Gemma4SharedAttention, source=config.source_of(index))
        elif config.attention_k_eq_v and config.layer_types[index] == "full_attention":
            kind = Gemma4KeyAttention
        has_experts = config.moe is not None
        self.input_norm = norm("input_layernorm")
        self.attention = kind(own, f"{name}.self_attn", **args)
        self.attention_norm = norm("post_attention_layernorm")
        self.mlp_input_norm = norm("pre_feedforward_layernorm")
        self.mlp = Gemma3MLP(own, f"{name}.mlp", **args)
        self.mlp_output_norm = norm("post_feedforward_layernorm")
        self.experts = Gemma4MoE(config, name, **args) if has_experts else None
        self.dense_norm = norm("post_feedforward_layernorm_1") if has_experts else None
        self.experts_norm = norm("post_feedforward_layernorm_2") if has_experts else None

        def linear(ins: int, outs: int, leaf: str) -> Linear:
            return Linear(ins, outs, f"{name}.{leaf}", axes=("embed", "embed"), **args)

        self.gate = linear(width, inputs, "per_layer_input_gate") if inputs else None
        self.projection = linear(inputs, width, "per_layer_projection") if inputs else None
        self.projection_norm = norm("post_per_layer_input_norm") if inputs else None
        self.scalar = parameter(
            rngs, (1,), (None,), Whole(f"{name}.layer_scalar", (1,)), dtype=dtype, init="ones"
        )

    def __call__(
        self, x: jax.Array, memory: AnyMemory, layer: int, rope: RopeTables, *own: jax.Array
    ) -> tuple[jax.Array, AnyMemory]:
        """Maps x [N, M] to [N', M]; also returns the memory.

        Args:
          layer: the layer's index in the memory.
          own: the layer's own embedding [N, P], if the model has them.
        """
        attended, memory = self.attention(self.input_norm(x), memory, layer, rope)
        x = memory.outputs(layer, x) + self.attention_norm(attended)
        y: Any = self.mlp(self.mlp_input_norm(x))
        if self.experts is not None and self.dense_norm is not None and self.experts_norm is not None:
            y = self.dense_norm(y) + self.experts_norm(self.experts(x))
        x = x + self.mlp_output_norm(y)
        if self.gate is not None and self.projection is not None and self.projection_norm is not None:
            gated = jax.nn.gelu(self.gate(x), approximate=True) * memory.outputs(layer, own[0])
            x = x + self.projection_norm(self.projection(gated))
        return x * self.scalar[...], memory


_ROPES: Mapping[str, Mapping[str, Any]] = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}


def _gguf_config(meta: Metadata) -> dict[str, Any]:
    """Sizes under a usual key are those of layers without a window, and some are listed layer by layer.

    Raises:
      CheckpointError: a list does not fit the layers, or differs among layers of one kind.
    """
    count, window = meta.size("block_count"), meta.list("attention.sliding_window_pattern", bool, [])
    types = ["sliding_attention" if each else "full_attention" for each in window]
    if len(types) != count:
        key = f"{meta.prefix}attention.sliding_window_pattern"
        raise CheckpointError(f"{meta.file}: metadata {key} has {len(types)} entries for {count} layers")
    shared = meta.count("attention.shared_kv_layers", 0)
    heads = _by_kind(meta, "attention.head_count_kv", types)
    is_shared = ["shared" if layer >= count - shared else "own" for layer in range(count)]
    widths = _by_kind(meta, "feed_forward_length", is_shared)
    width = widths.get("own", widths.get("shared", 0))
    if widths.get("shared", width) not in (width, 2 * width):
        raise CheckpointError(f"{meta.file}: metadata {meta.prefix}feed_forward_length is not supported")
    full, local = heads.get("full_attention"), heads.get("sliding_attention")
    experts = meta.count("expert_count", 0)
    bound = meta.decimal("final_logit_softcapping", 0.0)
    return {
        "layer_types": types,
        "head_dim": meta.size("attention.key_length_swa"),
        "global_head_dim": meta.size("attention.key_length"),
        "num_key_value_heads": local or full,
        "num_global_key_value_heads": full,
        "intermediate_size": width,
        "use_double_wide_mlp": widths.get("shared", width) != width,
        "num_kv_shared_layers": shared,
        "sliding_window": meta.size("attention.sliding_window"),
        "hidden_size_per_layer_input": meta.count("embedding_length_per_layer_input", 0),
        "final_logit_softcapping": bound or None,
        "enable_moe_block": bool(experts),
        "num_experts": experts or None,
        "top_k_experts": meta.size("expert_used_count") if experts else None,
        "moe_intermediate_size": meta.size("expert_feed_forward_length") if experts else None,
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "partial_rotary_factor": 1.0,
                "rope_theta": meta.decimal("rope.freq_base", 1e6),
            },
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": meta.decimal("rope.freq_base_swa", 1e4),
            },
        },
    }


def _by_kind(meta: Metadata, key: str, kinds: Sequence[str]) -> dict[str, int]:
    """A number that may be listed layer by layer, for every kind of layer.

    Raises:
      CheckpointError: layers of one kind differ.
    """
    if not isinstance(meta.values.get(meta.prefix + key), list):
        return dict.fromkeys(kinds, meta.size(key))
    stated = meta.list(key, int, [])
    pairs = set(zip(kinds, stated, strict=False))
    found = dict(pairs)
    if len(stated) != len(kinds) or len(found) != len(pairs) or min(stated) < 1:
        raise CheckpointError(f"{meta.file}: metadata {meta.prefix}{key} {stated} is not supported")
    return found


_UNROTATED = 1e29
"""Divisors of frequencies from here on stand for no rotation."""


def _gguf_from_tensors(config: Mapping[str, Any], tensors: Mapping[str, "GGUFTensor"]) -> dict[str, Any]:
    """Which share of a head is rotated, and which layers' values are the keys.

    Raises:
      CheckpointError: the divisors of frequencies stand for something else.
    """
    full = config["rope_parameters"]["full_attention"]
    if (divisors := (config["rope_scaling"] or {}).get("factors")) is not None:
        rotated = sum(each < _UNROTATED for each in divisors)
        if any(each != 1 for each in divisors[:rotated]):
            file = tensors["rope_freqs.weight"].header.path
            raise CheckpointError(f"{file}: 'rope_freqs.weight' divides frequencies, which is not supported")
        full = {**full, "partial_rotary_factor": rotated / len(divisors)}
    own = config["num_hidden_layers"] - config["num_kv_shared_layers"]
    kinds = enumerate(config["layer_types"][:own])
    values = {f"blk.{i}.attn_v.weight" in tensors for i, kind in kinds if kind == "full_attention"}
    table = tensors.get("per_layer_token_embd.weight")
    return {
        "attention_k_eq_v": values == {False},
        **({"vocab_size_per_layer_input": table.shape[0]} if table else {}),
        "rope_scaling": None,
        "rope_parameters": {**config["rope_parameters"], "full_attention": full},
    }


_LEAVES = {
    ".layer_scalar.weight": ".layer_scalar",
    ".router.proj.scale": ".router.scale",
    ".experts.down_proj.scale": ".router.per_expert_scale",
    ".experts.gate_up_proj.weight": ".experts.gate_up_proj",
    ".experts.down_proj.weight": ".experts.down_proj",
}


def _gguf_tensors(tensors: Mapping[str, "GGUFTensor"], config: Mapping[str, Any]) -> dict[str, TensorSource]:
    found: dict[str, TensorSource] = {}
    for name, tensor in tensors.items():
        if name.endswith("_proj.weight") and ".experts." in name:
            check_experts(name, tensor)
        leaf = next((leaf for leaf in _LEAVES if name.endswith(leaf)), "")
        found[name.removesuffix(leaf) + _LEAVES.get(leaf, "")] = tensor
    return found


class Gemma4(Decoder):
    """A target network."""

    gguf = GGUFArchitecture(
        "gemma4",
        "Gemma4ForCausalLM",
        (
            *QK_NORMS,
            "pre_feedforward_layernorm",
            "post_feedforward_layernorm",
            "pre_feedforward_layernorm_2",
            "post_feedforward_layernorm_1",
            "post_feedforward_layernorm_2",
            "post_per_layer_input_norm",
            "per_layer_input_gate",
            "per_layer_projection",
            "layer_scalar",
            "router.proj",
            "experts.gate_up_proj",
            "experts.down_proj",
        ),
        scales=("final_logit_softcapping",),
        config=_gguf_config,
        from_tensors=_gguf_from_tensors,
        tensors=_gguf_tensors,
    )
    config: Gemma4Config
    config_type = Gemma4Config
    defaults: ClassVar = {
        "vocab_size": 262144,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 30,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "global_head_dim": 512,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
        "sliding_window": 512,
        "hidden_size_per_layer_input": 256,
        "vocab_size_per_layer_input": 262144,
    }
    activation = ("hidden_activation", "gelu_pytorch_tanh")
    norm_type = Gemma4Norm
    built = ("final_logit_softcapping", "use_bidirectional_attention")

    @classmethod
    def is_windowed(cls, config: Mapping[str, Any], layer: int) -> bool:
        return (layer + 1) % 6 > 0

    @classmethod
    def own_fields(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        # "vision" is for images alone.
        if (both := config.get("use_bidirectional_attention")) not in (None, False, "vision"):
            raise ConfigError(f"use_bidirectional_attention {both!r} is not supported; supported: 'vision'")
        if config.get("attention_bias"):
            raise ConfigError("attention_bias True is not supported; supported: False")
        count = config["num_hidden_layers"]
        stated = config.get("layer_types") or [
            "sliding_attention" if cls.is_windowed(config, layer) else "full_attention"
            for layer in range(count)
        ]
        types = (*stated[:-1], "full_attention")  # as in transformers, whatever a file says
        shared = config.get("num_kv_shared_layers") or 0
        if missing := set(types[max(count - shared, 0) :]) - set(types[: max(count - shared, 0)]):
            raise ConfigError(f"num_kv_shared_layers {shared}: no layer before has {sorted(missing)[0]!r}")
        ropes = config.get("rope_parameters") or _ROPES
        if config.get("rope_scaling"):
            raise ConfigError("rope_scaling is not supported; supported: rope_parameters by kind of layer")
        for kind in _ROPES:
            for key in ("rope_theta", "rope_type"):
                if key not in (ropes.get(kind) or {}):
                    raise ConfigError(f"rope_parameters: {kind} needs {key}")
        lengths = {"max_position_embeddings": config["max_position_embeddings"]}
        rope, local = (
            RopeConfig.from_hf({**lengths, "rope_parameters": ropes.get(kind)}, partial=True)
            for kind in ("full_attention", "sliding_attention")
        )
        return {
            **_global_heads(config, types),
            "layer_types": types,
            "qk_norm": True,
            "attention_scale": 1.0,
            "embedding_scale": config["hidden_size"] ** 0.5,
            "rope": rope,
            "local_rope": local,
            "moe": _experts(config),
        }

    def __init__(self, config: Gemma4Config, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        super().__init__(config, dtype=dtype, rngs=rngs)
        args: dict[str, Any] = {"dtype": dtype, "rngs": rngs}
        size, width = config.hidden_size_per_layer_input, config.hidden_size
        every, eps = size * config.num_hidden_layers, config.rms_norm_eps
        tokens = config.vocab_size_per_layer_input
        self.embedding_per_layer = (
            Embedding(tokens, every, "model.embed_tokens_per_layer", **args) if size else None
        )
        self.input_projection = (
            Linear(width, every, "model.per_layer_model_projection", axes=("embed", None), **args)
            if size
            else None
        )
        self.input_norm = Gemma4Norm(size, eps, "model.per_layer_projection_norm", **args) if size else None

    @classmethod
    def head_dims(cls, config: Any) -> tuple[int, ...]:
        return tuple(config.of_layer(layer).head_dim for layer in range(config.num_hidden_layers))

    @classmethod
    def make_layer(cls, config: Any, index: int, **args: Any) -> nnx.Module:
        return Gemma4Layer(config, index, **args)

    @classmethod
    def ignored(cls, config: Any) -> tuple[str, ...]:
        shared = filter(config.is_shared, range(config.num_hidden_layers))
        leaves = ("k_proj", "v_proj", "k_norm", "v_norm")
        return tuple(f"model.layers.{layer}.self_attn.{leaf}.*" for layer in shared for leaf in leaves)

    @property
    def cache_shapes(self) -> tuple[LayerCacheShape, ...]:
        shapes = [self.config.of_layer(layer) for layer in range(self.config.num_hidden_layers)]
        return tuple(
            () if self.config.is_shared(layer) else CacheShape(shape.num_cached_heads, shape.head_dim)
            for layer, shape in enumerate(shapes)
        )

    def layer_inputs(self, tokens: jax.Array, x: jax.Array) -> tuple[tuple[jax.Array, ...], ...]:
        table, projection, norm = self.embedding_per_layer, self.input_projection, self.input_norm
        if table is None or projection is None or norm is None:
            return super().layer_inputs(tokens, x)
        size = self.config.hidden_size_per_layer_input
        shape = (len(tokens), self.config.num_hidden_layers, size)
        of_tokens = scaled(table(tokens), size**0.5).reshape(shape)
        of_stream = norm((projection(x) * self.config.hidden_size**-0.5).reshape(shape))
        inputs = (of_stream + of_tokens) * 2**-0.5
        return tuple((inputs[:, layer],) for layer in range(shape[1]))

    def logits(self, hidden: jax.Array) -> jax.Array:
        logits, bound = super().logits(hidden), self.config.final_logit_softcapping
        return jnp.tanh(logits / bound) * bound if bound else logits


def _global_heads(config: Mapping[str, Any], types: tuple[str, ...]) -> dict[str, int]:
    """Heads of the layers without a window. transformers 5 lists them layer by layer.

    Raises:
      ConfigError: layers of one kind differ from one another, or in something else.
    """
    names = {"head_dim": "global_head_dim", "num_key_value_heads": "global_kv_heads"}
    usual = config["num_key_value_heads"]
    if config.get("attention_k_eq_v"):
        usual = config.get("num_global_key_value_heads") or usual
    stated = {"head_dim": config["global_head_dim"], "num_key_value_heads": usual}
    by_layer = config.get("per_layer_config")
    if by_layer is not None:
        layers = [str(layer) for layer, kind in enumerate(types) if kind == "full_attention"]
        full = [by_layer.get(layer) for layer in layers]
        if any(each != full[0] for each in full) or by_layer.keys() - set(layers):
            raise ConfigError("per_layer_config differs among layers of one kind")
        own = {"head_dim": config["head_dim"], "num_key_value_heads": config["num_key_value_heads"]}
        stated = {**own, **(full[0] or {})}
    for key, value in stated.items():
        if key not in names or not isinstance(value, int) or value < 1:
            raise ConfigError(f"per_layer_config: {key} {value!r} is not supported")
    if config["num_attention_heads"] % stated["num_key_value_heads"]:
        raise ConfigError(f"num_attention_heads is not a multiple of {stated['num_key_value_heads']}")
    return {names[key]: value for key, value in stated.items()}


def _experts(config: Mapping[str, Any]) -> MoeConfig | None:
    if not config.get("enable_moe_block"):
        return None
    sizes = ("num_experts", "top_k_experts", "moe_intermediate_size")
    if missing := [key for key in sizes if not config.get(key)]:
        raise ConfigError(f"enable_moe_block is set, but {missing[0]} is missing")
    return MoeConfig(*(config[key] for key in sizes))
