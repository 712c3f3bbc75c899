"""`jaxspec batch`, for a clone of the repository: `python scripts/generate_batch.py --help`."""

import sys

from jaxspec.commands.batch import main

if __name__ == "__main__":
    sys.exit(main())
