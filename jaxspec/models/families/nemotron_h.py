"""Nemotron-H and Nemotron 3: every layer is one of Mamba-2, attention without rope, an MLP or routed experts.

Source: the `NemotronHForCausalLM` of transformers; the MTP layer is vLLM's `nemotron_h_mtp.py`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from jaxspec.attention import (
    AnyMemory,
    AttentionKind,
    FullAttention,
    LayerCacheShape,
    PositionWise,
    Recurrent,
    RopeTables,
)
from jaxspec.config import ConfigError, ModelConfig, MoeConfig, RopeConfig, joined
from jaxspec.config.mamba import MambaConfig
from jaxspec.models.decoder import Decoder
from jaxspec.models.families.deepseek.deepseek import DeepseekMoE
from jaxspec.models.families.nemotron_h_gguf import NEMOTRON_H
from jaxspec.models.layers.mamba2 import Mamba2, mamba_state_shape
from jaxspec.models.layers.transformer import Attention, Linear, RMSNorm
from jaxspec.models.mtp_names import OWN_LAYERS
from jaxspec.sharding import PendingSum, later_add, total
from jaxspec.weights.expert_sources import ExpertSources, Stacked
from jaxspec.weights.parameters import Projection


@dataclass(frozen=True)
class NemotronHConfig(ModelConfig):
    """Adds the sizes of Mamba-2 layers, and the kinds of the layers that draft."""

    mamba: MambaConfig | None = None
    mtp_types: tuple[str, ...] = ()
    layer_kinds: ClassVar[tuple[str, ...]] = ("full_attention", "linear_attention", "moe", "mlp")


class NemotronHMLP(nnx.Module):
    """down(relu(up(x))²): maps [..., M] to [..., M]."""

    def __init__(self, config: ModelConfig, name: str, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        width, inner = config.hidden_size, config.intermediate_size
        args: dict[str, Any] = {"bias": config.mlp_bias, "dtype": dtype, "rngs": rngs}
        self.up = Linear(width, inner, f"{name}.up_proj", axes=("embed", "feed_forward"), **args)
        self.down = Linear(inner, width, f"{name}.down_proj", axes=("feed_forward", "embed"), **args)

    def __call__(self, x: jax.Array) -> jax.Array | PendingSum:
        return self.down(_relu_squared(self.up(x)))


class NemotronHMoE(DeepseekMoE):
    """DeepSeek's experts without gates, which may read and write rows of another width than the model's."""

    num_inner = 1
    shared_type = NemotronHMLP

    def __init__(self, config: ModelConfig, name: str, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        assert config.moe is not None
        super().__init__(config, name, dtype=dtype, rngs=rngs)
        width, latent = config.hidden_size, config.moe.latent_size
        args: dict[str, Any] = {
            "axes": ("embed", None),
            "bias": config.mlp_bias,
            "dtype": dtype,
            "rngs": rngs,
        }
        self.to_latent = Linear(width, latent, f"{name}.fc1_latent_proj", **args) if latent else None
        self.from_latent = Linear(latent, width, f"{name}.fc2_latent_proj", **args) if latent else None

    @classmethod
    def sources(cls, name: str, count: int, width: int, inner: int) -> ExpertSources:
        def stacked(leaf: str, in_shape: tuple[int, ...], out_shape: tuple[int, ...]) -> Stacked:
            names = (f"{name}.{i}.{leaf}.weight" for i in range(count))
            return Stacked(tuple(Projection(each, in_shape, out_shape) for each in names))

        return ExpertSources(
            gate_up=stacked("up_proj", (width,), (1, inner)), down=stacked("down_proj", (inner,), (width,))
        )

    def activate(self, *inner: jax.Array) -> jax.Array:
        (up,) = inner
        return _relu_squared(up)

    def expert_input(self, rows: jax.Array) -> jax.Array:
        return rows if self.to_latent is None else self.to_latent(rows)

    def expert_output(self, y: jax.Array | PendingSum) -> jax.Array | PendingSum:
        return y if self.from_latent is None else self.from_latent(total(y))


def _relu_squared(x: jax.Array) -> jax.Array:
    return jnp.square(jax.nn.relu(x))


class NemotronHLayer(nnx.Module):
    """x + mixer(norm(x)); `reads_past` tells a mixer that has a memory from one that sees each row alone."""

    takes_pending: ClassVar[bool] = True

    def __init__(self, config: ModelConfig, name: str, mixer: Any, *, reads_past: bool, **args: Any):
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, f"{name}.norm", **args)
        self.mixer, self.reads_past = mixer, reads_past

    def __call__(
        self, x: jax.Array | PendingSum, memory: AnyMemory, layer: int, rope: RopeTables
    ) -> tuple[jax.Array | PendingSum, AnyMemory]:
        """Maps x [N, M] to [N', M]; also returns the memory. `layer` is the layer's index in the memory."""
        normed = self.norm(x)
        if self.reads_past:
            mixed, memory = self.mixer(normed, memory, layer, rope)
        else:
            mixed = self.mixer(memory.outputs(layer, normed))
        return later_add(memory.outputs(layer, total(x)), mixed), memory


class _InTurn(nnx.Module):
    """Layers one after another, as one."""

    def __init__(self, layers: Iterable[nnx.Module]):
        self.layers = nnx.List(layers)

    def __call__(
        self, x: jax.Array | PendingSum, memory: AnyMemory, layer: int, rope: RopeTables
    ) -> tuple[jax.Array | PendingSum, AnyMemory]:
        """As of `NemotronHLayer`; `layer` is the first one's index."""
        for i, each in enumerate(self.layers, start=layer):
            x, memory = each(x, memory, i, rope)
        return x, memory


_LETTERS = {"M": "linear_attention", "*": "full_attention", "E": "moe", "-": "mlp"}
_OLDER = {"mamba": "linear_attention", "attention": "full_attention"}
_PATTERN = (
    "layers_block_type",
    "hybrid_override_pattern",
    ("linear_attention", "moe", "full_attention", "mlp"),
)
_MTP_PATTERN = ("mtp_layers_block_type", "mtp_hybrid_override_pattern", ("full_attention", "moe"))
_BUILT = {"mamba_hidden_act": "silu", "n_shared_experts": 1}


class NemotronH(Decoder):
    """A target network."""

    config_type = NemotronHConfig
    defaults: ClassVar = {
        "vocab_size": 131072,
        "hidden_size": 4096,
        "intermediate_size": 21504,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 4096,
        "layer_norm_epsilon": 1e-5,
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "n_groups": 8,
        "ssm_state_size": 128,
        "conv_kernel": 4,
        "use_conv_bias": True,
        "use_bias": False,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 7688,
        "moe_shared_expert_intermediate_size": 7688,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
    }
    gguf = NEMOTRON_H
    activation = ("mlp_hidden_act", "relu2")
    has_windows = False
    recycles_normed = True
    mtp_names = OWN_LAYERS

    @classmethod
    def read_config(cls, config: Mapping[str, Any]) -> ModelConfig:
        # transformers has two names for the list.
        named = [config[key] for key in ("layers_block_type", "layer_types") if config.get(key)]
        if named and named[0] != named[-1]:
            raise ConfigError("layers_block_type and layer_types are not the same")
        stated = {"layers_block_type": named[0]} if named else {}
        kinds = _layer_types(joined(config, stated), _PATTERN)
        return super().read_config(joined(config, {"layer_types": kinds, "num_hidden_layers": len(kinds)}))

    @classmethod
    def own_fields(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        for key, built in _BUILT.items():
            if config.get(key, built) != built:
                raise ConfigError(f"{key} {config[key]!r} is not supported; supported: {built}")
        _check_step_limit(config.get("time_step_limit"))
        return {
            "rms_norm_eps": config["layer_norm_epsilon"],
            # transformers has neither, whatever these keys say.
            "attention_bias": False,
            "tie_word_embeddings": False,
            "rope": RopeConfig(),
            "mamba": MambaConfig.from_hf(config),
            "mtp_types": tuple(_layer_types(config, _MTP_PATTERN)),
            "moe": MoeConfig(
                num_experts=config["n_routed_experts"],
                experts_per_token=config["num_experts_per_tok"],
                intermediate_size=config["moe_intermediate_size"],
                normalize=bool(config["norm_topk_prob"]),
                dense_layers=tuple(i for i, kind in enumerate(config["layer_types"]) if kind != "moe"),
                num_groups=config["n_group"],
                groups_per_token=config["topk_group"],
                scale=float(config["routed_scaling_factor"]),
                shared_size=config["moe_shared_expert_intermediate_size"],
                latent_size=config.get("moe_latent_size") or 0,
            ),
        }

    @classmethod
    def attention_kinds(cls, config: ModelConfig) -> tuple[AttentionKind, ...]:
        kinds: dict[str, AttentionKind] = {"linear_attention": Recurrent(), "full_attention": FullAttention()}
        return tuple(kinds.get(kind, PositionWise()) for kind in config.layer_types)

    @classmethod
    def layer_ropes(cls, config: ModelConfig) -> tuple[RopeConfig | None, ...]:
        return (None,) * config.num_hidden_layers

    @classmethod
    def make_layer(cls, config: ModelConfig, index: int, **args: Any) -> nnx.Module:
        return cls._layer(config, f"model.layers.{index}", config.layer_types[index], **args)

    @classmethod
    def make_mtp_layer(cls, config: ModelConfig, **args: Any) -> nnx.Module:
        assert isinstance(config, NemotronHConfig)
        kinds = enumerate(config.mtp_types)
        return _InTurn(cls._layer(config, f"mtp.layers.{i}", kind, **args) for i, kind in kinds)

    @classmethod
    def mtp_kinds(cls, config: ModelConfig) -> tuple[AttentionKind, ...]:
        assert isinstance(config, NemotronHConfig)
        if config.num_nextn_predict_layers > 1:
            raise ConfigError(
                f"num_nextn_predict_layers {config.num_nextn_predict_layers} is not supported; supported: 1"
            )
        kinds = config.mtp_types
        built: dict[str, AttentionKind] = {"full_attention": FullAttention(), "moe": PositionWise()}
        if "full_attention" not in kinds or set(kinds) - set(built):
            raise ConfigError(
                f"mtp_layers_block_type {list(kinds)} is not supported; supported: full_attention and moe"
            )
        return tuple(built[kind] for kind in kinds)

    @classmethod
    def mtp_rope(cls, config: ModelConfig) -> RopeConfig | None:
        return None

    @classmethod
    def _layer(cls, config: ModelConfig, name: str, kind: str, **args: Any) -> nnx.Module:
        mixer: Any
        if kind == "linear_attention":
            assert isinstance(config, NemotronHConfig)
            assert config.mamba is not None
            mixer = Mamba2(config.mamba, config.hidden_size, config.rms_norm_eps, f"{name}.mixer", **args)
        else:
            types = {"full_attention": Attention, "moe": NemotronHMoE, "mlp": NemotronHMLP}
            mixer = types[kind](config, f"{name}.mixer", **args)
        return NemotronHLayer(config, name, mixer, reads_past=kind.endswith("attention"), **args)

    @classmethod
    def layer_cache(cls, config: ModelConfig, kind: AttentionKind) -> LayerCacheShape:
        if isinstance(kind, PositionWise):
            return ()
        if isinstance(kind, Recurrent):
            assert isinstance(config, NemotronHConfig)
            assert config.mamba is not None
            return mamba_state_shape(config.mamba)
        return super().layer_cache(config, kind)


def _layer_types(config: Mapping[str, Any], keys: tuple[str, str, tuple[str, ...]]) -> list[str]:
    """The kind of every layer, from the keys that list kinds or letters, or else the default.

    Raises:
      ConfigError: a kind is not known.
    """
    key, older, default = keys
    kinds = config.get(key)
    if kinds is None and (pattern := config.get(older)) is not None:
        if unknown := sorted(set(pattern) - set(_LETTERS)):
            raise ConfigError(f"{older}: unknown letter {unknown[0]!r}")
        return [_LETTERS[letter] for letter in pattern]
    kinds = [_OLDER.get(kind, kind) for kind in kinds or default]
    if unknown := sorted(set(kinds) - set(NemotronHConfig.layer_kinds)):
        raise ConfigError(f"{key}: unknown kind {unknown[0]!r}")
    return kinds


def _check_step_limit(limit: Any) -> None:
    """Raises ConfigError if step sizes are to be clamped; transformers 5 spells infinity as an object."""
    if limit is None:
        return
    low, high = limit
    if low != 0 or high not in (float("inf"), {"__float__": "Infinity"}):
        raise ConfigError(f"time_step_limit {limit!r} is not supported; supported: none")
