"""Default sizes of a run, derived from its target, its data and the device's memory."""

import dataclasses
import json
import os
from pathlib import Path

import jax
import numpy as np
from flax import nnx

from jaxspec.attention import CacheShape
from jaxspec.config import ConfigError, ModelConfig
from jaxspec.drafters.kinds.eagle3 import Eagle3
from jaxspec.jax_settings import default_device
from jaxspec.lab.training.config import TrainConfig
from jaxspec.lab.training.stage_folder import write_atomically
from jaxspec.models.decoder import Decoder

SIZES = "sizes.json"
FEWEST_STEPS = 300
FEWEST_STEPS_TO_ADAPT_ON_A_CPU = 20
"""The head drafts already, and an update takes a CPU seconds."""
_ROUND = 64  # row lengths are multiples of this
_SHORTEST_ROW = 512


def device_memory() -> int:
    """Bytes that one device may use; on a CPU, half of the machine's memory."""
    stats = default_device().memory_stats() or {}
    limit = stats.get("bytes_limit")
    return int(limit or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2)


def draft_vocabulary_size(target: ModelConfig) -> int:
    """W of a new head: all tokens of a vocabulary up to 16,384, else 8,192 up to 65,536, else 32,768."""
    if target.vocab_size <= 16384:
        return target.vocab_size
    return 8192 if target.vocab_size <= 65536 else 32768


def fitting_slots(target: Decoder, wanted: int, positions: int, *, memory: int) -> int:
    """The number of slots, at most `wanted`, whose caches of `positions` fit two fifths of the memory."""
    size = max(array.dtype.itemsize for array in jax.tree.leaves(nnx.state(target, nnx.Param)))
    position = size * sum(
        shape.num_kv_heads * shape.head_dim * shape.planes / shape.positions_per_entry
        for layer in target.cache_shapes
        for shape in (layer if isinstance(layer, tuple) else (layer,))
        if isinstance(shape, CacheShape)
    )
    return max(min(wanted, int(0.4 * memory / (position * positions))), 1)


def resolve_sizes(
    config: TrainConfig,
    head: Eagle3,
    target: Decoder,
    lengths: np.ndarray,
    *,
    memory: int,
    devices: int,
    fewest_steps: int = FEWEST_STEPS,
) -> TrainConfig:
    """The configuration with all defaults filled in.

    Args:
      config: may have sizes of 0.
      head, target: the head to train and its target.
      lengths: tokens of each conversation.
      memory: bytes of each device.
      devices: number of devices.
      fewest_steps: the fewest updates if `config.steps` is 0.
    """
    row_length = config.row_length
    if not row_length:
        longest = max(int(lengths.max()), config.num_unroll_steps + 2)
        row_length = -(-longest // _ROUND) * _ROUND
        if longest < _SHORTEST_ROW < lengths.sum():
            row_length = _SHORTEST_ROW
    rows = -(-int(np.minimum(lengths, row_length).sum()) // row_length)
    batch_size = config.batch_size
    if not batch_size:
        fitting = _fitting_tokens(head, target, row_length, config.num_unroll_steps, memory) * devices
        tokens = min(config.batch_tokens, fitting)
        # With little data, smaller updates: at least four updates per epoch, and rows for validation.
        wanted = min(tokens // row_length, rows // 5)
        batch_size = max(wanted // devices, 1) * devices
    validation = config.validation_rows
    if not config.batch_size:
        validation = min(validation, rows // 10) // batch_size * batch_size
    changed = dataclasses.replace(
        config, row_length=row_length, batch_size=batch_size, validation_rows=validation
    )
    if config.steps:
        return changed
    steps = max(round(config.epochs * (rows - validation) / batch_size), fewest_steps)
    return dataclasses.replace(
        changed,
        steps=steps,
        warmup_steps=min(config.warmup_steps, steps // 10),
        validate_every=min(config.validate_every, -(-steps // 8)),
        checkpoint_every=min(config.checkpoint_every, -(-steps // 4)),
    )


def save_sizes(config: TrainConfig, folder: Path) -> None:
    """Saves a resolved configuration, since the run may be resumed on a machine with other memory."""
    write_atomically(folder / SIZES, json.dumps(dataclasses.asdict(config), indent=2).encode())


def read_sizes(folder: Path) -> TrainConfig | None:
    """The configuration written by `save_sizes`, or None.

    Raises:
      ConfigError: the file holds something else.
    """
    path = folder / SIZES
    if not path.is_file():
        return None
    try:
        return TrainConfig(**json.loads(path.read_text("utf-8")))
    except (ValueError, TypeError):
        raise ConfigError(f"{path}: not the sizes of a training run") from None


def _fitting_tokens(head: Eagle3, target: Decoder, row_length: int, num_steps: int, memory: int) -> int:
    """Tokens per update that fit a device's memory, by an estimate of the backward pass."""
    size = max(array.dtype.itemsize for array in jax.tree.leaves(nnx.state(target, nnx.Param)))
    shape, layers = target.config, head.config.layers
    # 16 bytes: float32 master weights, their gradient and two moments.
    weights = size * (_count(target) + _count(head)) + 16 * _count(head)
    widest = shape.intermediate_size
    if shape.moe is not None:
        widest = max(widest, shape.moe.experts_per_token * shape.moe.intermediate_size)
    forward = size * (4 * widest + 16 * shape.hidden_size)
    scores = 3 * 4 * layers.num_attention_heads * row_length
    step = size * (16 * layers.hidden_size + 6 * layers.intermediate_size)
    steps = num_steps * layers.num_hidden_layers * step
    token = forward + scores + size * head.config.draft_vocab_size + steps
    return max(int(0.6 * (memory - weights)) // token, row_length)


def _count(module: nnx.Module) -> int:
    return sum(array.size for array in jax.tree.leaves(nnx.state(module, nnx.Param)))
