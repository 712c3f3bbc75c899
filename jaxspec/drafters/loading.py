"""Which drafter a configuration means."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxspec.checkpoints import Checkpoint, CheckpointError, open_checkpoint
from jaxspec.config import ConfigError, DrafterConfig
from jaxspec.drafters.base import Drafter, Target
from jaxspec.drafters.draft_model import DraftModel
from jaxspec.drafters.eagle1 import Eagle1, Eagle1Config
from jaxspec.drafters.eagle3 import Eagle3, Eagle3Config
from jaxspec.drafters.ngram import NGramDrafter
from jaxspec.drafters.none import NoDrafter
from jaxspec.drafters.vocabulary import check_vocabulary
from jaxspec.models.loading import IGNORED, load_module, load_target


@dataclass(frozen=True)
class Build:
    """How the engine wants a drafter's arrays.

    Attributes:
      page_size: P of the cache.
      dtype: of weights and cache.
      mesh: the devices that weights are split over; one by default.
    """

    page_size: int
    dtype: jnp.dtype
    mesh: Mesh | None = None


def load_drafter(config: DrafterConfig, target: Target, build: Build) -> Drafter:
    """The drafter that `config` names, with its weights.

    An EAGLE-3 head without `lm_head.weight` takes the target's output rows of the tokens that it drafts.

    Raises:
      ConfigError: it does not fit the target.
      CheckpointError: its checkpoint cannot be read, or holds other tensors than it should.
    """
    return _LOADERS[config.kind](config, target, build)


def _load_none(config: DrafterConfig, target: Target, build: Build) -> Drafter:
    return NoDrafter()


def _load_ngram(config: DrafterConfig, target: Target, build: Build) -> Drafter:
    return NGramDrafter(config.num_speculative_tokens, max_ngram=config.max_ngram, min_ngram=config.min_ngram)


def _load_eagle3(config: DrafterConfig, target: Target, build: Build) -> Drafter:
    checkpoint = _with_membership(_open(config), target.config.vocab_size)
    head = Eagle3Config.from_hf(checkpoint.config, checkpoint.tensors, target.config)
    checkpoint = _with_output_rows(checkpoint, target)
    return load_module(
        lambda rngs: Eagle3(
            head,
            num_speculative_tokens=config.num_speculative_tokens,
            page_size=build.page_size,
            probabilistic=config.sampling == "probabilistic",
            dtype=build.dtype,
            rngs=rngs,
        ),
        checkpoint,
        mesh=build.mesh,
        ignore=(*IGNORED, "verifier_lm_head.weight", "verifier_norm.weight"),
    )


def _load_eagle1(config: DrafterConfig, target: Target, build: Build) -> Drafter:
    checkpoint = _open(config)
    head = Eagle1Config.from_hf(checkpoint.config, checkpoint.tensors, target.config)
    return load_module(
        lambda rngs: Eagle1(
            head,
            num_speculative_tokens=config.num_speculative_tokens,
            page_size=build.page_size,
            probabilistic=config.sampling == "probabilistic",
            dtype=build.dtype,
            rngs=rngs,
        ),
        checkpoint,
        mesh=build.mesh,
        ignore=IGNORED,
    )


def _load_draft_model(config: DrafterConfig, target: Target, build: Build) -> Drafter:
    model = load_target(_open(config), dtype=build.dtype, mesh=build.mesh)
    if model.config.vocab_size != target.config.vocab_size:
        raise ConfigError(
            f"drafter.source: the draft model has a vocabulary of {model.config.vocab_size}, "
            f"the target of {target.config.vocab_size}"
        )
    return DraftModel(
        model,
        num_speculative_tokens=config.num_speculative_tokens,
        page_size=build.page_size,
        probabilistic=config.sampling == "probabilistic",
    )


_LOADERS: Mapping[str, Callable[[DrafterConfig, Target, Build], Drafter]] = {
    "none": _load_none,
    "ngram": _load_ngram,
    "eagle3": _load_eagle3,
    "eagle1": _load_eagle1,
    "draft_model": _load_draft_model,
}


def _open(config: DrafterConfig) -> Checkpoint:
    assert config.source is not None  # DrafterConfig checks it
    return open_checkpoint(config.source, file=config.file, sha256=config.sha256)


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


def _with_membership(checkpoint: Checkpoint, vocab_size: int) -> Checkpoint:
    """Checks a head's vocabulary maps, and adds `t2d` where only `d2t` was saved."""
    tensors = dict(checkpoint.tensors)
    if "d2t" not in tensors:
        return checkpoint
    d2t = tensors["d2t"].read()
    if "t2d" not in tensors:
        ids = d2t + np.arange(d2t.size)
        member = np.zeros(vocab_size, bool)
        member[ids[(ids >= 0) & (ids < vocab_size)]] = True
        tensors["t2d"] = DerivedTensor(member)
    wrong = check_vocabulary(d2t, tensors["t2d"].read())
    if wrong:
        raise CheckpointError(f"{checkpoint.name}: {wrong}")
    return replace(checkpoint, tensors=tensors)


def _with_output_rows(checkpoint: Checkpoint, target: Target) -> Checkpoint:
    """Adds the target's output rows of the drafted tokens where the head brings no `lm_head.weight`."""
    if "lm_head.weight" in checkpoint.tensors:
        return checkpoint
    rows = np.asarray(target.output_kernel).T
    if "d2t" in checkpoint.tensors:
        d2t = checkpoint.tensors["d2t"].read()
        rows = rows[d2t + np.arange(d2t.size)]
    return replace(checkpoint, tensors={**checkpoint.tensors, "lm_head.weight": DerivedTensor(rows)})
