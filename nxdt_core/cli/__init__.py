"""The command ``nxdt``: one file a command group, each imported only when it is asked for.

The commands hold no logic: they parse, call the layer below, and print. What they print for a program to read
(``--json``) goes to standard output alone; notes and errors go to standard error.
"""

from nxdt_core.cli.app import main

__all__ = ["main"]
