"""Loads an engine by name, or answers prompts in one call."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack, overload

import jax.numpy as jnp

from jaxspec.attention import CacheShape
from jaxspec.config import (
    DEFAULT_MODEL,
    Config,
    ConfigError,
    DrafterConfig,
    EngineConfig,
    EngineOptions,
    SourceConfig,
    resolve_config,
)
from jaxspec.drafters.base import Drafter, Target
from jaxspec.drafters.formats import DrafterChoice, drafter_keys
from jaxspec.drafters.loading import Build, place_drafter, plan_drafter
from jaxspec.engine.api.devices import check_devices
from jaxspec.engine.api.engine import Engine, parse_modes
from jaxspec.engine.api.gpu_packages import check_gpu_packages
from jaxspec.engine.api.prompts import Prompt, as_prompts, is_one_prompt
from jaxspec.engine.api.samples import Params, check_count, params_of_prompts
from jaxspec.engine.device.compilation_cache import compilation_cache
from jaxspec.engine.host.answer import Generation
from jaxspec.engine.rounds.options import GenerateOptions, ModelOptions, split_options
from jaxspec.engine.rounds.weights import follow
from jaxspec.files import Checkpoint, open_checkpoint
from jaxspec.jax_settings import Device, choose_devices, own_settings, platform
from jaxspec.models.target import plan_target, plan_weights, target_config
from jaxspec.sampling import SamplingMode, required_mode
from jaxspec.sharding import make_mesh
from jaxspec.weights.array_weights import batches, finite_check, overwrite
from jaxspec.weights.memory import Names
from jaxspec.weights.packed_weights import keeps_packed, resolve_activations, resolve_gpu_activations


def load(
    model: str | Path | Mapping[str, Any] = DEFAULT_MODEL,
    *,
    weights: Any = None,
    names: Names | None = None,
    drafter: DrafterChoice | None = None,
    device: Device | None = None,
    sampling_modes: Sequence[str | SamplingMode] = ("greedy", "sampled"),
    progress: bool = True,
    **engine: Unpack[EngineOptions],
) -> Engine:
    """Loads a target and its drafter, and compiles the engine's programs.

    Args:
      model: the name of a configuration (`jaxspec.list_configs()`), the path of a TOML configuration, or
        a checkpoint: a folder, a .gguf file or a Hugging Face Hub id. With a checkpoint, drafts come from
        prompt lookup, unless `drafter` says otherwise. With `weights`, also the contents of a `config.json`,
        for a target without a tokenizer.
      weights: the target's weights from memory, in place of the checkpoint's: a mapping of Hugging Face names
        to arrays of NumPy or JAX, or the tree that `Engine.weights` gives, in its form or as orbax restores
        it. They are copied, arrays of JAX from device to device, and never packed.
      names: translates the names of another library's tree. Called with an array's path in the tree, joined
        by dots; returns a Hugging Face name, or that and the order of the array's axes in the tensor's, where
        those in a tuple become one (`("…q_proj.weight", ((1, 2), 0))`), or None to leave it out.
      drafter: how to draft, in place of the configuration's drafter: a kind ("ngram", or "none" for plain
        decoding), the checkpoint of a head or of a smaller model, the name of a configuration whose drafter
        to take, keys of `DrafterConfig` to set ({"kind": "eagle3", "source": "path/of/head"}), a
        `DrafterConfig`, or a `jaxspec.drafters.Drafter` that was made in Python.
      device: where to run: a `jax.Device`, "cpu", "gpu" or "gpu:1" (the place in `jax.local_devices`); or
        `tensor_parallel` of them in a list. None takes `jax.default_device` if it is set, else this process's
        first device; with `tensor_parallel` the others of its platform follow in their order.
      sampling_modes: the decode programs to compile, "greedy", "sampled" or both. A `SamplingMode` compiles
        a single program, for requests that need no higher mode.
      progress: show progress bars.
      **engine: fields of `EngineConfig` to set, for example batch_size=1.

    Raises:
      ConfigError: the configuration is wrong, or does not fit the machine.
      CheckpointError: a checkpoint cannot be read, or does not hold what the model needs.
    """
    named = _from_memory(model, weights) if isinstance(model, Mapping) else resolve_config(model)
    config = named.replace(drafter=drafter_keys(drafter), engine=engine)
    devices = choose_devices(device, config.engine.tensor_parallel)
    made = drafter if isinstance(drafter, Drafter) else None
    given = None if weights is None else GivenWeights(weights, names, model)
    with own_settings(devices[0]):
        return _load(config, devices, sampling_modes, progress, made, given)


def _load(
    config: Config,
    devices: Device,
    sampling_modes: Sequence[str | SamplingMode],
    progress: bool,
    made: Drafter | None,
    given: "GivenWeights | None",
) -> Engine:
    parse_modes(sampling_modes)
    check_gpu_packages()
    target_source = config.target
    mesh = make_mesh(config.engine.tensor_parallel, devices)
    checkpoint = given.checkpoint() if given else None
    checkpoint = checkpoint or open_checkpoint(
        target_source.source, file=target_source.file, sha256=target_source.sha256, progress=progress
    )
    shape = target_config(checkpoint)
    check_devices(config.engine, shape)
    config.engine.check_fits(backend=platform(), model_limit=shape.max_position_embeddings)
    dtype = jnp.dtype(config.engine.dtype_on(platform()))
    max_model_len = config.engine.max_model_len_on(platform(), shape.max_position_embeddings)
    sizes: dict[str, Any] = {"dtype": dtype, "devices": mesh.size, "max_model_len": max_model_len}
    activations = resolve_activations(config.engine.cpu_activations, dtype, devices=mesh.size)
    if config.engine.gpu_activations is not None:
        activations = resolve_gpu_activations(config.engine.gpu_activations, dtype)
    if given is not None and config.engine.output_dtype is not None:
        raise ConfigError("engine.output_dtype has no effect on weights from memory, which are never rounded")
    if given is None:
        plan = plan_target(checkpoint, **sizes, output_dtype=config.engine.output_dtype)
    else:
        plan = plan_weights(checkpoint, given.weights, given.names, **sizes)
    _check_cache(config.engine, plan.module, mesh.devices.flat[0])
    # Decoding is bound by the bandwidth for weights, so packed ones stay packed where that works.
    packed = config.engine.packed is not False and given is None and keeps_packed(dtype, devices=mesh.size)
    codes = config.engine.packed is True
    build = Build(dtype, mesh, packed, codes, activations, checkpoint.tokenizer, progress, max_model_len)
    if made is None:
        read_drafter = plan_drafter(config.drafter, plan.module.config, build)
    else:
        read_drafter = lambda target: place_drafter(made, mesh)  # noqa: E731
    # The plans have checked names and shapes; only now are weights read.
    target = plan.read(mesh, packed=packed, codes=codes, activations=activations)
    drafting = read_drafter(target)
    if given is not None:
        following = follow(target, drafting, given.weights, given.names)
        finite_check(following)()
        overwrite(batches(following))
    with compilation_cache():
        return Engine(
            target,
            drafting,
            tokenizer=checkpoint.tokenizer,
            eos_token_ids=checkpoint.eos_token_ids,
            config=config.engine,
            mesh=mesh,
            sampling_modes=sampling_modes,
            is_adaptive=config.drafter.is_adaptive and made is None,
            generation=checkpoint.generation,
            progress=progress,
        )


def _check_cache(config: EngineConfig, target: Target, device: Any) -> None:
    """Raises ConfigError if no layer can have keys and values in 8 bits, or the device cannot read them."""
    if config.cache_dtype != "float8_e4m3fn":
        return
    asked = "engine.cache_dtype 'float8_e4m3fn'"
    if not any(isinstance(shape, CacheShape) and shape.planes == 2 for shape in target.cache_shapes):
        raise ConfigError(
            f"{asked} is not supported for {target.config.family}: its cache has no keys and values by head"
        )
    capability = getattr(device, "compute_capability", None)
    if capability is not None and float(capability) < 8.9:
        raise ConfigError(f"{asked} needs a GPU of compute capability 8.9 or more, and this has {capability}")


@dataclass(frozen=True, eq=False)
class GivenWeights:
    """Weights from memory: the arguments of `load`."""

    weights: Any
    names: Names | None
    model: str | Path | Mapping[str, Any]

    def checkpoint(self) -> Checkpoint | None:
        """A checkpoint without tensors; None if the model has one."""
        if not isinstance(self.model, Mapping):
            return None
        ends = self.model.get("eos_token_id")
        ids = [token for token in (ends if isinstance(ends, list | tuple) else [ends]) if token is not None]
        return Checkpoint("weights", self.model, {}, eos_token_ids=tuple(ids))


def _from_memory(model: Mapping[str, Any], weights: Any) -> Config:
    """The configuration of a target that is a `config.json` with weights from memory.

    Raises:
      ConfigError: there are no weights.
    """
    if weights is None:
        raise ConfigError("model is the contents of a config.json, and weights are missing")
    return Config("weights", SourceConfig("weights"), DrafterConfig("ngram"))


# A string is a sequence of strings, too, and checkers take the first that fits.
@overload
def generate(  # type: ignore[overload-overlap]
    prompts: Prompt,
    model: str | Path = ...,
    *,
    params: Params = ...,
    n: None = ...,
    **options: Unpack[ModelOptions],
) -> Generation: ...


@overload
def generate(  # type: ignore[overload-overlap]
    prompts: Prompt, model: str | Path = ..., *, params: Params = ..., n: int, **options: Unpack[ModelOptions]
) -> list[Generation]: ...


@overload
def generate(
    prompts: Sequence[Prompt],
    model: str | Path = ...,
    *,
    params: Params | Sequence[Params] = ...,
    n: None = ...,
    **options: Unpack[ModelOptions],
) -> list[Generation]: ...


@overload
def generate(
    prompts: Sequence[Prompt],
    model: str | Path = ...,
    *,
    params: Params | Sequence[Params] = ...,
    n: int,
    **options: Unpack[ModelOptions],
) -> list[list[Generation]]: ...


def generate(
    prompts: Prompt | Sequence[Prompt],
    model: str | Path = DEFAULT_MODEL,
    *,
    params: Params | Sequence[Params] = None,
    n: int | None = None,
    drafter: DrafterChoice | None = None,
    device: Device | None = None,
    progress: bool = True,
    engine: EngineOptions | None = None,
    **options: Unpack[GenerateOptions],
) -> Generation | list[Any]:
    """Loads a model and answers one prompt or several. For more than one call, use `load`.

    Args:
      prompts: a string (a user's turn), chat messages, token ids, or a list of any of these.
      model, drafter, device, progress: see `load`.
      params, n, best_of: as in `Engine.generate`; the fields of `params` alternatively as keywords.
      raw: use strings as they are, without the chat template.
      chat_template_kwargs, continue_final_message, special_tokens_as_text: as in `Engine.generate`.
      engine: fields of `EngineConfig`; by default batch_size is the number of answers, at most 8.
      **sampling: fields of `SamplingParams`: max_new_tokens, temperature, top_p, seed, stop, …

    Returns:
      What `Engine.generate` returns.

    Raises:
      ValueError: a prompt, a parameter, the configuration or a checkpoint is bad.
    """
    every = as_prompts(prompts)
    number = None if is_one_prompt(prompts) else len(every)
    drawn = check_count("best_of", options.get("best_of"), check_count("n", n))
    _, sampling = split_options(options)
    sampling.pop("best_of", None)
    asked, _ = params_of_prompts(params, sampling, number)
    sizes: EngineOptions = {"batch_size": max(1, min(len(every) * drawn, 8)), **(engine or {})}
    mode = max(map(required_mode, asked), default=SamplingMode.GREEDY)
    loaded = load(model, drafter=drafter, device=device, sampling_modes=(mode,), progress=progress, **sizes)
    ask: Any = loaded.generate  # too many unions for its overloads
    return ask(prompts, params, n=n, **options)
