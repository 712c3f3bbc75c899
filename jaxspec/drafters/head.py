"""Draft heads: drafters that were trained for one target and have a checkpoint of their own."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar, Protocol

import jax.numpy as jnp
import numpy as np

from jaxspec.attention import CacheShape, LayerCacheShape
from jaxspec.config import ConfigError, DrafterConfig, Keys, ModelConfig
from jaxspec.drafters.base import Build, Description, Drafter, DrafterReader, Target
from jaxspec.drafters.flags import Flag
from jaxspec.drafters.formats import open_drafter
from jaxspec.drafters.layer_config import is_speculators
from jaxspec.drafters.vocabulary import check_tokens, check_vocabulary
from jaxspec.files import Checkpoint, CheckpointError, TensorSource
from jaxspec.files.quantized.quantize import RoundedTensor, form_of, round_matrices
from jaxspec.weights.derived_tensors import DerivedTensor, OutputRows, RatedTensor, TargetRows
from jaxspec.weights.loading import IGNORED, matching, plan_module

_IGNORED = (*IGNORED, "verifier_lm_head.weight", "verifier_norm.weight")
"""Tensors that loading ignores, among them copies of the target's tensors that training saved."""

DRAFT_ORDER = "draft_order"
"""A tensor i32[W] of the heads that jaxspec trains: their draft ids, the most frequent first."""

_ANY_DEPTH = 1 << 10
"""Layers of the stand-in for a target of unknown depth."""


class HeadConfig(Protocol):
    """A head's configuration, from its `config.json` and the names of its tensors."""

    @property
    def own_head(self) -> bool:
        """Whether it has output rows of its own; the target's are copied if its checkpoint has none."""
        ...

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], tensors: Mapping[str, Any], target: ModelConfig) -> Any:
        """Reads a head's configuration.

        Args:
          config: its `config.json`.
          tensors: its tensors by name.
          target: the configuration of the target.

        Raises:
          ConfigError: the head does not fit the target, or a value is not supported.
        """
        ...

    def over(self, devices: int) -> Any:
        """The configuration on so many devices; see `ModelConfig.over`."""
        ...

    def reads(self, config: Mapping[str, Any], *, any_target: bool) -> str:
        """The target's hidden states that it reads, in words.

        Args:
          any_target: whether this configuration was read with a stand-in instead of a real target.
        """
        ...

    def flags(self, checkpoint: Checkpoint) -> Iterator[Flag]:
        """The choices that decide how the head computes, with the values of this configuration."""
        ...


