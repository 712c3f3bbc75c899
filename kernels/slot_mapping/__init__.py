"""Where in the paged cache each row's keys and values are written."""

from jaxspec_kernels.dispatch import Op
from jaxspec_kernels.slot_mapping import reference

slot_mapping = Op("slot_mapping", xla=reference.slot_mapping)

__all__ = ["slot_mapping"]
