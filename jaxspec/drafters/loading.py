"""Which drafter a configuration means."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxspec_kernels.matmul import PackedWeight

from jaxspec.checkpoints import Checkpoint, CheckpointError, open_checkpoint
from jaxspec.checkpoints.blocks import Blocks
from jaxspec.config import ConfigError, DrafterConfig, ModelConfig
from jaxspec.drafters.base import Drafter, Target
from jaxspec.drafters.dflash import DFlash, DFlashConfig
from jaxspec.drafters.draft_model import DraftModel
from jaxspec.drafters.eagle1 import Eagle1, Eagle1Config
from jaxspec.drafters.eagle3 import Eagle3, Eagle3Config
from jaxspec.drafters.formats import check_kind
from jaxspec.drafters.mtp import COPIES, Mtp, layer_name, mtp_config
from jaxspec.drafters.ngram import NGramDrafter
from jaxspec.drafters.none import NoDrafter
from jaxspec.drafters.peagle import PEagle, PEagleConfig
from jaxspec.drafters.vocabulary import check_vocabulary
from jaxspec.models.loading import IGNORED, plan_module, plan_target


@dataclass(frozen=True)
class Build:
    """How the engine wants a drafter's arrays.

    Attributes:
      dtype: of weights and cache.
      mesh: the devices that weights are split over; one by default.
      packed: see `ModulePlan.read`.
    """

    dtype: jnp.dtype
    mesh: Mesh | None = None
    packed: bool = False


HEAD_IGNORED = (*IGNORED, "verifier_lm_head.weight", "verifier_norm.weight")
"""Tensors of heads that are known and not used: copies of the target's that the training kept."""

DrafterReader = Callable[[Target], Drafter]
"""Reads the weights of a drafter that has been found to fit; called with its target's weights in place."""


def load_drafter(config: DrafterConfig, target: Target, build: Build) -> Drafter:
    """The drafter that `config` names, with its weights.

    An EAGLE-3 head without `lm_head.weight` takes the target's output rows of the tokens that it drafts.

    Raises:
      ConfigError: it does not fit the target.
      CheckpointError: its checkpoint cannot be read, or holds other tensors than it should.
    """
    return plan_drafter(config, target.config, build)(target)


def plan_drafter(config: DrafterConfig, target: ModelConfig, build: Build) -> DrafterReader:
    """`load_drafter` up to the point where it would read weights; raises the same."""
    return _PLANS[config.kind](config, target, build)


def _plan_none(config: DrafterConfig, target: ModelConfig, build: Build) -> DrafterReader:
    return lambda _: NoDrafter()


def _plan_ngram(config: DrafterConfig, target: ModelConfig, build: Build) -> DrafterReader:
    drafter = NGramDrafter(
        config.num_speculative_tokens, max_ngram=config.max_ngram, min_ngram=config.min_ngram
    )
    return lambda _: drafter


def _plan_eagle3(config: DrafterConfig, target: ModelConfig, build: Build) -> DrafterReader:
    checkpoint = _with_vocabulary(_open(config), target.vocab_size)
    head = Eagle3Config.from_hf(checkpoint.config, checkpoint.tensors, target)
    return _plan_head(partial(Eagle3, head), checkpoint, config, target, build)


def _plan_peagle(config: DrafterConfig, target: ModelConfig, build: Build) -> DrafterReader:
    checkpoint = _with_vocabulary(_open(config), target.vocab_size)
    head = PEagleConfig.from_hf(checkpoint.config, checkpoint.tensors, target)
    return _plan_head(partial(PEagle, head), checkpoint, config, target, build)


def _plan_dflash(config: DrafterConfig, target: ModelConfig, build: Build) -> DrafterReader:
    checkpoint = _with_vocabulary(_open(config), target.vocab_size)
    head = DFlashConfig.from_hf(checkpoint.config, checkpoint.tensors, target)
    return _plan_head(
        partial(DFlash, head), checkpoint, config, target, build, takes_output_rows=head.own_head
    )


def _plan_head(
    make: Callable[..., Drafter],
    checkpoint: Checkpoint,
    config: DrafterConfig,
    target: ModelConfig,
    build: Build,
    *,
    takes_output_rows: bool = True,
) -> DrafterReader:
    """Plans a head that has output rows of its own, or takes the target's where its checkpoint has none."""
    output_rows = OutputRows(checkpoint, target)
    if takes_output_rows and "lm_head.weight" not in checkpoint.tensors:
        checkpoint = replace(checkpoint, tensors={**checkpoint.tensors, "lm_head.weight": output_rows})
    plan = plan_module(
        lambda rngs: make(**_arguments(config, build), dtype=build.dtype, rngs=rngs),
        checkpoint,
        ignore=HEAD_IGNORED,
    )

    def read(target: Target) -> Drafter:
        output_rows.target = target
        return plan.read(build.mesh, packed=build.packed)

    return read


