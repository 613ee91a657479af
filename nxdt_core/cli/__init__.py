"""The command ``nxdt``: one file a command group, each imported only when it is asked for.

A command parses, calls the layers below, and prints; what no other layer needs, such as the comparison of two
checkpoints, is in its file. What it prints for a program to read (``--json``) goes to standard output alone; notes and
errors go to standard error.
"""

from nxdt_core.cli.app import main

__all__ = ["main"]
