"""`jaxspec bench`, for a clone of the repository: `python scripts/bench_generate.py --help`."""

import sys

from jaxspec.commands.bench import main

if __name__ == "__main__":
    sys.exit(main())
