"""The angles of rotary position embeddings."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.attention import RopeTables
from jaxspec.config import RopeConfig


def rope_frequencies(config: RopeConfig, head_dim: int) -> tuple[np.ndarray, float]:
    """The frequencies of rotary embeddings, and the factor on cosine and sine.

    Returns:
      f32[D/2] in radians per position, D being the number of entries that are rotated, and the attention
      factor, which is 1.0 except for YaRN and LongRoPE.

    Source: transformers `modeling_rope_utils.py`; YaRN, arXiv 2309.00071; Llama 3.1's model card.
    """
    head_dim = config.rotated(head_dim)
    exponents = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
    frequencies = config.theta**-exponents
    if config.kind == "linear":
        frequencies = frequencies / config["factor"]
    elif config.kind == "llama3":
        frequencies = _llama3(config, frequencies)
    elif config.kind == "proportional":
        frequencies = frequencies[: int(config.share * head_dim // 2)] / config.get("factor", 1.0)
    elif config.kind == "yarn":
        return _yarn(config, frequencies, head_dim)
    elif config.divisors is not None:
        frequencies = frequencies / np.asarray(config.divisors, np.float64)
    # "dynamic" rescales only past the trained length, which the engine never exceeds.
    return frequencies.astype(np.float32), config["attention_factor"] if config.kind == "longrope" else 1.0


def _llama3(config: RopeConfig, frequencies: np.ndarray) -> np.ndarray:
    trained = config["original_max_position_embeddings"]
    low, high = config["low_freq_factor"], config["high_freq_factor"]
    turns = trained * frequencies / (2 * math.pi)
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return (1 - smooth) * frequencies / config["factor"] + smooth * frequencies


def _yarn(config: RopeConfig, frequencies: np.ndarray, head_dim: int) -> tuple[np.ndarray, float]:
    factor, trained = config["factor"], config["original_max_position_embeddings"]

    def dimension_turning(turns: float) -> float:
        return head_dim * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(config.theta))

    low = dimension_turning(config.get("beta_fast") or 32)
    high = dimension_turning(config.get("beta_slow") or 1)
    if config.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    # As in transformers, the ramp falls where beta_fast turns are fewer than beta_slow turns.
    ramp = np.clip((np.arange(head_dim // 2) - low) / (high - low or 0.001), 0.0, 1.0)
    blended = frequencies / factor * ramp + frequencies * (1 - ramp)
    return blended.astype(np.float32), _yarn_attention_factor(config, factor)


def _yarn_attention_factor(config: RopeConfig, factor: float) -> float:
    stated = config.get("attention_factor")
    if stated is not None:
        return float(stated)

    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    weight, weight_all = config.get("mscale"), config.get("mscale_all_dim")
    if weight and weight_all:
        return mscale(weight) / mscale(weight_all)
    return mscale(1.0)


def rope_tables(config: RopeConfig | None, head_dim: int, positions: jax.Array) -> RopeTables:
    """Cosine and sine, f32[N, D/2] each, for rows at `positions` i32[N]; 1 and 0 for what is not rotated.

    That is everything where `config` is None: a rotation by nothing is exact, and costs a kernel nothing.
    """
    if config is None:
        shape = (len(positions), head_dim // 2)
        return jnp.ones(shape, jnp.float32), jnp.zeros(shape, jnp.float32)
    frequencies, factor = rope_frequencies(config, head_dim)
    angles = positions[:, None].astype(jnp.float32) * frequencies[None, :]
    cos, sin = jnp.cos(angles) * factor, jnp.sin(angles) * factor
    if len(frequencies) == head_dim // 2:
        return cos, sin
    still = ((0, 0), (0, head_dim // 2 - len(frequencies)))
    return jnp.pad(cos, still, constant_values=1), jnp.pad(sin, still)
