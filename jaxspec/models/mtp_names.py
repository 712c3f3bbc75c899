"""How checkpoints name the tensors of a layer for multi-token prediction."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class MtpNames:
    """The names of the layer's parts.

    "{last}" stands for the target's number of layers, "{end}" for the number of the last part of a layer that
    has several.

    Attributes:
      root: what the names of all its tensors begin with.
      token_norm, hidden_norm: the norms of a token's embedding and of a hidden state.
      projection: of the two together, or of the embedding if each has its own.
      norm: the norm of the layer's output.
      drops_first: whether the row at position 0 gets zeros instead of its token's embedding.
    """

    root: str
    token_norm: str
    hidden_norm: str
    projection: str
    norm: str
    drops_first: bool

    def of(self, num_layers: int, num_parts: int) -> "MtpNames":
        """The names in a checkpoint of a target with so many layers, for a layer with so many parts."""
        named: Mapping[str, Any] = {
            name: getattr(self, name).format(last=num_layers, end=num_parts - 1)
            for name in ("root", "token_norm", "hidden_norm", "projection", "norm")
        }
        return MtpNames(**named, drops_first=self.drops_first)


_NEXT = "model.layers.{last}"
NEXT_LAYER = MtpNames(
    root=f"{_NEXT}.",
    token_norm=f"{_NEXT}.enorm",
    hidden_norm=f"{_NEXT}.hnorm",
    projection=f"{_NEXT}.eh_proj",
    norm=f"{_NEXT}.shared_head.norm",
    drops_first=True,
)
"""A layer after the last one (DeepSeek-V3)."""

OWN_MODEL = MtpNames(
    root="mtp.",
    token_norm="mtp.pre_fc_norm_embedding",
    hidden_norm="mtp.pre_fc_norm_hidden",
    projection="mtp.fc",
    norm="mtp.norm",
    drops_first=False,
)
"""A model of its own beside the target's (Qwen3-Next)."""

OWN_LAYER = MtpNames(
    root="mtp.0.",
    token_norm="mtp.0.enorm",
    hidden_norm="mtp.0.hnorm",
    projection="mtp.0.e_proj",
    norm="mtp.0.shared_head.norm",
    drops_first=True,
)
"""The first of the layers beside the target's (DeepSeek-V4)."""

OWN_LAYERS = MtpNames(
    root="mtp.",
    token_norm="mtp.layers.0.enorm",
    hidden_norm="mtp.layers.0.hnorm",
    projection="mtp.layers.0.eh_proj",
    norm="mtp.layers.{end}.final_layernorm",
    drops_first=False,
)
"""Several layers beside the target's, one after another (Nemotron-H)."""

ALL_NAMES = (NEXT_LAYER, OWN_MODEL, OWN_LAYER, OWN_LAYERS)
