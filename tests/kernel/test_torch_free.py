"""The kernel runs where torch, numpy and their like cannot be imported."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import importlib, pkgutil, sys
for heavy in ("torch", "numpy", "pytorch_lightning", "transformers", "omegaconf", "yaml"):
    sys.modules[heavy] = None
import nxdt_core.api, nxdt_core.errors, nxdt_core.kernel, nxdt_core.protocols
for package in (nxdt_core.kernel, nxdt_core.protocols):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        importlib.import_module(module.name)
kernel = nxdt_core.kernel.Kernel.start(strict=True)
for kind in kernel.registry.kinds():
    kernel.registry.names(kind.name)
print(kernel.fingerprint())
"""


def test_nothing_of_the_kernel_imports_torch():
    result = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert len(result.stdout.strip()) == 32


def test_importing_the_core_starts_nothing():
    script = "import sys, nxdt_core; print(sorted(name for name in sys.modules if name.startswith('nxdt')))"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "['nxdt_core', 'nxdt_core._version']"