class Head(Drafter):
    """Loading and inspection of heads.

    Attributes:
      config_type: the class of its configuration, which is the first argument of its constructor.
      config: its configuration.
      most_drafted: see `DrafterConfig.draft_vocab_size`.
      copies_rows: whether its output rows are copies of the target's.
    """

    weights_from = "own"
    reads: ClassVar[tuple[str, ...]] = ("draft_vocab_size", "dtype")
    ignored: ClassVar[tuple[str, ...]] = _IGNORED
    config_type: ClassVar[type[HeadConfig]]
    config: Any
    most_drafted: int | None = None
    copies_rows: bool = False

    @property
    def cache_shapes(self) -> tuple[LayerCacheShape, ...]:
        layers = self.config.layers
        return (CacheShape(layers.num_cached_heads, layers.head_dim),) * layers.num_hidden_layers

    @classmethod
    def plan(cls, config: DrafterConfig, target: ModelConfig, build: Build) -> DrafterReader:
        checkpoint = _with_vocabulary(open_drafter(config, progress=build.progress), target.vocab_size)
        checkpoint = _most_frequent(checkpoint, config.draft_vocab_size)
        head = cls._read_config(checkpoint, target).over(build.devices)
        check_tokens(cls.title, checkpoint.tokenizer, build.tokenizer)
        tensors = dict(checkpoint.tensors)
        importance = None
        if build.activations == "int8" and (norm := tensors.get("norm.weight")):
            # The output rows read the state after this norm, whose scale decides how large each input is.
            importance = np.square(norm.read().astype(np.float32))
        rows = OutputRows(_drafted_ids(checkpoint, target.vocab_size), target.hidden_size, importance)
        if own := tensors.get("lm_head.weight"):
            tensors["lm_head.weight"] = own if importance is None else RatedTensor(own, importance)
        elif head.own_head:
            tensors["lm_head.weight"] = rows
        if config.dtype is not None:
            tensors = round_matrices(tensors, form_of(config.dtype))
        checkpoint = replace(checkpoint, tensors=tensors)
        make: Callable[..., Head] = cls
        plan = plan_module(
            lambda rngs: make(head, **config.settings, dtype=build.dtype, rngs=rngs),
            checkpoint,
            ignore=cls.ignored,
        )

        def read(target: Target) -> Drafter:
            filled = replace(rows, kernel=target.output_kernel)
            parameters = [
                (variable, [_filled(tensor, rows, filled) for tensor in stored])
                for variable, stored in plan.parameters
            ]
            drafter = replace(plan, parameters=parameters).read(
                build.mesh,
                packed=build.packed,
                codes=build.codes or config.dtype is not None,
                activations=build.activations,
                rounded=build.activations == "int8",
            )
            drafter.most_drafted = config.draft_vocab_size
            drafter.copies_rows = any(
                _filled(tensor, rows, filled) is not tensor
                for _, stored in plan.parameters
                for tensor in stored
            )
            return drafter

        return read

    @classmethod
    def _read_config(cls, checkpoint: Checkpoint, target: ModelConfig) -> Any:
        """The head's configuration.

        Raises:
          ConfigError: it does not fit the target, or nobody reads a key that may mean something.
        """
        # Nothing else would tell: a head that is misread changes no answer and is accepted less.
        keys = Keys(checkpoint.config)
        head = cls.config_type.from_hf(keys, checkpoint.tensors, target)
        depth = keys.get("num_target_layers") or target.num_hidden_layers
        if depth != target.num_hidden_layers:
            raise ConfigError(
                f"the head is for targets of {depth} layers, this one has {target.num_hidden_layers}"
            )
        for key, value in keys.unread().items():
            raise ConfigError(f"{checkpoint.name}: config.json: {key} {value!r} is not known of {cls.title}")
        return head

    def update_tensors(self, checkpoint: Checkpoint, target: Target) -> Checkpoint:
        checkpoint = _with_vocabulary(checkpoint, target.config.vocab_size)
        checkpoint = _most_frequent(checkpoint, self.most_drafted)
        tensors = dict(checkpoint.tensors)
        if self.copies_rows and "lm_head.weight" not in tensors:
            ids = _drafted_ids(checkpoint, target.config.vocab_size)
            tensors["lm_head.weight"] = TargetRows(jnp.asarray(ids, jnp.int32), target=target)
        return replace(checkpoint, tensors=tensors)

    def copies(self, target: Target) -> dict[str, TensorSource]:
        if not self.copies_rows:
            return {}
        every = jnp.arange(target.config.vocab_size, dtype=jnp.int32)
        # A copy, since new ids may take the place of these before they are used.
        ids = every if self.target_ids is None else jnp.copy(self.target_ids[...])
        return {"lm_head.weight": TargetRows(ids, target=target)}

    @classmethod
    def describe(cls, checkpoint: Checkpoint, target: ModelConfig | None) -> Description:
        own = cls.stand_in(checkpoint)
        known = Description(
            target=_fitting(checkpoint, own), ignored=matching(checkpoint, cls.ignored), stand_in=own
        )
        for fitting in (own,) if target is None else (target, own):
            try:
                head = cls.config_type.from_hf(checkpoint.config, checkpoint.tensors, fitting)
            except ConfigError:
                continue
            layers = head.reads(checkpoint.config, any_target=fitting is own)
            return replace(known, layers=layers, flags=tuple(head.flags(checkpoint)))
        return known

    @classmethod
    def stand_in(cls, checkpoint: Checkpoint) -> ModelConfig:
        """A made-up target that fits what a head's config says, deep enough for any layer it names.

        Raises:
          ConfigError: a size in the config is missing or not an integer.
        """
        return _stand_in(checkpoint)


def _filled(tensor: TensorSource, rows: "OutputRows", filled: "OutputRows") -> TensorSource:
    """The tensor, or `filled` in the place of `rows`."""
    if isinstance(tensor, RoundedTensor) and tensor.tensor is rows:
        return replace(tensor, tensor=filled)
    return filled if tensor is rows else tensor


