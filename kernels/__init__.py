"""Kernels of jaxspec, one folder per operation.

Every operation has a pure-JAX reference written to be read, which runs everywhere, and may have
a GPU kernel of the same signature beside it. `jaxspec_kernels.dispatch` chooses between them.
This package imports jax and, for GPU kernels, jax-triton; it never imports jaxspec.

Axes in shape comments: `B` slots, `Q` query rows per slot, `K` drafts, `P` page size, `T` page-table
width, `N` key/value heads, `G` query heads per key/value head, `H` query heads (N * G), `D` head size,
`V` vocabulary.
"""
