"""The sizes of layers of gated delta rules (Qwen3-Next, Qwen3.5)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxspec.config.errors import ConfigError


@dataclass(frozen=True)
class DeltaConfig:
    """The sizes of `linear_attention` layers.

    Attributes:
      num_key_heads: heads of queries and keys.
      num_value_heads: heads of values, each with a state; a multiple.
      key_size, value_size: of one head; a state is [key_size, value_size].
      conv_width: rows that the convolution over queries, keys and values sees, its own included.
    """

    num_key_heads: int
    num_value_heads: int
    key_size: int
    value_size: int
    conv_width: int

    def __post_init__(self) -> None:
        if self.num_value_heads % self.num_key_heads:
            raise ConfigError(
                f"linear_num_value_heads {self.num_value_heads} is not a multiple of "
                f"linear_num_key_heads {self.num_key_heads}"
            )
        if self.conv_width < 2:
            raise ConfigError(
                f"linear_conv_kernel_dim {self.conv_width} is not supported; supported: 2 and more"
            )

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "DeltaConfig":
        """Reads the keys `linear_…` of a `config.json`, all of which must be there."""
        return cls(
            num_key_heads=config["linear_num_key_heads"],
            num_value_heads=config["linear_num_value_heads"],
            key_size=config["linear_key_head_dim"],
            value_size=config["linear_value_head_dim"],
            conv_width=config["linear_conv_kernel_dim"],
        )

    @property
    def group(self) -> int:
        """Value heads for each key head."""
        return self.num_value_heads // self.num_key_heads