def _arguments(config: DrafterConfig, build: Build) -> dict[str, Any]:
    """What every drafter with a network takes."""
    return {
        "num_speculative_tokens": config.num_speculative_tokens,
        "probabilistic": config.sampling == "probabilistic",
    }


def _plan_eagle1(config: DrafterConfig, target: ModelConfig, build: Build) -> DrafterReader:
    checkpoint = _open(config)
    head = Eagle1Config.from_hf(checkpoint.config, checkpoint.tensors, target)
    plan = plan_module(
        lambda rngs: Eagle1(head, **_arguments(config, build), dtype=build.dtype, rngs=rngs),
        checkpoint,
        ignore=IGNORED,
    )
    return lambda _: plan.read(build.mesh, packed=build.packed)


def _plan_mtp(config: DrafterConfig, target: ModelConfig, build: Build) -> DrafterReader:
    checkpoint = _open(config)
    layer = mtp_config(checkpoint, target)
    prefix = f"{layer_name(layer)}."
    own = {name: tensor for name, tensor in checkpoint.tensors.items() if name.startswith(prefix)}
    plan = plan_module(
        lambda rngs: Mtp(layer, **_arguments(config, build), dtype=build.dtype, rngs=rngs),
        replace(checkpoint, tensors=own),
        ignore=(*IGNORED, *COPIES),
    )
    return lambda _: plan.read(build.mesh, packed=build.packed)


def _plan_draft_model(config: DrafterConfig, target: ModelConfig, build: Build) -> DrafterReader:
    plan = plan_target(_open(config), dtype=build.dtype)
    vocab_size = plan.module.config.vocab_size
    if vocab_size != target.vocab_size:
        raise ConfigError(
            f"drafter.source: the draft model has a vocabulary of {vocab_size}, "
            f"the target of {target.vocab_size}"
        )
    return lambda _: DraftModel(plan.read(build.mesh, packed=build.packed), **_arguments(config, build))


_PLANS: Mapping[str, Callable[[DrafterConfig, ModelConfig, Build], DrafterReader]] = {
    "none": _plan_none,
    "ngram": _plan_ngram,
    "eagle3": _plan_eagle3,
    "eagle1": _plan_eagle1,
    "peagle": _plan_peagle,
    "dflash": _plan_dflash,
    "mtp": _plan_mtp,
    "draft_model": _plan_draft_model,
}


def _open(config: DrafterConfig) -> Checkpoint:
    assert config.source is not None  # DrafterConfig checks it
    checkpoint = open_checkpoint(config.source, file=config.file, sha256=config.sha256)
    check_kind(config.kind, checkpoint)
    return checkpoint


@dataclass(frozen=True)
class DerivedTensor:
    """A tensor that follows from another one of the checkpoint."""

    array: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def dtype(self) -> np.dtype:
        return self.array.dtype

    def read(self) -> np.ndarray:
        return self.array


class OutputRows:
    """`lm_head.weight` of a head that brings none: the target's output rows of the tokens it drafts.

    Attributes:
      target: with its weights; to be set before the rows are read.
    """

    target: Target

    def __init__(self, checkpoint: Checkpoint, target: ModelConfig):
        d2t = checkpoint.tensors.get("d2t")
        self._ids = np.arange(target.vocab_size) if d2t is None else _target_ids(d2t.read())
        self._width = target.hidden_size

    @property
    def shape(self) -> tuple[int, ...]:
        return (self._ids.size, self._width)

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(np.float32)

    def read(self) -> np.ndarray:
        return np.asarray(self.target.output_kernel).T[self._ids]

    def read_blocks(self) -> Blocks | None:
        kernel = self.target.output_kernel
        if not isinstance(kernel, PackedWeight):
            return None
        stored = kernel.stored(self._ids)
        return Blocks(*(None if array is None else np.asarray(array) for array in stored))  # type: ignore[arg-type]


def _target_ids(d2t: np.ndarray) -> np.ndarray:
    return d2t + np.arange(d2t.size)


def _with_vocabulary(checkpoint: Checkpoint, vocab_size: int) -> Checkpoint:
    """Checks a head's vocabulary maps, adds a `t2d` that was not saved, and drops maps of all tokens."""
    tensors = dict(checkpoint.tensors)
    if "d2t" not in tensors:
        return checkpoint
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
