"""How many rows each expert has, as products of groups ask for it: offsets on the device, or numbers on the host."""

from __future__ import annotations

import torch

from nxdt_core.models.host_values import host_values

__all__ = ["RowGroups"]


class RowGroups:
    """Rows in consecutive groups, some of which may be empty. All products of a layer share one."""

    def __init__(self, counts: torch.Tensor, sizes: list[int] | None = None) -> None:
        """``counts``: int [groups], rows of each; ``sizes``: the same on the host, where it knows them."""
        self.counts = counts
        self._offsets: torch.Tensor | None = None
        self._sizes = sizes

    @property
    def offsets(self) -> torch.Tensor:
        """Return the end of each group, int32 [groups]."""
        if self._offsets is None:
            self._offsets = self.counts.cumsum(0).to(torch.int32)
        return self._offsets

    @property
    def sizes(self) -> list[int]:
        """Return the number of rows of each group. The host waits for the device, the first time."""
        if self._sizes is None:
            self._sizes = host_values(self.counts)
        return self._sizes
