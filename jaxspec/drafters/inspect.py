"""Describes a drafter's checkpoint: its kind, the target it fits, the layers it reads, loading's assumptions.

It uses the config readers and the plan of loading itself. Of the weights, it reads only the map of a draft
vocabulary, and quantized ones if it is asked how devices would split them.
"""

from dataclasses import dataclass
from pathlib import Path

import jax.numpy as jnp

from jaxspec.config import ConfigError, DrafterConfig, ModelConfig, SourceConfig
from jaxspec.drafters.base import Build, Description
from jaxspec.drafters.formats import identify
from jaxspec.drafters.loading import plan_drafter
from jaxspec.drafters.registry import DRAFTERS
from jaxspec.files import CheckpointError, open_checkpoint
from jaxspec.files.hub import hub_folder, is_hub_id
from jaxspec.files.json_file import read_json
from jaxspec.files.quantized.codes import stored_forms
from jaxspec.models.target import plan_target, target_config


@dataclass(frozen=True, kw_only=True)
class Report(Description):
    """The description of a drafter's checkpoint.

    Attributes:
      name: the checkpoint's name.
      method: the kind of drafter, with an article.
      producer: the producer of its format.
      weights: the formats of its weights, if some are quantized.
      split: how devices would split the weights of a whole model, if that was asked; see `ModulePlan.split`.
      problem: why it cannot be loaded, for the given target if there is one; None if it can.
    """

    name: str
    method: str
    producer: str
    weights: tuple[str, ...] = ()
    split: tuple[str, ...] = ()
    problem: str | None = None


def inspect(drafter: SourceConfig, target: SourceConfig | None = None, devices: int = 1) -> Report:
    """Describes a drafter's checkpoint, and checks whether it fits a target.

    Args:
      drafter: where its checkpoint is.
      target: where the target's is; from the Hub, only its `config.json` is downloaded.
      devices: with more than one, also says how they would split the weights of `drafter`, a whole model in
        bfloat16. Quantized weights are read for it.

    Raises:
      CheckpointError: a checkpoint cannot be opened, or `drafter` is not a drafter of a known kind.
      ConfigError: `devices` is given for a head, or cannot split the model; or the config
        of the target, or a size in the drafter's, is not valid.
    """
    checkpoint = open_checkpoint(drafter.source, file=drafter.file, sha256=drafter.sha256)
    found = next(iter(identify(checkpoint).items()), None)
    if found is None:
        raise CheckpointError(f"{checkpoint.name}: neither a known head nor a whole model")
    kind, producer = found
    split: dict[str, str] = {}
    if devices > 1:
        try:
            plan = plan_target(checkpoint, dtype=jnp.dtype(jnp.bfloat16), devices=devices)
        except CheckpointError as error:
            raise CheckpointError(f"{error}; only a whole model can be split") from error
        split = plan.split(devices)
    problem = None
    if kind not in DRAFTERS:
        problem = f"{kind} is not supported"
        return Report(name=checkpoint.name, method=f"a {kind} head", producer=producer, problem=problem)
    given = None if target is None else _read_target(target)
    description = DRAFTERS[kind].describe(checkpoint, given)
    fitting = given or description.stand_in
    if fitting is not None:
        config = DrafterConfig(kind, 1, source=drafter.source, file=drafter.file, sha256=drafter.sha256)
        try:
            plan_drafter(config, fitting, Build(jnp.dtype(jnp.float32)))
        except (ConfigError, CheckpointError) as error:
            problem = str(error)
    return Report(
        name=checkpoint.name,
        method=DRAFTERS[kind].title,
        producer=producer,
        problem=problem,
        weights=stored_forms(checkpoint.tensors),
        split=tuple(f"{where}: {names}" for where, names in split.items()),
        **vars(description),
    )


def _read_target(source: SourceConfig) -> ModelConfig:
    if is_hub_id(source.source) and not Path(source.source).expanduser().exists():
        folder = hub_folder(source.source, "config.json")
        return ModelConfig.from_hf(read_json(folder / "config.json"))
    return target_config(open_checkpoint(source.source, file=source.file, sha256=source.sha256))
