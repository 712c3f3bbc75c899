"""Programs that cost more to run than to compile: with the optimisations that conftest.py leaves out."""

from collections.abc import Callable

import jax

OPTIONS: dict[str, str | bool] = {
    "xla_backend_optimization_level": "3",
    "xla_llvm_disable_expensive_passes": False,
}
if jax.__version_info__ < (0, 11):
    OPTIONS["xla_cpu_use_fusion_emitters"] = True


def optimised(function: Callable) -> Callable:
    """`jax.jit` with them."""
    return jax.jit(function, compiler_options=OPTIONS)
