"""The thread that owns the device: rounds of dispatches, compiling, new weights."""
