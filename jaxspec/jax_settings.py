"""The settings and the device with which jaxspec traces, compiles and runs, whatever the program has set.

JAX's settings come from environment variables, from `jax.config.update` and from context managers, before or
after an engine is loaded. A context manager holds in its own thread only and overrides the other two, so
`own_settings` is one, entered once in every thread that traces, compiles or runs for this package.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeAlias

import jax
import numpy as np

# JAX has no public way to set most of these for one thread. What a version of JAX lacks is left out.
from jax._src import api as jax_api
from jax._src import config as jax_config
from jax._src import mesh as jax_mesh

from jaxspec.errors import ConfigError, one_line

_SETTINGS: dict[str, Any] = {
    # Dtypes and shapes.
    "jax_enable_x64": False,
    "jax_numpy_dtype_promotion": "standard",
    "jax_numpy_rank_promotion": "allow",
    "jax_default_matmul_precision": None,
    "jax_allow_f16_reductions": True,
    "jax_explicit_x64_dtypes": "warn",
    # Random draws of initial weights; answers have draws of their own.
    "jax_default_prng_impl": "threefry2x32",
    "jax_threefry_partitionable": True,
    "jax_threefry_gpu_kernel_lowering": False,
    "jax_random_seed_offset": 0,
    "jax_enable_custom_prng": False,
    "jax_legacy_prng_key": "allow",
    "jax_debug_key_reuse": False,
    "jax_high_dynamic_range_gumbel": False,
    # Checks of the user's own program. Ours has NaN where nothing may read, and arrays that it donates.
    "jax_debug_nans": False,
    "jax_debug_infs": False,
    "jax_enable_checks": False,
    "jax_check_tracer_leaks": False,
    "jax_check_static_indices": False,
    "jax_error_checking_behavior_nan": "ignore",
    "jax_error_checking_behavior_divide": "ignore",
    "jax_error_checking_behavior_oob": "ignore",
    "jax_pallas_enable_debug_checks": False,
    "jax_pallas_poison_buffers": False,
    "jax_captured_constants_warn_bytes": 2 * 10**9,
    "jax_transfer_guard_host_to_device": "allow",
    "jax_transfer_guard_device_to_device": "allow",
    "jax_transfer_guard_device_to_host": "allow",
    "jax_raise_persistent_cache_errors": False,
    "jax_compilation_cache_check_contents": False,
    # Whether and how programs are traced and compiled.
    "jax_disable_jit": False,
    "jax_no_tracing": False,
    "jax_no_execution": False,
    "jax_softmax_custom_jvp": False,
    "jax_optimization_level": "UNKNOWN",
    "jax_memory_fitting_level": "O2",
    "jax_exec_time_optimization_effort": 0.0,
    "jax_memory_fitting_effort": 0.0,
    "jax_enable_pgle": False,
    "jax_compiler_enable_remat_pass": True,
    # Other implementations of transformations, which JAX tries out.
    "jax_scan3": False,
    "jax_remat3": False,
    "jax_custom_vjp3": False,
}

_CONTEXTS = (
    "mesh_context_manager",
    "abstract_mesh_context_manager",
    "device_context",
    "compute_on_context_manager",
    "xla_metadata_context_manager",
)
"""What other context managers of JAX set: `with mesh`, `jax.set_mesh`, `compute_on`, `set_xla_metadata`."""

Device: TypeAlias = jax.Device | str | Sequence[jax.Device | str]
"""A device, "cpu", "gpu" or "gpu:1" (the number is the place in `jax.local_devices`), or several of these."""


@contextmanager
def own_settings(device: jax.Device | None = None) -> Iterator[None]:
    """Traces, compiles and runs under this package's settings; a `with` block or a decorator of a function.

    Args:
      device: where arrays without a place of their own go, and whose platform chooses kernels; None takes
        `default_device`.

    Raises:
      ConfigError: JAX finds no device.
    """
    device = device or default_device()
    with ExitStack() as stack:
        # Leaving JAX's context managers for NaN does not restore this one.
        _swap(stack, getattr(jax_api, "_post_hook_state", None), None)
        for name in _CONTEXTS:
            # Newer versions of JAX keep the one for the mesh in the module of meshes.
            holder = getattr(jax_config, name, None) or getattr(jax_mesh, name, None)
            _swap(stack, holder, jax_config.config_ext.unset)
        for name, value in (*_SETTINGS.items(), ("jax_default_device", device)):
            state = jax_config.config_states.get(name)
            if state is not None:
                stack.enter_context(state(value))
        stack.enter_context(np.errstate(divide="warn", over="warn", under="ignore", invalid="warn"))
        yield


def _swap(stack: ExitStack, holder: Any, value: Any) -> None:
    if holder is not None:
        stack.callback(holder.set_local, holder.swap_local(value))


def local_devices(platform: str | None = None) -> list[jax.Device]:
    """This process's devices of a platform, or of JAX's default one.

    Raises:
      ConfigError: JAX cannot use the platforms that it was told to use, or finds no device of this one.
    """
    try:
        return jax.local_devices(backend=platform)
    except (RuntimeError, AssertionError) as error:
        told = os.environ.get("JAX_PLATFORMS") or getattr(jax.config, "jax_platforms", None)
        setting = f"JAX_PLATFORMS is {told!r}, but " if told else ""
        wanted = "device" if platform is None else f"device {platform!r}"
        reason = one_line(error) or "its platform cannot be used here"
        raise ConfigError(f"{setting}jax finds no {wanted}: {reason}") from None


def default_device() -> jax.Device:
    """`jax.default_device`, else this process's first device.

    Raises:
      ConfigError: see `local_devices`.
    """
    chosen = getattr(jax.config, "jax_default_device", None)
    if chosen is None or isinstance(chosen, str):
        return local_devices(chosen)[0]
    return _of_this_process(chosen)


def platform() -> str:
    """The default device's platform: "cpu" or "gpu"."""
    return default_device().platform


