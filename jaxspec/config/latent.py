"""Multi-head latent attention, out of `config.json`."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxspec.config.errors import ConfigError
from jaxspec.config.rope import RopeConfig


@dataclass(frozen=True)
class LatentConfig:
    """How keys and values are squeezed into one vector per position, in the names of `config.json`.

    Attributes:
      kv_lora_rank: size of the latent that keys and values are projected up from.
      q_lora_rank: size of the one of the queries; None where they are projected directly.
      qk_nope_head_dim: entries of a head's query and key without a rotation.
      qk_rope_head_dim: entries with one; all heads share this part of the key.
      v_head_dim: entries of a head's value.
      rope_interleave: neighbouring entries are rotated against each other, not the halves.
    """

    kv_lora_rank: int
    q_lora_rank: int | None
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    rope_interleave: bool = True

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "LatentConfig":
        """Reads a `config.json` whose absent keys have been filled in.

        Raises:
          ConfigError: a bias is asked for.
        """
        if config.get("attention_bias"):
            raise ConfigError("attention_bias True is not supported in latent attention; supported: False")
        sizes = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        return cls(
            q_lora_rank=config["q_lora_rank"],
            rope_interleave=bool(config["rope_interleave"]),
            **{name: config[name] for name in sizes},
        )

    def scale(self, rope: RopeConfig) -> float:
        """What dot products are multiplied by: head size ** -0.5, and YaRN's factor for all dimensions twice.

        Source: transformers, `yarn_apply_mscale` of DeepSeek-V3.
        """
        scale = (self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5
        weight = rope.get("mscale_all_dim")
        factor = rope.get("factor", 1)
        if rope.kind == "default" or not weight or factor <= 1:
            return scale
        return scale * (0.1 * weight * math.log(factor) + 1.0) ** 2
