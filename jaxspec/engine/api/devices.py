"""Checks whether a model can be split over several devices, before anything is loaded."""

import ctypes
import warnings
from contextlib import suppress
from importlib.util import find_spec

from jaxspec.config import ConfigError, EngineConfig, ModelConfig
from jaxspec.jax_settings import platform
from jaxspec.sharding import divides


def check_devices(config: EngineConfig, target: ModelConfig) -> None:
    """Warns if the heads do not divide, so that every device keeps all of attention.

    Raises:
      ConfigError: the feed-forward networks, which are most of the weights, do not divide; the draft loop
        runs on the host; or NCCL, which GPUs communicate through, is missing.
    """
    count = config.tensor_parallel
    if count == 1:
        return
    asked = f"engine.tensor_parallel is {count}"
    _check_feed_forward(asked, count, target)
    if platform() == "gpu" and not _has_nccl():
        raise ConfigError(f"{asked}, but NCCL is missing: pip install nvidia-nccl-cu13 (or -cu12)")
    heads, kind = target.over(count).num_cached_heads, "key/value heads"
    if target.latent:
        heads, kind = target.num_attention_heads, "heads"
    if target.compressed:
        heads, kind = target.compressed.o_groups, "groups of heads"
    if not divides(count, "kv_heads", heads):
        warnings.warn(
            f"{asked}: it does not divide the model's {heads} {kind}, so every device keeps all of attention "
            "and of the cache",
            stacklevel=3,
        )


def _check_feed_forward(asked: str, count: int, target: ModelConfig) -> None:
    moe = target.moe
    if moe is not None and not (
        divides(count, "expert_inner", moe.intermediate_size) or divides(count, "experts", moe.num_experts)
    ):
        raise ConfigError(
            f"{asked}, which divides neither the {moe.num_experts} experts nor their width of "
            f"{moe.intermediate_size} in blocks of 32"
        )
    all_sparse = moe is not None and not moe.dense_layers
    if not all_sparse and not divides(count, "feed_forward", target.intermediate_size):
        raise ConfigError(
            f"{asked}, which does not divide the feed-forward width of {target.intermediate_size}"
        )


def _has_nccl() -> bool:
    with suppress(ModuleNotFoundError):
        if find_spec("nvidia.nccl") is not None:
            return True
    with suppress(OSError):
        ctypes.CDLL("libnccl.so.2")
        return True
    return False
