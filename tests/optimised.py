"""Compiling with the optimisations that conftest.py turns off, for programs that take long to run."""

from collections.abc import Callable

import jax

OPTIONS: dict[str, str | bool] = {
    "xla_backend_optimization_level": "3",
    "xla_llvm_disable_expensive_passes": False,
}
if jax.__version_info__ < (0, 11):
    OPTIONS["xla_cpu_use_fusion_emitters"] = True


def optimised(function: Callable) -> Callable:
    """`jax.jit` with these optimisations."""
    return jax.jit(function, compiler_options=OPTIONS)
