"""The command `jaxspec-train` for a clone of the repository: `python scripts/train_eagle3.py --help`."""

import sys

from jaxspec.train_command import main

if __name__ == "__main__":
    sys.exit(main())