def _stand_in(checkpoint: Checkpoint) -> ModelConfig:
    config, tensors = checkpoint.config, checkpoint.tensors
    layers = config["transformer_layer_config"] if is_speculators(config) else config

    def length(name: str) -> int | None:
        return tensors[name].shape[0] if name in tensors else None

    sizes: dict[str, Any] = {
        "hidden_size": config.get("target_hidden_size") or layers.get("hidden_size") or length("fc.weight"),
        # speculators omits the vocabulary's size if it is the default of the class in transformers.
        "vocab_size": layers.get("vocab_size") or length("t2d") or config.get("draft_vocab_size"),
        "num_hidden_layers": config.get("num_target_layers") or _ANY_DEPTH,
    }
    for key, value in sizes.items():
        if not isinstance(value, int):
            raise ConfigError(f"{checkpoint.name}: config.json: {key} must be an integer, got {value!r}")
    other: dict[str, Any] = {
        "intermediate_size": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 1,
    }
    return ModelConfig(family="", **sizes, **other)


def _fitting(checkpoint: Checkpoint, own: ModelConfig) -> str:
    """The targets that a head fits, in words."""
    depth = "" if own.num_hidden_layers == _ANY_DEPTH else f", {own.num_hidden_layers} layers"
    verifier = (checkpoint.config.get("speculators_config") or {}).get("verifier") or {}
    name = f": {verifier['name_or_path']}" if verifier.get("name_or_path") else ""
    return f"hidden size {own.hidden_size}, vocabulary {own.vocab_size}{depth}{name}"


def _drafted_ids(checkpoint: Checkpoint, vocab_size: int) -> np.ndarray:
    d2t = checkpoint.tensors.get("d2t")
    return np.arange(vocab_size) if d2t is None else _target_ids(d2t.read())


def _target_ids(d2t: np.ndarray) -> np.ndarray:
    return d2t.astype(np.int64) + np.arange(d2t.size)


def _with_vocabulary(checkpoint: Checkpoint, vocab_size: int) -> Checkpoint:
    """Checks a head's vocabulary maps, adds a missing `t2d`, and drops maps that cover every token.

    Raises:
      CheckpointError: the maps are malformed or do not agree.
    """
    tensors = dict(checkpoint.tensors)
    if "d2t" not in tensors:
        return checkpoint
    for name, kinds in {"d2t": "iu", "t2d": "b"}.items():
        tensor = tensors.get(name)
        if tensor is not None and (len(tensor.shape) != 1 or tensor.dtype.kind not in kinds):
            item = "an integer" if name == "d2t" else "true or false"
            raise CheckpointError(
                f"{checkpoint.name}: {name} is {tensor.dtype} of shape {list(tensor.shape)}, but must hold "
                f"{item} for each token"
            )
    d2t = tensors["d2t"].read()
    if "t2d" not in tensors:
        member = np.zeros(vocab_size, bool)
        ids = _target_ids(d2t)
        member[ids[(ids >= 0) & (ids < vocab_size)]] = True
        tensors["t2d"] = DerivedTensor(member)
    wrong = check_vocabulary(d2t, tensors["t2d"].read())
    if wrong:
        raise CheckpointError(f"{checkpoint.name}: {wrong}")
    if d2t.size == vocab_size:
        del tensors["d2t"], tensors["t2d"]
    return replace(checkpoint, tensors=tensors)


def _most_frequent(checkpoint: Checkpoint, size: int | None) -> Checkpoint:
    """The same head with only the `size` most frequent tokens of its vocabulary; None keeps all.

    Raises:
      CheckpointError: the order of its tokens is malformed.
      ConfigError: it has none.
    """
    tensors = dict(checkpoint.tensors)
    stored, d2t = tensors.pop(DRAFT_ORDER, None), tensors.get("d2t")
    ids = np.zeros(0, np.int64) if d2t is None else _target_ids(d2t.read())
    order = None if stored is None else stored.read()
    if order is not None and (
        order.dtype.kind not in "iu" or not np.array_equal(np.sort(order, axis=None), np.arange(ids.size))
    ):
        raise CheckpointError(f"{checkpoint.name}: {DRAFT_ORDER} must hold each draft id once")
    if size is None or 0 < ids.size <= size:
        return replace(checkpoint, tensors=tensors)
    if order is None:
        raise ConfigError(
            f"drafter.draft_vocab_size is {size}, but {checkpoint.name} does not say which of its tokens are "
            f"the most frequent: it has no {DRAFT_ORDER}"
        )
    kept = np.sort(order[:size])
    member = np.zeros(tensors["t2d"].shape, bool)
    member[ids[kept]] = True
    tensors |= {"d2t": DerivedTensor(ids[kept] - np.arange(size)), "t2d": DerivedTensor(member)}
    if rows := tensors.get("lm_head.weight"):
        tensors["lm_head.weight"] = DerivedTensor(rows.read()[kept])
    return replace(checkpoint, tensors=tensors, config={**checkpoint.config, "draft_vocab_size": size})
