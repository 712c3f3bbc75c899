"""OLMo 3: OLMo 2 with a sliding window in three of four layers, which scaling of rope leaves as they are.

Source: the `Olmo3ForCausalLM` of transformers.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from jaxspec.config import RopeConfig, joined
from jaxspec.models.families.olmo.olmo2 import Olmo2

_THETA = 500000.0


class Olmo3(Olmo2):
    """A target network."""

    defaults: ClassVar = {**Olmo2.defaults, "sliding_window": 4096}
    gguf = None
    has_windows = True

    @classmethod
    def is_windowed(cls, config: Mapping[str, Any], layer: int) -> bool:
        return (layer + 1) % 4 > 0

    @classmethod
    def own_fields(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        # Published files scale with `rope_scaling`; transformers 5 nests rope_parameters by kind of layer.
        stated = config.get("rope_parameters") or {}
        nested = stated if "full_attention" in stated or "sliding_attention" in stated else {}
        own = {"rope_parameters": nested.get("full_attention") if nested else stated}
        local = {
            "rope_theta": config.get("rope_theta") or stated.get("rope_theta"),
            "rope_parameters": nested.get("sliding_attention"),
            "max_position_embeddings": config["max_position_embeddings"],
        }
        return {
            **super().own_fields(config),
            "rope": RopeConfig.from_hf(joined(config, own), default_theta=_THETA),
            "local_rope": RopeConfig.from_hf(local, default_theta=_THETA),
        }
