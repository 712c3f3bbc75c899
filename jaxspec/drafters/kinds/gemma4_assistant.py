"""Gemma 4's assistants: a few layers without keys and values, which attend to those of the target.

All drafts of a step are drawn from one position, that of the last token: a row pairs the embedding of the
token before it with the state behind that token, of the target for draft 0 and the assistant's own for the
others, and sees the target's positions before the last token. So nothing is cached.

Source: `Gemma4AssistantForCausalLM` and `SinglePositionMultiTokenCandidateGenerator` of transformers 5.23.
There, rows also see what rejected drafts left in the caches, and windows are longer after a prompt than after
a single token; here neither, as in vLLM 0.33 (`gemma4_mtp.py`) and SGLang. These two rotate queries by the
position before; the acceptance with a real checkpoint would tell which one is right.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from jaxspec.attention import AnyMemory, LayerCache, LayerCacheShape, PagedMemory, RowBlock
from jaxspec.config import ConfigError, ModelConfig, inner_keys, joined
from jaxspec.drafters.autoregressive import AutoregressiveDrafter, DraftState
from jaxspec.drafters.base import Context, Needs, Rows, Target
from jaxspec.drafters.flags import Flag, tensor_flag
from jaxspec.drafters.head import Head
from jaxspec.drafters.layer_config import LAST_LAYER, check_only
from jaxspec.files import Checkpoint
from jaxspec.models.families.gemma.gemma4 import Gemma4, Gemma4Config, Gemma4Norm
from jaxspec.models.layers.rope import rope_tables
from jaxspec.models.layers.transformer import Embedding, Linear, scaled
from jaxspec.sampling import SamplingMode
from jaxspec.weights.loading import IGNORED
from jaxspec.weights.parameters import Buffer, Integers

MODEL_TYPE = "gemma4_assistant"
_OUTPUT = "model.embed_tokens"
"""The output rows. Nothing else reads this embedding: tokens have that of the target."""
_ORDERING = "masked_embedding.token_ordering"
_KEYS_AND_VALUES = tuple(
    f"model.layers.*.self_attn.{leaf}.*" for leaf in ("k_proj", "v_proj", "k_norm", "v_norm")
)
_ONLY: Mapping[str, Any] = {
    "hidden_size_per_layer_input": 0,
    "enable_moe_block": False,
    "use_double_wide_mlp": False,
}
"""Keys of Gemma 4's layers, each with the only value that an assistant has."""


@dataclass(frozen=True)
class Gemma4AssistantConfig:
    """The shape of an assistant.

    Attributes:
      layers: its own layers.
      target: the shape of the target.
      num_clusters: the clusters of tokens, all of one size, of which it scores the most likely; 0 for none.
      num_scored: how many these are.
    """

    own_head: ClassVar[bool] = False  # it never takes the target's
    layers: Gemma4Config
    target: Gemma4Config
    num_clusters: int = 0
    num_scored: int = 0

    @property
    def sources(self) -> tuple[int, ...]:
        """For each of its layers the target's layer whose cache it reads: the last of its kind with one."""
        found = (self.target.last_of(kind) for kind in self.layers.layer_types)
        return tuple(layer for layer in found if layer is not None)

    @classmethod
    def from_hf(
        cls, config: Mapping[str, Any], tensors: Mapping[str, Any], target: ModelConfig
    ) -> "Gemma4AssistantConfig":
        """Reads an assistant's `config.json`.

        Raises:
          ConfigError: the assistant does not fit the target, or a value is not supported.
        """
        if not isinstance(target, Gemma4Config):
            raise ConfigError(f"the assistant is for targets of gemma4_text, this one is {target.family!r}")
        if config.get("tie_word_embeddings") is False:
            raise ConfigError("an assistant's tie_word_embeddings False is not supported; supported: True")
        layers = _own_layers(config)
        if layers.vocab_size != target.vocab_size:
            raise ConfigError(
                f"the assistant has vocab_size {layers.vocab_size}, the target {target.vocab_size}"
            )
        width = config.get("backbone_hidden_size")
        if width != target.hidden_size:
            raise ConfigError(
                f"the assistant is for targets of hidden size {width}, this one has {target.hidden_size}"
            )
        for layer, kind in enumerate(layers.layer_types):
            source = target.last_of(kind)
            if source is None:
                raise ConfigError(f"the assistant reads a layer of {kind!r}, and the target has none")
            own, other = layers.of_layer(layer), target.of_layer(source)
            for name in ("num_key_value_heads", "head_dim"):
                if getattr(own, name) != getattr(other, name):
                    raise ConfigError(
                        f"the assistant's layer {layer} has {name} {getattr(own, name)}, the target's layer "
                        f"{source}, whose cache it reads, has {getattr(other, name)}"
                    )
        count, scored = _clusters(config, tensors, layers.vocab_size)
        return cls(layers, target, count, scored)

    def over(self, devices: int) -> "Gemma4AssistantConfig":
        layers, target = self.layers.over(devices), self.target.over(devices)
        copies = ("kv_copies", "global_kv_copies")
        if any(getattr(layers, name) != getattr(target, name) for name in copies):
            raise ConfigError(
                f"the assistant's {layers.num_attention_heads} heads cannot be split over {devices} devices "
                f"like the target's {target.num_attention_heads}"
            )
        return replace(self, layers=layers, target=target)

    def reads(self, config: Mapping[str, Any], *, any_target: bool) -> str:
        kinds = " and ".join(sorted(set(self.layers.layer_types)))
        return f"{LAST_LAYER}; the caches of the last layers of {kinds} that have one"

    def flags(self, checkpoint: Checkpoint) -> Iterator[Flag]:
        scored = f"of {self.num_scored} of {self.num_clusters} clusters"
        yield tensor_flag("logits", scored, "of all tokens", checkpoint.tensors, _ORDERING)
        reason = "transformers takes it; vLLM and SGLang take the one before"
        yield Flag("position of its queries", "that of the last token", None, reason)


