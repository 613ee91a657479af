"""The command line of another process of this run."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from nxdt_core.config import ResolvedConfig

__all__ = ["interpreter_words"]


def interpreter_words(config: ResolvedConfig, command: Sequence[str]) -> list[str]:
    """Return the words behind the interpreter that carry out a command for the same configuration.

    Args:
        config: its source and overrides are those of the command.
        command: verb and options.
    """
    here = sys.path[0] in ("", os.getcwd()) and not sys.flags.safe_path
    words = ["-m", "nxdt_core", *command, "--", config.source, *config.overrides]
    return words if here else ["-P", *words]
