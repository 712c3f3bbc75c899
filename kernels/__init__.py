"""Kernels of jaxspec, one folder per operation.

Every operation has a pure-JAX reference, written to be read, that runs everywhere. It may also have a Triton
kernel for GPUs and a Numba kernel for CPUs, of the same signature. `jaxspec_kernels.op` chooses between
them. This package never imports jaxspec.

Axes in shape comments: `B` slots, `Q` query rows per slot, `K` drafts, `P` page size, `T` page-table
width, `H` key/value heads, `G` query heads per key/value head (so H*G query heads), `D` head size,
`V` vocabulary.
"""