def choose_devices(device: Device | None = None, count: int | None = None) -> list[jax.Device]:
    """The devices to use.

    Args:
      device: those to use: a platform for its first ones, or one device for each. None takes
        `jax.default_device` first, then the others of its platform in their order.
      count: how many are needed; None takes all that there are of a platform, or all that are named.

    Raises:
      ConfigError: there are fewer, another number is named, or they are not of one platform.
    """
    if device is None:
        first = default_device()
        every = [first, *(other for other in local_devices(first.platform) if other != first)]
        return _first(every, count)
    named = device.split(",") if isinstance(device, str) else device
    named = list(named) if isinstance(named, Sequence) else [named]
    if len(named) == 1 and isinstance(named[0], str) and named[0] and ":" not in named[0]:
        return _first(local_devices(named[0]), count)
    found = [_named(part) for part in named]
    if count is not None and len(found) != count:
        raise ConfigError(f"device names {len(found)} devices, but engine.tensor_parallel is {count}")
    if not found or len(set(found)) < len(found) or len({each.platform for each in found}) > 1:
        raise ConfigError(f"device must name different devices of one platform, got {device!r}")
    return found


def training_devices(device: Device | None = None) -> list[jax.Device]:
    """All devices that `device` names; for None `jax.default_device`, if that is one device, else all of the
    default platform.

    Raises:
      ConfigError: see `choose_devices`.
    """
    chosen = getattr(jax.config, "jax_default_device", None)
    return choose_devices(chosen if device is None and isinstance(chosen, jax.Device) else device)


def _first(devices: list[jax.Device], count: int | None) -> list[jax.Device]:
    if count is not None and count > len(devices):
        raise ConfigError(
            f"engine.tensor_parallel is {count}, but jax sees {len(devices)} devices of this process"
        )
    return devices[:count]


def _named(name: jax.Device | str) -> jax.Device:
    if isinstance(name, jax.Device):
        return _of_this_process(name)
    if not isinstance(name, str):
        raise ConfigError(f'device must be a jax.Device or text like "cpu" or "gpu:1", got {name!r}')
    kind, _, number = name.strip().partition(":")
    devices = local_devices(kind or "of no name")
    if not number.isascii() or not number.isdigit() or int(number) >= len(devices):
        raise ConfigError(f"device {name!r}: this process has {kind}:0 to {kind}:{len(devices) - 1}")
    return devices[int(number)]


def _of_this_process(device: jax.Device) -> jax.Device:
    if device.process_index != jax.process_index():
        raise ConfigError(f"device {device}: belongs to another process")
    return device
