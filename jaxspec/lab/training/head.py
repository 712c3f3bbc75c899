"""Making the head that is trained."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxspec.config import ConfigError, ModelConfig, RopeConfig
from jaxspec.drafters.kinds.eagle3 import Eagle3, Eagle3Config, default_capture
from jaxspec.jax_settings import own_settings
from jaxspec.lab.training.config import HeadConfig
from jaxspec.models.decoder import Decoder


def head_config(config: HeadConfig, target: ModelConfig, draft_vocab_size: int) -> Eagle3Config:
    """The shape of a new head.

    Raises:
      ConfigError: `config` does not fit the target.
    """
    if config.num_layers < 1:
        raise ConfigError(f"head.num_layers must be at least 1, got {config.num_layers}")
    capture = tuple(config.capture) or default_capture(target.num_hidden_layers)
    outside = [i for i in capture if not 0 <= i <= target.num_hidden_layers]
    if outside or list(capture) != sorted(capture):
        raise ConfigError(
            f"head.capture must rise, from 0 to at most {target.num_hidden_layers}, the target's number of "
            f"layers; got {list(capture)}"
        )
    layers = _layers(
        target, config.num_layers, config.intermediate_size or target.intermediate_size, config.rope_theta
    )
    return Eagle3Config(
        layers=layers,
        draft_vocab_size=draft_vocab_size,
        target_hidden_size=target.hidden_size,
        capture=capture,
        norm_before_residual=config.norm_before_residual,
        fc_norm=config.fc_norm,
        norm_output=config.norm_output,
        first_layer="layers.0",
    )


def config_from(
    initial: Eagle3Config, config: HeadConfig, target: ModelConfig, draft_vocab_size: int
) -> Eagle3Config:
    """The shape of a head that starts from another: the same except for the draft vocabulary.

    Raises:
      ConfigError: `config` contradicts the initial head, or the head has a feature that cannot be trained or
        exported.
    """
    layers = initial.layers
    ours = HeadConfig(
        initial=config.initial,
        num_layers=layers.num_hidden_layers,
        intermediate_size=layers.intermediate_size,
        capture=initial.capture,
        rope_theta=layers.rope.theta,
        norm_before_residual=initial.norm_before_residual,
        fc_norm=initial.fc_norm,
        norm_output=initial.norm_output,
    )
    for field in dataclasses.fields(HeadConfig):
        asked, has = getattr(config, field.name), getattr(ours, field.name)
        if asked not in (has, field.default):
            raise ConfigError(f"head.{field.name} is {asked!r}, that of head.initial {has!r}; leave it out")
    if not initial.capture:
        raise ConfigError(
            "head.initial: it reads only the target's final hidden state; such heads cannot be trained"
        )
    if layers.hidden_size != target.hidden_size:
        raise ConfigError(
            f"head.initial: it is {layers.hidden_size} wide and the target {target.hidden_size}; such heads "
            "cannot be trained"
        )
    plain = _layers(layers, layers.num_hidden_layers, layers.intermediate_size, layers.rope.theta)
    for item in dataclasses.fields(ModelConfig):
        has, wanted = getattr(layers, item.name), getattr(plain, item.name)
        if item.name == "rope":
            has, wanted = has.kind, wanted.kind
        if has != wanted and item.name not in ("tie_word_embeddings", "num_nextn_predict_layers"):
            raise ConfigError(
                f"head.initial: its {item.name} is {has!r}; only heads with {wanted!r} can be trained"
            )
    return dataclasses.replace(
        initial, draft_vocab_size=draft_vocab_size, own_embedding=False, first_layer="layers.0"
    )


def _layers(shape: ModelConfig, num_layers: int, intermediate_size: int, rope_theta: float) -> ModelConfig:
    """Llama layers with the width and the heads of a target or a head."""
    return ModelConfig(
        family="llama",
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_key_value_heads,
        head_dim=shape.head_dim,
        rms_norm_eps=shape.rms_norm_eps,
        max_position_embeddings=shape.max_position_embeddings,
        rope=RopeConfig(theta=rope_theta),
    )


@own_settings()
def new_head(
    config: Eagle3Config,
    target: Decoder,
    target_ids: np.ndarray,
    *,
    num_speculative_tokens: int,
    seed: int,
) -> Eagle3:
    """An untrained head with float32 weights; its output rows and final norm are the target's.

    Args:
      config: its shape.
      target: the target.
      target_ids: i32[W], the draft vocabulary, ascending.
      num_speculative_tokens: K of the engine that will run the head.
      seed: seed of the weights.
    """
    head = Eagle3(
        config,
        num_speculative_tokens=num_speculative_tokens,
        dtype=jnp.dtype(jnp.float32),
        rngs=nnx.Rngs(seed),
    )
    if head.target_ids is not None and head.draft_ids is not None:
        inverse = np.full(config.layers.vocab_size, -1, np.int32)
        inverse[target_ids] = np.arange(target_ids.size)
        head.target_ids.set_value(jnp.asarray(target_ids, jnp.int32))
        head.draft_ids.set_value(jnp.asarray(inverse))
    head.head.kernel.set_value(target.output_kernel[:, target_ids])
    # The output rows are trained for the output of the target's final norm.
    head.norm.scale.set_value(jnp.array(target.norm.factors()))
    return head


@own_settings()
def start_from(head: Eagle3, trained: Eagle3, target: Decoder) -> None:
    """Copies the trained parameters of `trained`, with any draft vocabulary, into a new head.

    Raises:
      ConfigError: `trained` has another shape, or an embedding or output rows that are not the target's.
    """
    ours, theirs = (_shapes(nnx.state(module, is_trained)) for module in (head, trained))
    if ours != theirs:
        name = min(key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key))
        raise ConfigError(
            f"head.initial: its {name} is {theirs.get(name, 'missing')}, that of the head to train is "
            f"{ours.get(name, 'missing')}"
        )
    ids = slice(None) if trained.target_ids is None else trained.target_ids[...]
    if not _alike(trained.head.kernel[...], target.output_kernel[:, ids]):
        raise ConfigError("head.initial: its output rows are not the target's; such heads cannot be trained")
    tokens = jnp.arange(target.config.vocab_size)
    if trained.embedding is not None and not _alike(trained.embedding(tokens), target.embedding(tokens)):
        raise ConfigError("head.initial: its embedding is not the target's; such heads cannot be trained")
    nnx.update(head, nnx.state(trained, is_trained))


def _alike(ours: jax.Array, theirs: jax.Array) -> bool:
    """Whether arrays are equal up to rounding or quantization."""
    ours, theirs = ours.astype(jnp.float32), theirs.astype(jnp.float32)
    return bool(jnp.abs(ours - theirs).mean() < 0.2 * jnp.abs(theirs).mean())


def _shapes(state: nnx.State) -> dict[str, tuple[int, ...]]:
    return {".".join(map(str, path)): value.shape for path, value in nnx.to_flat_state(state)}


def is_trained(path: tuple, value: object) -> bool:
    """A filter for the trained variables of a head: all parameters except the output rows and the embedding,
    which are the target's."""
    return isinstance(value, nnx.Param) and path[0] not in ("head", "embedding")


def cast(tree: nnx.State, dtype: jnp.dtype) -> nnx.State:
    """Casts the floating-point arrays of a tree."""
    return jax.tree.map(lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree)
