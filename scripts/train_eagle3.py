"""The command `jaxspec-train` out of a checkout: `python scripts/train_eagle3.py --help`."""

import sys

from jaxspec.train_command import main

if __name__ == "__main__":
    sys.exit(main())
