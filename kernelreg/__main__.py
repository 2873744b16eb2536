"""``python -m kernelreg``."""

import sys

from kernelreg.cli import main

if __name__ == "__main__":
    sys.exit(main())
