"""Kernels of the recurrences whose state maps keys to values: the gated delta rule, and Mamba-2."""
