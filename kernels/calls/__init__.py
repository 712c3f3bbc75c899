"""How kernels in Numba and Triton become calls of JAX."""
