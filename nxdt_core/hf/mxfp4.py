"""Weights of four bits in the files of gpt-oss (MXFP4 of the OCP Microscaling Formats specification), read as bfloat16.

A matrix [experts, in, out] is two tensors of bytes: ``…_blocks`` [experts, out, in / 32, 16] with two numbers in each,
and ``…_scales`` [experts, out, in / 32] with the exponent of each 32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from nxdt_core.distributed.devices import HOST

__all__ = ["BLOCKS", "SCALES", "PackedMatrices"]

BLOCKS, SCALES = "_blocks", "_scales"
"""Endings of the names of the two tensors."""

_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values by their three bits; the fourth is the sign."""
_BIAS = 127
"""Bias of the exponents."""


class PackedMatrices:
    """One tensor of an open file of safetensors, made of two: has the methods of a file and of a slice of it."""

    def __init__(self, blocks: Any, scales: Any, name: str) -> None:
        """
        Args:
            blocks: open file that has the tensor ``name`` + ``_blocks``.
            scales: open file that has ``name`` + ``_scales``.
            name: of the matrices.
        """
        self._blocks, self._scales, self._name = blocks, scales, name

    def problem(self) -> str | None:
        """Return why the two tensors do not belong together; None where they do."""
        blocks, scales = (
            self._blocks.get_slice(f"{self._name}{BLOCKS}"),
            self._scales.get_slice(f"{self._name}{SCALES}"),
        )
        shape = blocks.get_shape()
        if len(shape) != 4 or shape[:-1] != scales.get_shape() or {blocks.get_dtype(), scales.get_dtype()} != {"U8"}:
            return f"'{self._name}{BLOCKS}' {shape} and its scales {scales.get_shape()} are not bytes of one matrix"
        return None

    def get_slice(self, name: str) -> PackedMatrices:
        """Return what has shape and dtype."""
        return self

    def get_dtype(self) -> str:
        """Return the dtype that is read."""
        return "BF16"

    def get_shape(self) -> list[int]:
        """Return [experts, in, out]."""
        *outer, rows, groups, half = self._blocks.get_slice(f"{self._name}{BLOCKS}").get_shape()
        return [*outer, groups * half * 2, rows]

    def get_tensor(self, name: str) -> torch.Tensor:
        """Return the matrices in bfloat16, a transposed view."""
        blocks = self._blocks.get_tensor(f"{self._name}{BLOCKS}")
        scales = self._scales.get_tensor(f"{self._name}{SCALES}")
        signed = torch.tensor((*_POSITIVE, *(-number for number in _POSITIVE)), dtype=torch.bfloat16, device=HOST)
        byte = torch.arange(256, device=HOST)
        pairs = torch.stack((signed[byte % 16], signed[byte // 16]), -1)
        factors = torch.exp2(scales.float() - _BIAS).bfloat16()
        *experts, inputs, outputs = self.get_shape()
        matrices = torch.empty(*experts, outputs, inputs, dtype=torch.bfloat16, device=HOST)
        for matrix, packed, factor in zip(matrices, blocks, factors, strict=True):  # an expert at a time
            numbers = functional.embedding(packed.int(), pairs).flatten(-2)  # [out, in / 32, 32]
            torch.mul(numbers, factor.unsqueeze(-1), out=matrix.view(numbers.shape))
        return matrices.mT
