"""`jaxspec train`, for a clone of the repository: `python scripts/train_eagle3.py --help`."""

import sys

from jaxspec.commands.train import main

if __name__ == "__main__":
    sys.exit(main())
