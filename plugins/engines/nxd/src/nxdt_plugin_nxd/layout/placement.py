"""Where each rank is along the dimensions of a layout: tensor parallel ranks are neighbours, stages farthest apart."""

from __future__ import annotations

from dataclasses import dataclass

from nxdt_core.protocols.mesh import MeshSizes

__all__ = ["MeshCoordinates"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshCoordinates:
    """This process's index along each dimension."""

    sizes: MeshSizes
    tp: int
    dp: int
    pp: int

    @classmethod
    def of(cls, rank: int, sizes: MeshSizes) -> MeshCoordinates:
        """Return the place of a rank, as data loading and checkpoints assume it."""
        rest, tp = divmod(rank, sizes.tp)
        pp, dp = divmod(rest, sizes.dp)
        return cls(sizes=sizes, tp=tp, dp=dp, pp=pp)

    @property
    def ep(self) -> int:
        """Return the index among the ranks that share the experts: neighbours along the data parallel ranks."""
        return self.dp % self.sizes.ep

    @property
    def expert_dp(self) -> int:
        """Return the index among the ranks that hold the same experts."""
        return self.dp // self.sizes.ep

    def as_dict(self) -> dict[str, int]:
        """Return the index by the name of the dimension."""
        return {"tp": self.tp, "dp": self.dp, "pp": self.pp, "ep": self.ep}
