"""The sizes of Mamba-2 layers (Nemotron-H)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxspec.config.errors import ConfigError


@dataclass(frozen=True)
class MambaConfig:
    """The sizes of Mamba-2 layers.

    Attributes:
      num_heads: heads, each with a state [state_size, head_size].
      num_groups: groups of consecutive heads that share keys and queries (B and C in Mamba's papers).
      head_size: of a head's values.
      state_size: of a key.
      conv_width: rows that the convolution over values, keys and queries sees, its own included.
      conv_bias: whether the convolution has a bias.
      bias: whether the projections have biases.
    """

    num_heads: int
    num_groups: int
    head_size: int
    state_size: int
    conv_width: int
    conv_bias: bool
    bias: bool

    def __post_init__(self) -> None:
        if self.num_heads % self.num_groups:
            raise ConfigError(
                f"mamba_num_heads {self.num_heads} is not a multiple of n_groups {self.num_groups}"
            )
        if self.conv_width < 2:
            raise ConfigError(f"conv_kernel {self.conv_width} is not supported; supported: 2 and more")

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "MambaConfig":
        """Reads the keys of a Nemotron-H's `config.json`, all of which must be there."""
        return cls(
            num_heads=config["mamba_num_heads"],
            num_groups=config["n_groups"],
            head_size=config["mamba_head_dim"],
            state_size=config["ssm_state_size"],
            conv_width=config["conv_kernel"],
            conv_bias=config["use_conv_bias"],
            bias=config["use_bias"],
        )

    @property
    def group(self) -> int:
        """Heads of a group."""
        return self.num_heads // self.num_groups

    @property
    def sections(self) -> tuple[int, ...]:
        """For one group, the channels of the convolution: values, keys and queries."""
        return self.group * self.head_size, self.state_size, self.state_size
