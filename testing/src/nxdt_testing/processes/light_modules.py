"""Which heavy libraries a module imports, found in a separate process."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache

__all__ = ["heavy_imports"]

_HEAVY = ("torch", "pytorch_lightning", "lightning", "transformers", "numpy")
_PROBE = """
import sys
from importlib import import_module
for name in sys.argv[2:]:
    import_module(name)
print(*sorted(set(sys.argv[1].split(",")) & set(sys.modules)))
"""


@cache
def heavy_imports(*modules: str) -> list[str]:
    """Return the heavy libraries that importing ``modules`` imports as well.

    Args:
        modules: names of modules, which are imported one after the other in a new process.
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(each for each in sys.path if each)}
    command = [sys.executable, "-c", _PROBE, ",".join(_HEAVY), *modules]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, f"{' and '.join(modules)} cannot be imported in a new process: {done.stderr.strip()}"
    return done.stdout.split()
