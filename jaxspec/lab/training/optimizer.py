"""The optimiser of a training run."""

from typing import Any

import jax

from jaxspec.installation import needs
from jaxspec.lab.training.config import TrainConfig
from jaxspec.weights.parameters import Projection

with needs("train"):
    import optax
    from optax import contrib

_UPDATE_RMS = 0.2  # RMS of AdamW's updates per unit of learning rate, to which Muon's are scaled


def learning_rate_schedule(config: TrainConfig) -> optax.Schedule:
    """A linear warm-up, then a cosine decay to a hundredth; without a number of updates, the rate stays."""
    if not config.steps:
        first = config.learning_rate / (config.warmup_steps + 1)  # one update alone is to change something
        return optax.linear_schedule(first, config.learning_rate, config.warmup_steps)
    return optax.warmup_cosine_decay_schedule(
        0.0, config.learning_rate, config.warmup_steps, config.steps, 0.01 * config.learning_rate
    )


def make_optimizer(config: TrainConfig, params: Any) -> optax.GradientTransformation:
    """AdamW; or Muon for the matrices and AdamW for the rest.

    Args:
      config: the optimisation.
      params: a module's parameters, as `nnx.split` returns them; their declarations say which axes of a
        matrix are inputs.

    Source of Muon: K. Jordan, 2024; of its scale: arXiv 2502.16982.
    """
    schedule = learning_rate_schedule(config)
    if config.optimizer == "muon":
        algorithm = contrib.muon(
            schedule,
            adam_b1=config.beta1,
            adam_b2=config.beta2,
            weight_decay=config.weight_decay,
            adam_weight_decay=config.weight_decay,
            consistent_rms=_UPDATE_RMS,
            muon_weight_dimension_numbers=_matrix_axes(params),
        )
    else:
        algorithm = optax.adamw(schedule, b1=config.beta1, b2=config.beta2, weight_decay=config.weight_decay)
    return optax.chain(optax.clip_by_global_norm(config.clip_norm), algorithm)


def _matrix_axes(params: Any) -> Any:
    """The input and output axes of each matrix in `params`; None for a vector."""

    def axes(variable: Any) -> contrib.MuonDimensionNumbers | None:
        dimensions = len(variable.get_value().shape)
        if dimensions < 2:
            return None
        source = variable.get_metadata("source")
        inputs = len(source.in_shape) if isinstance(source, Projection) else 1
        return contrib.MuonDimensionNumbers(tuple(range(inputs)), tuple(range(inputs, dimensions)))

    return [axes(variable) for variable in jax.tree.leaves(params, is_leaf=_is_variable)]


def _is_variable(node: Any) -> bool:
    return hasattr(node, "get_metadata")