def _own_layers(config: Mapping[str, Any]) -> Gemma4Config:
    """The shape of an assistant's layers, all of which are shared."""
    text = inner_keys(config, "text_config")
    check_only(text, _ONLY, "an assistant")
    family = text.get("model_type", "gemma4_text")
    if family != "gemma4_text":
        raise ConfigError(f"an assistant's model_type {family!r} is not supported; supported: gemma4_text")
    layers = ModelConfig.from_hf(joined(text, _ONLY, {"model_type": family, "num_kv_shared_layers": 0}))
    assert isinstance(layers, Gemma4Config)
    return replace(layers, num_kv_shared_layers=layers.num_hidden_layers)


def _clusters(config: Mapping[str, Any], tensors: Mapping[str, Any], vocab_size: int) -> tuple[int, int]:
    """How many clusters of tokens there are, and how many are scored; zeros if all tokens are."""
    count, scored = config.get("num_centroids") or 2048, config.get("centroid_intermediate_top_k") or 32
    if not config.get("use_ordered_embeddings"):
        return 0, 0
    if vocab_size % count:
        raise ConfigError(f"num_centroids {count} does not divide vocab_size {vocab_size}")
    if scored > count:
        raise ConfigError(f"centroid_intermediate_top_k {scored} is more than num_centroids {count}")
    ordering = tensors.get(_ORDERING)
    # Loading names a tensor that is missing or has no integers.
    if ordering is not None and ordering.dtype.kind in "iu":
        ids = np.sort(ordering.read(), axis=None)
        if not np.array_equal(ids, np.arange(vocab_size)):
            raise ConfigError(f"{_ORDERING} must hold each token once")
    return count, scored


