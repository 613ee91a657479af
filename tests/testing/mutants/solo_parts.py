"""A plugin file that offers the engine of ``examples/one_process_engine`` from its source, without installing it."""

from __future__ import annotations

import sys
from pathlib import Path

from nxdt_core.api import hookimpl

_SOURCE = str(Path(__file__).parents[3] / "examples/one_process_engine/src")


@hookimpl
def nxdt_engines():
    if _SOURCE not in sys.path:
        sys.path.append(_SOURCE)
    import acme_engine

    return acme_engine.nxdt_engines()
