"""``python -m nxdt_core``: the same command as ``nxdt``, for environments whose scripts are not on the path."""

import sys

from nxdt_core.system.parent import end_with_parent

if __name__ == "__main__":
    end_with_parent()  # before anything that takes time
    from nxdt_core.cli import main

    sys.exit(main())