class ClusterHead(nnx.Module):
    """Output rows of which only those of a few clusters of tokens are read.

    Every device has all of them, and computes all logits.
    """

    def __init__(self, config: Gemma4AssistantConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        args: dict[str, Any] = {"dtype": dtype, "rngs": rngs}
        width, self.vocab_size = config.layers.hidden_size, config.layers.vocab_size
        self.num_scored = config.num_scored
        self.rows = Embedding(self.vocab_size, width, _OUTPUT, **args)
        self.centroids = Linear(
            width, config.num_clusters, "masked_embedding.centroids", axes=("embed", None), **args
        )
        self.ordering = Buffer(
            jnp.arange(self.vocab_size, dtype=jnp.int32),
            axes=(None,),
            source=Integers(_ORDERING, (self.vocab_size,)),
        )

    def __call__(self, state: jax.Array) -> jax.Array:
        """Logits f32[B, V] for states [B, M]; minus infinity for tokens of other clusters."""
        scores = self.centroids(state, out_dtype=jnp.float32)
        clusters = self.ordering[...].reshape(scores.shape[-1], -1)
        _, best = lax.top_k(scores, self.num_scored)
        tokens = jnp.take(clusters, best, axis=0, mode="clip").reshape(len(state), -1)
        logits = jnp.einsum("bm,btm->bt", state, self.rows(tokens), preferred_element_type=jnp.float32)
        none = jnp.full((len(state), self.vocab_size), -jnp.inf)
        row = jnp.arange(len(state), dtype=jnp.int32)[:, None]
        return none.at[row, tokens].set(logits, mode="drop", wrap_negative_indices=False)


class Gemma4Assistant(Head, AutoregressiveDrafter):
    """Layers of Gemma 4 that read the target's caches and share its embedding.

    What `advance` returns is the state that the output rows read; the next draft reads its projection to the
    target's width.
    """

    title = "an assistant of Gemma 4"
    reads = ("dtype",)
    ignored = (*IGNORED, "lm_head.weight", *_KEYS_AND_VALUES)
    config_type = Gemma4AssistantConfig

    def __init__(self, config: Gemma4AssistantConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs, **settings: Any):
        args: dict[str, Any] = {"dtype": dtype, "rngs": rngs}
        super().__init__(**settings)
        layers, backbone = config.layers, config.target.hidden_size
        width = layers.hidden_size
        self.config = config
        self.needs = Needs(hidden=True, state_size=backbone, target_caches=config.sources)
        self.trained_length = layers.max_position_embeddings
        self.kinds = Gemma4.attention_kinds(layers)
        self.draft_vocab_size = layers.vocab_size
        self.input_projection = Linear(2 * backbone, width, "pre_projection", axes=("embed", "embed"), **args)
        self.layers = nnx.List([Gemma4.make_layer(layers, i, **args) for i in range(len(self.kinds))])
        self.norm = Gemma4Norm(width, layers.rms_norm_eps, "model.norm", **args)
        self.state_projection = Linear(width, backbone, "post_projection", axes=("embed", "embed"), **args)
        self.head = (
            ClusterHead(config, **args)
            if config.num_clusters
            else Linear(width, layers.vocab_size, _OUTPUT, axes=("embed", "vocab"), **args)
        )

    @classmethod
    def recognise(cls, checkpoint: Checkpoint) -> str | None:
        return "Google" if checkpoint.config.get("model_type") == MODEL_TYPE else None

    @classmethod
    def stand_in(cls, checkpoint: Checkpoint) -> ModelConfig:
        layers, width = _own_layers(checkpoint.config), checkpoint.config.get("backbone_hidden_size")
        if width is None:
            raise ConfigError(f"{checkpoint.name}: config.json: backbone_hidden_size is missing")
        return replace(layers, num_kv_shared_layers=0, hidden_size=width)

    @property
    def cache_shapes(self) -> tuple[LayerCacheShape, ...]:
        return ()

    def refresh(
        self, target: Target, rows: Rows, cache: tuple[LayerCache, ...]
    ) -> tuple[jax.Array, tuple[LayerCache, ...]]:
        assert rows.hidden is not None
        return rows.outputs(rows.hidden), cache

    def start(
        self,
        target: Target,
        context: Context,
        cache: tuple[LayerCache, ...],
        *,
        num_drafts: int,
        mode: SamplingMode,
    ) -> DraftState:
        """Samples the first draft, from the target's state before the last token."""
        state = self._state(target, context, context.last_token, context.hidden)
        return super().start(target, replace(context, hidden=state), cache, num_drafts=num_drafts, mode=mode)

    def run_ahead(
        self,
        target: Target,
        context: Context,
        tokens: jax.Array,
        hidden: jax.Array,
        cache: tuple[LayerCache, ...],
        i: jax.Array,
    ) -> tuple[jax.Array, tuple[LayerCache, ...]]:
        return self._state(target, context, tokens, self.state_projection(hidden)), cache

    def _state(self, target: Target, context: Context, tokens: jax.Array, hidden: jax.Array) -> jax.Array:
        """`advance` over the target's pages."""
        # The target has read the positions before the last token.
        block = RowBlock((context.length - 1)[:, None], context.active[:, None], context.page_table)
        memory = PagedMemory.build(self.kinds, context.target_caches, (block,))
        state, _ = self.advance(target, tokens, hidden, context.length, memory)
        return state

    def advance(
        self, target: Target, tokens: jax.Array, hidden: jax.Array, positions: jax.Array, memory: AnyMemory
    ) -> tuple[jax.Array, AnyMemory]:
        embedded = scaled(target.embedding(tokens), self.config.target.embedding_scale)
        x = self.input_projection(jnp.concatenate([embedded, hidden], axis=-1))
        layers = self.config.layers
        ropes = tuple(zip(Gemma4.layer_ropes(layers), Gemma4.head_dims(layers), strict=True))
        for i, (layer, rope) in enumerate(zip(self.layers, ropes, strict=True)):
            x, memory = layer(x, memory, i, rope_tables(*rope, positions))
        return self.norm(x), memory

    def project(self, target: Target, state: jax.Array, *, out_dtype: Any = jnp.float32) -> jax.Array:
        if isinstance(self.head, ClusterHead):
            return self.head(state).astype(out_dtype)
        return self.head(state, out_dtype=out_dtype)
