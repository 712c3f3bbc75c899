"""A new head for a target."""

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
    layers = ModelConfig(
        family="llama",
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        intermediate_size=config.intermediate_size or target.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=target.num_attention_heads,
        num_key_value_heads=target.num_key_value_heads,
        head_dim=target.head_dim,
        rms_norm_eps=target.rms_norm_eps,
        max_position_embeddings=target.max_position_embeddings,
        rope=RopeConfig(theta=config.rope_theta),
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


def start_from(head: Eagle3, trained: nnx.Module) -> None:
    """Gives a new head the trained parameters of another one, of any draft vocabulary.

    Raises:
      ConfigError: the other one has another shape.
    """
    ours, theirs = (_shapes(nnx.state(module, is_trained)) for module in (head, trained))
    if ours != theirs:
        name = min(key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key))
        raise ConfigError(
            f"head.initial: its {name} is {theirs.get(name, 'missing')}, that of the head to train is "
            f"{ours.get(name, 'missing')}"
        )
    nnx.update(head, nnx.state(trained, is_trained))


def _shapes(state: nnx.State) -> dict[str, tuple[int, ...]]:
    return {".".join(map(str, path)): value.shape for path, value in nnx.to_flat_state(state)}


def is_trained(path: tuple, value: object) -> bool:
    """Which variables of a head are trained: all parameters but the output rows, which are the target's."""
    return isinstance(value, nnx.Param) and path[0] != "head"


def cast(tree: nnx.State, dtype: jnp.dtype) -> nnx.State:
    """The floating-point arrays of a tree in another dtype."""
    return jax.tree.map(lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree)
