"""What a process of tests holds."""

import os
from pathlib import Path


def is_large() -> bool:
    """Whether this process holds more than 1.5 GB, or comes near Linux's limit of 65,530 memory maps."""
    maps, pages = Path("/proc/self/maps"), Path("/proc/self/statm")
    if not maps.exists():
        return False
    resident = int(pages.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return resident > 1.5e9 or maps.read_text().count("\n") > 20_000
