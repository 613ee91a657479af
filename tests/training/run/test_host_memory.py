"""Page faults of a process that allocates and frees tensors as training on the host does."""

from __future__ import annotations

import os
import sys

import pytest

from tests import processes
from tests.sampling import slow

PROGRAM = """
import resource, sys
import torch
from nxdt_core.distributed.host_memory import keep_freed_memory

def steps(count):
    for _ in range(count):
        tensors = [torch.zeros(2**21) for _ in range(4)]  # 8 MiB each
        del tensors

found = keep_freed_memory()
steps(3)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
steps(5)
print(found, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
PAGES = 5 * 4 * 2**11
"""Of all tensors of the steps that count."""


def faults(**variables: str) -> tuple[bool, int]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    ran = processes.run(
        [sys.executable, "-c", PROGRAM], env=inherited | variables, capture_output=True, text=True, check=True
    )
    kept, count = ran.stdout.split()
    return kept == "True", int(count)


def test_freed_memory_is_used_again_without_page_faults() -> None:
    kept, count = faults()
    assert kept
    assert count < PAGES / 100


@pytest.mark.parametrize(
    "variables",
    [
        slow({"MALLOC_MMAP_THRESHOLD_": "65536"}),
        {"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=65536"},
    ],
    ids=str,
)
def test_variables_of_the_c_library_take_precedence(variables: dict[str, str]) -> None:
    kept, count = faults(**variables)
    assert not kept
    assert count > PAGES / 2
