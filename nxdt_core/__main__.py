"""``python -m nxdt_core``: the same command as ``nxdt``, for environments whose scripts are not on the path."""

import sys

from nxdt_core.cli import main

if __name__ == "__main__":
    sys.exit(main())
