"""The routed experts of a sparse feed-forward network."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxspec.config.errors import ConfigError


@dataclass(frozen=True)
class MoeConfig:
    """How many experts there are, and how a token chooses among them.

    Attributes:
      num_experts: E.
      experts_per_token: of them, those that a token goes through.
      intermediate_size: F of one expert.
      normalize: the weights of the chosen experts sum to 1; else they are their shares among all, or
        their scores where each expert is scored by itself.
      dense_layers: layers with a plain feed-forward network instead.
      swiglu_limit: what gate and up projections are clamped to (gpt-oss).
      swiglu_alpha: slope of the gate's sigmoid (gpt-oss).
      num_groups: groups that neighbouring experts form (DeepSeek-V3).
      groups_per_token: of them, those whose experts a token may choose.
      scale: what the weights are multiplied by in the end.
      shared_size: F of a network beside the experts that every token goes through; 0 for none.
    """

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    normalize: bool = True
    dense_layers: tuple[int, ...] = ()
    swiglu_limit: float = 7.0
    swiglu_alpha: float = 1.702
    num_groups: int = 1
    groups_per_token: int = 1
    scale: float = 1.0
    shared_size: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.experts_per_token <= self.num_experts:
            raise ConfigError(
                f"num_experts_per_tok {self.experts_per_token} is not between 1 and the number of experts, "
                f"{self.num_experts}"
            )
        size, rest = divmod(self.num_experts, self.num_groups)
        if rest or (self.num_groups > 1 and size < 2):
            raise ConfigError(f"{self.num_experts} experts do not make n_group {self.num_groups} groups")
        if not 0 < self.groups_per_token <= self.num_groups:
            raise ConfigError(
                f"topk_group {self.groups_per_token} is not between 1 and n_group {self.num_groups}"
            )
        if self.groups_per_token * size < self.experts_per_token:
            raise ConfigError(
                f"num_experts_per_tok {self.experts_per_token} is more than the experts of "
                f"topk_group {self.groups_per_token} groups, {self.groups_per_token * size}"
            )

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "MoeConfig | None":
        """Reads a `config.json` whose absent keys have been filled in; None for a dense family."""
        read = _READERS.get(config["model_type"])
        return read(config) if read else None


def _gpt_oss(config: Mapping[str, Any]) -> MoeConfig:
    return MoeConfig(
        num_experts=config["num_local_experts"],
        experts_per_token=config["num_experts_per_tok"],
        intermediate_size=config["intermediate_size"],
        swiglu_limit=config["swiglu_limit"],
        swiglu_alpha=config["swiglu_alpha"],
    )


def _qwen3_moe(config: Mapping[str, Any]) -> MoeConfig:
    step, dense = config["decoder_sparse_step"], config["mlp_only_layers"] or ()
    layers = range(config["num_hidden_layers"])
    return MoeConfig(
        # transformers 5 writes the one, published checkpoints have the other.
        num_experts=config.get("num_local_experts") or config["num_experts"],
        experts_per_token=config["num_experts_per_tok"],
        intermediate_size=config["moe_intermediate_size"],
        normalize=bool(config["norm_topk_prob"]),
        dense_layers=tuple(i for i in layers if i in dense or (i + 1) % step),
    )


def _deepseek(config: Mapping[str, Any]) -> MoeConfig:
    for key, built in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc"), ("moe_layer_freq", 1)):
        if config.get(key, built) != built:
            raise ConfigError(f"{key} {config[key]!r} is not supported; supported: {built}")
    layers = range(config["num_hidden_layers"])
    # transformers 5 lists GLM's layers, published checkpoints count the dense ones.
    kinds = config.get("mlp_layer_types") or ["dense"] * config["first_k_dense_replace"]
    return MoeConfig(
        num_experts=config["n_routed_experts"],
        experts_per_token=config["num_experts_per_tok"],
        intermediate_size=config["moe_intermediate_size"],
        normalize=bool(config["norm_topk_prob"]),
        dense_layers=tuple(i for i in layers if kinds[i : i + 1] == ["dense"]),
        num_groups=config["n_group"] or 1,
        groups_per_token=config["topk_group"] or 1,
        scale=float(config["routed_scaling_factor"]),
        shared_size=config["moe_intermediate_size"] * (config["n_shared_experts"] or 0),
    )


_READERS = {
    "gpt_oss": _gpt_oss,
    "qwen3_moe": _qwen3_moe,
    "deepseek_v3": _deepseek,
    "glm4_moe_lite": _deepseek,
}
