"""Attention over a window and compressed entries, as `config.json` describes it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxspec.config.errors import ConfigError

WINDOW, SPARSE, HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
"""The kinds of layers: a window alone; one with overlapping entries, of which an indexer chooses a few; one
with entries of many positions, all of which are seen."""

_OF_RATIO = {0: WINDOW, 1: WINDOW, 4: SPARSE, 128: HEAVY}


@dataclass(frozen=True)
class CompressedConfig:
    """Sizes of attention over a window and compressed entries (DeepSeek-V4).

    Attributes:
      layers: the kind of every layer.
      sparse_ratio, heavy_ratio: positions per entry of the two kinds.
      head_dim: D, the size of a query, and of the one vector per position that is key and value of all heads.
      q_lora_rank: size of the latent of the queries.
      o_groups: groups of heads, each of which is projected to a latent of its own.
      o_lora_rank: size of these latents.
      index_n_heads, index_head_dim: of the indexer.
      index_topk: how many entries a row sees in a layer with an indexer.
    """

    layers: tuple[str, ...]
    sparse_ratio: int
    heavy_ratio: int
    head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int

    def __post_init__(self) -> None:
        for name, ratio in (("sparse", self.sparse_ratio), ("heavily", self.heavy_ratio)):
            if ratio < 2:
                raise ConfigError(f"config.json: a {name} compressed entry needs 2 positions, got {ratio}")

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "CompressedConfig":
        """Reads a `config.json` in which absent keys have been given defaults.

        Raises:
          ConfigError: an unknown kind of layer, or not as many as there are layers.
        """
        rates = config.get("compress_rates") or {}
        sizes = ("head_dim", "q_lora_rank", "o_groups", "o_lora_rank")
        index = ("index_n_heads", "index_head_dim", "index_topk")
        return cls(
            layers=_layers(config),
            sparse_ratio=config.get("compress_rate_csa") or rates.get(SPARSE, 4),
            heavy_ratio=config.get("compress_rate_hca") or rates.get(HEAVY, 128),
            **{name: config[name] for name in (*sizes, *index)},
        )


def _layers(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The kind of every layer: `layer_types`, else published `compress_ratios`, else the class's default."""
    depth = config["num_hidden_layers"]
    ratios, kinds = config.get("compress_ratios"), config.get("layer_types")
    if kinds is None and ratios is not None:
        # Ratios of MTP layers follow.
        if unknown := [ratio for ratio in ratios[:depth] if ratio not in _OF_RATIO]:
            raise ConfigError(
                f"compress_ratios: {unknown[0]} is not supported; supported: {', '.join(map(str, _OF_RATIO))}"
            )
        kinds = [_OF_RATIO[ratio] for ratio in ratios]
    if kinds is None:
        kinds = [SPARSE if i > 1 and i % 2 else HEAVY for i in range(depth)]
    kinds = tuple(kinds[:depth])
    if len(kinds) != depth:
        raise ConfigError(f"layer_types has {len(kinds)} entries for {depth} layers")
    if unknown := sorted(set(kinds) - {WINDOW, SPARSE, HEAVY}):
        raise ConfigError(f"layer_types: unknown kind {unknown[0]!r}")
    return kinds
