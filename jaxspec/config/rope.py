"""Rotary position embedding, as `config.json` describes it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from jaxspec.config.errors import INT32_MAX, ConfigError
from jaxspec.spelling import known_names


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding.

    Attributes:
      theta: the base of the frequencies.
      kind: "default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional" or "factors".
      parameters: the kind's parameters as (name, value) pairs, named as in `config.json`.
      share: the fraction of a head's entries, counted from the first, that are rotated; of kind
        "proportional", the fraction of its pairs, which are those of the whole head.
      length: positions of the longest text. LongRoPE divides the frequencies by other factors if these are
        more than the trained ones. 0 for other kinds.
    """

    theta: float = 10000.0
    kind: str = "default"
    parameters: tuple[tuple[str, Any], ...] = ()
    share: float = 1.0
    length: int = 0

    def __getitem__(self, name: str) -> Any:
        return dict(self.parameters)[name]

    def get(self, name: str, default: Any = None) -> Any:
        return dict(self.parameters).get(name, default)

    @property
    def yarn_length(self) -> int:
        """The positions that YaRN extends the trained ones to; 0 for other kinds."""
        if self.kind != "yarn":
            return 0
        return int(min(self["factor"] * self["original_max_position_embeddings"], INT32_MAX))

    @property
    def divisors(self) -> tuple[float, ...] | None:
        """Numbers that the frequencies are divided by, one each; None for kinds without such a list."""
        if self.kind == "factors":
            return self["factors"]
        if self.kind == "longrope":
            is_long = self.length > self["original_max_position_embeddings"]
            return self["long_factor" if is_long else "short_factor"]
        return None

    def within(self, length: int) -> "RopeConfig":
        """The rope of texts of at most so many positions."""
        return replace(self, length=length) if self.kind == "longrope" else self

    def rotated(self, head_dim: int) -> int:
        """The number of entries, from the first on, of which the two halves are pairs."""
        if self.kind == "proportional":
            return head_dim
        # In floating point 3/49 * 49 is slightly less than 3.
        return int(head_dim * self.share + 1e-6)

    def check(self, head_dim: int) -> None:
        """Checks that heads of this size can be rotated so.

        Raises:
          ConfigError: the size is odd, or does not fit the number of factors.
        """
        if head_dim % 2:
            raise ConfigError(f"head_dim {head_dim} is odd, and rope rotates pairs")
        rotated = self.rotated(head_dim)
        if rotated % 2 or not rotated:
            raise ConfigError(
                f"partial_rotary_factor {self.share!r} is {rotated} of {head_dim} entries, "
                "and rope rotates pairs"
            )
        for name in ("factors", "short_factor", "long_factor"):
            if len(self.get(name, ())) not in (0, rotated // 2):
                raise ConfigError(
                    f"rope_scaling: {len(self[name])} entries of {name} for {rotated // 2} frequencies"
                )

    @classmethod
    def from_hf(
        cls, config: Mapping[str, Any], *, default_theta: float = 10000.0, partial: bool = False
    ) -> "RopeConfig":
        """Reads `rope_theta` and `rope_scaling`, or `rope_parameters` as in transformers 5.

        Args:
          config: of the model.
          default_theta: used if the config has no theta.
          partial: whether the family supports a `partial_rotary_factor` below 1.

        Raises:
          ConfigError: an unknown kind, a missing parameter, a value that is not supported, or two that
            contradict each other.
        """
        merged: dict[str, Any] = {}
        for key in ("rope_scaling", "rope_parameters"):
            each = config.get(key) or {}
            if "truncate" in each:
                each = {**each, "truncate": bool(each["truncate"])}  # as in transformers, null is false
            # "type" is the older name of "rope_type".
            for name, value in {**each, "rope_type": each.get("rope_type") or each.get("type")}.items():
                if value is not None and merged.setdefault(name, value) != value:
                    raise ConfigError(
                        f"rope_scaling has {name} {merged[name]!r}, but rope_parameters has {value!r}"
                    )
        theta = merged.pop("rope_theta", None) or config.get("rope_theta") or default_theta
        kind = merged.pop("rope_type", "default")
        if kind == "mrope":
            # A token of text has the same three positions, so its rotation is the ordinary one.
            kind = "default"
        if kind not in ROPE_PARAMETERS:
            raise ConfigError(
                f"rope_scaling: unknown rope_type {kind!r}; {known_names(str(kind), ROPE_PARAMETERS)}"
            )
        share = merged.pop("partial_rotary_factor", None) or config.get("partial_rotary_factor") or 1.0
        if share != 1.0 and not partial:
            raise ConfigError(f"partial_rotary_factor {share!r} is not supported; supported: 1")
        unknown = [name for name in merged if name not in (*_NAMES, *_WITHOUT_MEANING)]
        if unknown:
            raise ConfigError(f"rope_scaling: {unknown[0]} {merged[unknown[0]]!r} is not supported")
        stated = {name: merged[name] for name in _NAMES if merged.get(name) is not None}
        # As in transformers, a length at the top level counts first.
        if config.get("original_max_position_embeddings") is not None:
            stated["original_max_position_embeddings"] = config["original_max_position_embeddings"]
        missing = [name for name in ROPE_PARAMETERS[kind] if name not in stated]
        if missing:
            raise ConfigError(f"rope_scaling: rope_type {kind!r} needs {', '.join(missing)}")
        if kind == "llama3" and not stated["low_freq_factor"] < stated["high_freq_factor"]:
            raise ConfigError("rope_scaling: low_freq_factor is not less than high_freq_factor")
        # As in transformers, the default is the model's own length.
        positions = config.get("max_position_embeddings")
        stated.setdefault("original_max_position_embeddings", positions)
        if kind == "longrope":
            if positions is None:
                raise ConfigError("rope_scaling: rope_type 'longrope' needs max_position_embeddings")
            trained = stated["original_max_position_embeddings"]
            stated.setdefault("attention_factor", _longrope_factor(stated.get("factor"), positions, trained))
        freeze = {name: tuple(v) if isinstance(v, list) else v for name, v in stated.items()}
        length = (positions or 0) if kind == "longrope" else 0
        return cls(float(theta), kind, tuple(sorted(freeze.items())), float(share), length)


def _longrope_factor(factor: float | None, positions: int, trained: int) -> float:
    """LongRoPE's factor on cosine and sine (arXiv 2402.13753, as in transformers)."""
    factor = factor or positions / trained
    return 1.0 if factor <= 1 or trained < 2 else math.sqrt(1 + math.log(factor) / math.log(trained))


ROPE_PARAMETERS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
    "proportional": (),
    "factors": ("factors",),
}
_OPTIONAL = ("beta_fast", "beta_slow", "truncate", "attention_factor", "mscale", "mscale_all_dim")
_WITHOUT_MEANING = ("type", "finetuned", "mrope_section", "mrope_interleaved")
"""Further parameters that may be there: of a token of text, all positions of an image are the same."""
_NAMES = sorted({*_OPTIONAL, *(name for names in ROPE_PARAMETERS.values() for name in names)})
