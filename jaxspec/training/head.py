"""A new head for a target."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxspec.config import ConfigError, ModelConfig, RopeConfig
from jaxspec.drafters.eagle3 import Eagle3, Eagle3Config, default_capture
from jaxspec.models.decoder import Decoder
from jaxspec.training.config import HeadConfig


def head_config(config: HeadConfig, target: ModelConfig, draft_vocab_size: int) -> Eagle3Config:
    """The shape of the head that a training run asks for.

    Raises:
      ConfigError: it cannot be built on this target.
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
    """The shape of a run that goes on from a head: that head's, but for the draft vocabulary.

    Raises:
      ConfigError: `config` asks for another shape, or the head has what training or exporting it has not.
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
            "head.initial: it reads the target's final hidden state alone; such are not trained"
        )
    if layers.hidden_size != target.hidden_size:
        raise ConfigError(
            f"head.initial: it is {layers.hidden_size} wide and the target {target.hidden_size}; such heads "
            "are not trained"
        )
    plain = _layers(layers, layers.num_hidden_layers, layers.intermediate_size, layers.rope.theta)
    for item in dataclasses.fields(ModelConfig):
        has, wanted = getattr(layers, item.name), getattr(plain, item.name)
        if item.name == "rope":
            has, wanted = has.kind, wanted.kind
        if has != wanted and item.name not in ("tie_word_embeddings", "num_nextn_predict_layers"):
            raise ConfigError(
                f"head.initial: its {item.name} is {has!r}; only heads with {wanted!r} are trained"
            )
    return dataclasses.replace(
        initial, draft_vocab_size=draft_vocab_size, own_embedding=False, first_layer="layers.0"
    )


def _layers(shape: ModelConfig, num_layers: int, intermediate_size: int, rope_theta: float) -> ModelConfig:
    """Plain Llama layers of a target's or head's width and heads."""
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
      target_ids: i32[W], the draft vocabulary, rising.
      num_speculative_tokens: K of the engine that will run the head.
    """
    head = Eagle3(
        config,
        num_speculative_tokens=num_speculative_tokens,
        dtype=jnp.float32,
        rngs=nnx.Rngs(seed),
    )
    if head.target_ids is not None and head.draft_ids is not None:
        inverse = np.full(config.layers.vocab_size, -1, np.int32)
        inverse[target_ids] = np.arange(target_ids.size)
        head.target_ids.set_value(jnp.asarray(target_ids, jnp.int32))
        head.draft_ids.set_value(jnp.asarray(inverse))
    head.head.kernel.set_value(target.output_kernel[:, target_ids])
    # The output rows expect what the target's final norm makes.
    head.norm.scale.set_value(jnp.array(target.norm.factors()))
    return head


def start_from(head: Eagle3, trained: Eagle3, target: Decoder) -> None:
    """Gives a new head the trained parameters of another one, of any draft vocabulary.

    Raises:
      ConfigError: the other one has another shape, or embeddings or output rows that are not the target's.
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
        raise ConfigError("head.initial: its output rows are not the target's; such heads are not trained")
    tokens = jnp.arange(target.config.vocab_size)
    if trained.embedding is not None and not _alike(trained.embedding(tokens), target.embedding(tokens)):
        raise ConfigError("head.initial: its embedding is not the target's; such heads are not trained")
    nnx.update(head, nnx.state(trained, is_trained))


def _alike(ours: jax.Array, theirs: jax.Array) -> bool:
    """Equal but for how they were rounded or packed."""
    ours, theirs = ours.astype(jnp.float32), theirs.astype(jnp.float32)
    return bool(jnp.abs(ours - theirs).mean() < 0.2 * jnp.abs(theirs).mean())


def _shapes(state: nnx.State) -> dict[str, tuple[int, ...]]:
    return {".".join(map(str, path)): value.shape for path, value in nnx.to_flat_state(state)}


def is_trained(path: tuple, value: object) -> bool:
    """Which variables of a head are trained: all parameters but the output rows and an embedding,
    which are the target's."""
    return isinstance(value, nnx.Param) and path[0] not in ("head", "embedding")


def cast(tree: nnx.State, dtype: jnp.dtype) -> nnx.State:
    """The floating-point arrays of a tree in another dtype."""
    return jax.tree.map(lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree)
