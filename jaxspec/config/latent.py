"""Multi-head latent attention, as `config.json` describes it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxspec.config.errors import ConfigError
from jaxspec.config.rope import RopeConfig


@dataclass(frozen=True)
class LatentConfig:
    """Sizes of multi-head latent attention, with the names of `config.json`.

    Keys and values of a position are compressed into one latent vector (DeepSeek-V2, arXiv:2405.04434).

    Attributes:
      kv_lora_rank: size of the latent from which keys and values are projected.
      q_lora_rank: size of the latent of the queries; None if they are projected directly.
      qk_nope_head_dim: entries of a head's query and key that are not rotated.
      qk_rope_head_dim: entries that are rotated; all heads share this part of the key.
      v_head_dim: entries of a head's value.
      rope_interleave: rope rotates neighbouring entries as pairs, instead of entries of the two halves.
    """

    kv_lora_rank: int
    q_lora_rank: int | None
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    rope_interleave: bool = True

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "LatentConfig":
        """Reads a `config.json` in which absent keys have been given defaults.

        Raises:
          ConfigError: `attention_bias` is set, which is not supported.
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
        """The factor of attention logits: head size ** -0.5, times YaRN's `mscale_all_dim` factor squared.

        Source: transformers, `yarn_apply_mscale` of DeepSeek-V3.
        """
        scale = (self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5
        weight = rope.get("mscale_all_dim")
        factor = rope.get("factor", 1)
        if rope.kind == "default" or not weight or factor <= 1:
            return scale
        return scale * (0.1 * weight * math.log(factor) + 1.0) ** 2
