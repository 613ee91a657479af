"""Page faults of a process that allocates and frees memory as training on the host does with its tensors."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from nxdt_core.distributed import host_memory
from tests.sampling import slow

PROGRAM = """
import importlib.util, resource, sys

if sys.argv[2] == "torch":
    import torch
    from nxdt_core.distributed import host_memory
    filled = lambda: torch.zeros(2**21)
else:
    spec = importlib.util.spec_from_file_location("host_memory", sys.argv[1])
    host_memory = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(host_memory)
    filled = lambda: bytearray(b"0") * 2**23

def steps(count):
    for _ in range(count):
        tensors = [filled() for _ in range(4)]  # 8 MiB each
        del tensors

found = host_memory.keep_freed_memory()
steps(3)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
steps(5)
print(found, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
PAGES = 5 * 4 * 2**11
"""Of all tensors of the steps that count."""


def faults(kind: str, **variables: str) -> tuple[bool, int]:
    """Of tensors of ``torch``, or of ``bytes`` that the same allocator gives without three seconds of imports."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    words = [sys.executable, "-c", PROGRAM, host_memory.__file__, kind]
    ran = subprocess.run(words, env=inherited | variables, capture_output=True, text=True, check=True)
    kept, count = ran.stdout.split()
    return kept == "True", int(count)


@pytest.mark.parametrize("kind", [slow("torch"), "bytes"])
def test_freed_memory_is_used_again_without_page_faults(kind: str) -> None:
    kept, count = faults(kind)
    assert kept
    assert count < PAGES / 100


@pytest.mark.parametrize("kind", [slow("torch"), "bytes"])
@pytest.mark.parametrize(
    "variables",
    [
        slow({"MALLOC_MMAP_THRESHOLD_": "65536"}),
        {"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=65536"},
    ],
    ids=str,
)
def test_variables_of_the_c_library_take_precedence(kind: str, variables: dict[str, str]) -> None:
    kept, count = faults(kind, **variables)
    assert not kept
    assert count > PAGES / 2
