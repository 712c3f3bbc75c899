"""`jaxspec convert`, for a clone of the repository: `python scripts/convert_checkpoint.py --help`."""

import sys

from jaxspec.commands.convert import main

if __name__ == "__main__":
    sys.exit(main())
