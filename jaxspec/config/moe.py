"""The routed experts of a sparse feed-forward network."""

from dataclasses import dataclass

from jaxspec.config.errors import ConfigError


@dataclass(frozen=True)
class MoeConfig:
    """The number and sizes of experts, and how they are chosen for a token.

    Attributes:
      num_experts: E.
      experts_per_token: experts chosen for each token.
      intermediate_size: F of one expert.
      normalize: the weights of the chosen experts are scaled to sum to 1; otherwise they are the router's
        softmax over all experts, or its sigmoid scores in families that score each expert separately.
      dense_layers: indices of layers with a dense feed-forward network instead.
      swiglu_limit: bound to which gate and up projections are clamped (gpt-oss, DeepSeek-V4).
      swiglu_alpha: slope of the gate's sigmoid (gpt-oss).
      num_groups: groups of consecutive experts (DeepSeek-V3).
      groups_per_token: groups from which a token's experts are chosen.
      scale: factor of the final weights.
      hash_layers: indices of layers whose experts are chosen by the token alone (DeepSeek-V4).
      shared_size: F of an additional network that every token goes through; 0 for none.
      latent_size: M of the experts, to which rows are projected before and from which behind them
        (Nemotron-H); 0 for that of the model.
      is_stacked: a checkpoint has one tensor for all experts of a layer, in families that have both forms.
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
    hash_layers: tuple[int, ...] = ()
    shared_size: int = 0
    latent_size: int = 0
    is_stacked: bool = False

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
