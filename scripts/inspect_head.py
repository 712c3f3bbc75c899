"""`jaxspec inspect`, for a clone of the repository: `python scripts/inspect_head.py --help`."""

import sys

from jaxspec.commands.inspect import main

if __name__ == "__main__":
    sys.exit(main())
