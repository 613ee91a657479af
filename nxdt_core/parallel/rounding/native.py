"""Kernels of native.cpp for hosts, which the machine's C++ compiler builds when a process first needs them.

Inductor's C++ reads the bits of a float by way of memory, which takes longer than the rest of an update together.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import shlex
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from nxdt_core.nn.random.positions import Rows

__all__ = ["available", "kernel_for"]

_SOURCE = Path(__file__).with_name("native.cpp")
_FLAGS = (
    *("-std=c++17", "-O3", "-march=native", "-fopenmp", "-fPIC", "-shared"),
    *("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
)
_COMPILE_TIMEOUT_S = 120

_log = logging.getLogger(__name__)

Kernel = Callable[[Rows, Sequence[torch.Tensor], Sequence[torch.Tensor | None]], None]


class _Block(ctypes.Structure):
    _fields_ = (
        ("threads", ctypes.c_int64),
        ("elements", ctypes.c_int64),
        ("columns", ctypes.c_int64),
        ("first", ctypes.c_uint32),
        ("gap", ctypes.c_uint32),
    )


def available() -> bool:
    """Return whether this machine can build the kernels. Builds them, and warns once if it cannot."""
    return _library() is not None


def kernel_for(name: str, tensors: Sequence[torch.Tensor]) -> Kernel | None:
    """Return the kernel of a function for the dtypes of ``tensors``, or None where there is none.

    It takes the rows of a block in the whole parameter, the block's elements, flat, and what all elements share.
    """
    library = _library()
    symbol = "_".join([name, *(str(tensor.dtype).removeprefix("torch.") for tensor in tensors)])
    function = getattr(library, symbol, None)
    return None if function is None else functools.partial(_call, function)


def _call(function: Any, rows: Rows, tensors: Sequence[torch.Tensor], others: Sequence[torch.Tensor | None]) -> None:
    block = _Block(
        threads=torch.get_num_threads(),
        elements=tensors[0].numel(),
        columns=rows.columns if rows.count > 1 else 0,
        first=rows.first % 2**32,
        gap=rows.gap % 2**32,
    )
    pointers = [None if each is None else ctypes.c_void_p(each.data_ptr()) for each in (*tensors, *others)]
    function(ctypes.byref(block), *pointers)


@functools.cache
def _library() -> ctypes.CDLL | None:
    """Each process builds its own, in half a second: what others could have written is never loaded."""
    compiler = shlex.split(os.environ.get("CXX", "")) or ["g++"]
    try:
        with tempfile.TemporaryDirectory(prefix="nxdt-") as folder:
            built = Path(folder) / "native.so"
            command = [*compiler, *_FLAGS, str(_SOURCE), "-o", str(built)]
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=_COMPILE_TIMEOUT_S)
            return ctypes.CDLL(str(built))
    except (OSError, subprocess.SubprocessError) as error:
        _log.warning(
            "Stochastic rounding runs operation by operation on this machine's CPU, which takes longer: %s failed "
            "with %s. Install a C++ compiler with OpenMP, such as g++, or name one in CXX.",
            compiler[0],
            _reason(error),
        )
        return None


def _reason(error: OSError | subprocess.SubprocessError) -> str:
    """The first line that says why."""
    if isinstance(error, subprocess.CalledProcessError):
        status = f"exit status {error.returncode}"
        return next((f"{status}: {line}" for line in error.stderr.splitlines()), status)
    return next(iter(str(error).splitlines()), type(error).__name__)
